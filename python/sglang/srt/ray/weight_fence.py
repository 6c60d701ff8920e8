"""The verdict over one engine's weights: performs the effects of `weight_sync.states` on a live engine.

Lives in the process that launched the engine, on the event loop of its tokenizer manager, where every pause, session,
resume and request of the engine passes. It asks the ranks what landed in them and believes nobody else; a rank that
doesn't answer is taken for written. `tokenizer_manager.py` is where it is hooked in, `weight_routes.py` its HTTP face.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from sglang.srt.ray.rank_calls import (
    RANK_ANSWER_TIMEOUT_S,
    RankCalls,
    failure_of_a_client,
    what_is_missing,
)
from sglang.srt.ray.weight_history import SyncHistory, describe_rank
from sglang.srt.ray.weight_metrics import WeightMetrics
from sglang.srt.ray.weight_sync.control import OpenRequest
from sglang.srt.ray.weight_sync.errors import (
    DeadlineExceededError,
    EngineRequestError,
    EngineTornError,
    TransactionBusyError,
    WeightSyncError,
)
from sglang.srt.ray.weight_sync.ledger import RankStatus
from sglang.srt.ray.weight_sync.states import Transaction, WeightState, WeightStateMachine

logger = logging.getLogger(__name__)

DEFAULT_STEP_TIMEOUT_S = 60.0


class EngineEffects(Protocol):
    """What the fence needs of the engine; implemented by the tokenizer manager."""

    async def hold_generation(self, mode: str) -> None: ...
    async def let_generation_go(self) -> None: ...
    async def begin_session(self) -> None: ...
    async def end_session(self) -> None: ...
    async def try_flush_cache(self) -> bool: ...
    async def move_version_label(self, version: str) -> None: ...
    async def fail_open_requests(self, reason: str) -> None: ...


class WeightFence:
    """State of one engine's weights and everything that changes it. All methods run on one event loop."""

    def __init__(
        self,
        effects: EngineEffects,
        actors: Sequence[Any],
        *,
        version: str,
        metrics: WeightMetrics | None = None,
    ) -> None:
        """Args:
        effects: what changes the engine.
        actors: SchedulerActor handles in rank order.
        version: the label that is served now.
        metrics: told of every sync that ends.
        """
        self._metrics = metrics
        self.history = SyncHistory()
        self._paused_at = 0.0
        self._left_open: str | None = None
        self._effects = effects
        self._ranks = RankCalls(actors)
        self.machine = WeightStateMachine(version)
        self._lock = asyncio.Lock()
        self._expiry: asyncio.Task[None] | None = None
        self._expires_at = 0.0
        self._stuck: tuple[str, asyncio.Task[None]] | None = None
        self._resume_pending: str | None = None
        self._rank_reports: list[RankStatus] = []
        self._step_seconds: dict[str, float] = {}
        self._client_sessions = 0

    # What a publisher calls

    async def open(
        self, request: OpenRequest, *, timeout_s: float, own: bool = False
    ) -> dict[str, Any]:
        """Pause, open the session: SERVING or TORN -> SYNCING. `own`: see `Transaction`."""
        transaction = Transaction(
            id=request.transaction,
            sequence=request.sequence,
            owner=request.owner,
            version=request.version,
            own=own,
        )
        async with self._locked(timeout_s):
            await self._make_way(transaction, force=request.force)
            if request.partial and self.machine.torn_reason is not None:
                raise EngineTornError(
                    f"a partial sync can't mend torn weights ({self.machine.torn_reason}); send all of them"
                )
            if self.machine.open(transaction):
                self._arm(transaction, request.ttl_s)
                self._step_seconds, self._resume_pending = {}, None
                self._paused_at = time.monotonic()
                await self._step(
                    transaction,
                    "pause",
                    lambda: self._effects.hold_generation(request.pause),
                    timeout_s,
                )
                await self._step(transaction, "begin", lambda: self._begin(transaction), timeout_s)
        return self.status()

    async def seal(
        self, transaction_id: str, *, resume: bool, timeout_s: float, stay_paused: bool = False
    ) -> dict[str, Any]:
        """Prove every rank, rebuild, drop the old cache, move the label.

        With `stay_paused` a resumed version is held back until somebody else lets generation go on.
        """
        async with self._locked(timeout_s):
            held = self.machine.open_transaction
            if held is not None and held.id == transaction_id and not self.machine.sealed:
                await self._prove_ranks(held)
                await self._step(held, "end", self._effects.end_session, timeout_s)
                await self._step(held, "flush", lambda: self._drop_old_prefixes(held), timeout_s)
                if held.version is not None:
                    version = held.version
                    await self._step(
                        held,
                        "version",
                        lambda: self._effects.move_version_label(version),
                        timeout_s,
                    )
            self.machine.seal(transaction_id)
            if resume:
                await self._resume(transaction_id, timeout_s, stay_paused=stay_paused)
        return self.status()

    async def resume(self, transaction_id: str, *, timeout_s: float) -> dict[str, Any]:
        """Serve what was sealed."""
        async with self._locked(timeout_s):
            await self._resume(transaction_id, timeout_s)
        return self.status()

    async def abort(self, transaction_id: str, reason: str, *, timeout_s: float) -> dict[str, Any]:
        """Give up: SERVING(v) if nothing landed, TORN otherwise. Repeating it is harmless."""
        async with self._locked(timeout_s):
            held = self.machine.open_transaction
            if held is not None and held.id == transaction_id:
                await self._fail(held, reason)
        return self.status()

    def status(self) -> dict[str, Any]:
        """What `GET /weight_sync` shows; plain JSON values."""
        machine, held = self.machine, self.machine.open_transaction
        return {
            "state": machine.state.value,
            "version": machine.version,
            "transaction": None if held is None else dataclasses.asdict(held),
            "sealed": machine.sealed,
            "expires_in_s": None
            if held is None
            else round(max(self._expires_at - time.monotonic(), 0.0), 3),
            "torn_reason": machine.torn_reason,
            "session_left_open": self._left_open,
            "resume_pending": self._resume_pending is not None,
            "verified": None
            if machine.last_commitment is None
            else machine.last_commitment.verified,
            "last_transaction": None
            if machine.last_commitment is None
            else machine.last_commitment.id,
            "last_sequence": machine.last_sequence,
            "step_seconds": dict(self._step_seconds),
            "ranks": [dataclasses.asdict(report) for report in self._rank_reports],
        }

    async def overview(self) -> dict[str, Any]:
        """What `GET /weight_sync/overview` shows: `status`, what each rank says just now, and the last syncs."""
        answers = await self._ranks.each("weight_status")
        ranks = [describe_rank(rank, answer) for rank, answer in enumerate(answers)]
        return self.status() | {"ranks": ranks, "history": self.history.as_json()}

    # What stands in everybody's way

    def check_serving(self) -> None:
        """Raises:
        EngineTornError: requests can't be served.
        """
        if self.machine.state is WeightState.TORN:
            raise EngineTornError(
                f"the weights of this engine are TORN: {self.machine.torn_reason}. Sync again completely, or reload "
                f"them from disk (update_weights_from_disk)"
            )

    async def check_may_resume(self) -> None:
        """Refuse `continue_generation` while weights are, or may be, half new.

        Raises:
            EngineTornError: the engine is TORN, or a client's session wrote and was not ended.
            TransactionBusyError: a publisher's transaction is open; it resumes by itself.
        """
        self.check_serving()
        held = self.machine.open_transaction
        if held is None:
            return
        if held.version is not None:
            raise TransactionBusyError(
                f"{held.owner!r} is bringing this engine to version {held.version!r} (transaction {held.id!r}); it "
                f"resumes generation itself"
            )
        if await self._ranks.anything_written(held):
            raise EngineTornError(
                "weights were written in the open session: call end_weight_update before generation goes on"
            )

    # A client that drives the session with its own verbs

    async def client_begin(self, begin: Callable[[], Awaitable[Any]], *, ttl_s: float) -> Any:
        """Run a client's `begin_weight_update` as an unlabelled transaction."""
        self._client_sessions += 1
        number = self._client_sessions
        transaction = Transaction(
            id=f"client-{number}", sequence=number, owner="client verbs", version=None
        )
        async with self._locked(DEFAULT_STEP_TIMEOUT_S):
            await self._make_way(transaction, force=False)
            await self._ranks.ask("admit_transaction", None)
            answer = await begin()
            if answer[0]:
                self._paused_at, self._step_seconds = time.monotonic(), {}
                self.machine.open(transaction)
                self._arm(transaction, ttl_s)
            return answer

    async def client_end(self, end: Callable[[], Awaitable[Any]]) -> Any:
        """Run a client's `end_weight_update`; a failed pull in its session makes the engine TORN.

        Cached prefixes of the weights that were replaced serve nobody from then on.

        Raises:
            EngineTornError: naming the rank and what failed on it.
        """
        async with self._locked(DEFAULT_STEP_TIMEOUT_S):
            held = self.machine.open_transaction
            if held is None or held.version is not None:
                return await end()
            statuses = (
                await self._ranks.statuses()
            )  # while the session is open that they know their pulls by
            answer = await end()
            if reason := failure_of_a_client(
                statuses, answer, torn=self.machine.torn_reason is not None
            ):
                await self._fail(held, reason, written=True)
                self.check_serving()
            if any(status.session_open and status.written for status in statuses):
                await self._drop_old_prefixes(held)  # upstream's end does not, nor do these clients
            self.machine.seal(held.id)
            self.machine.resume(held.id, verified=False)
            self._disarm()
            self._tell_ended("unverified")
            return answer

    async def reloaded(self, version: str | None) -> None:
        """All weights were loaded from disk."""
        self._disarm()
        before = self.machine.version
        self.machine.reload(version)
        self.history.reloaded(before, self.machine.version)
        if self._metrics is not None:
            self._metrics.mended()

    # Steps

    async def _step(
        self,
        held: Transaction,
        phase: str,
        effect: Callable[[], Coroutine[Any, Any, None]],
        timeout_s: float,
    ) -> None:
        """One effect with a deadline; its failure fails the transaction.

        An effect that does not return goes on in the background: upstream's barriers can't be cancelled, and a reply
        that comes late would be taken for the answer to the next request.
        """
        started = time.monotonic()
        task = asyncio.ensure_future(effect())
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        self._step_seconds[phase] = time.monotonic() - started
        if not done:
            self._stuck = (phase, task)
            silent = await self._ranks.silent()
            who = (
                f"rank(s) {silent!r} do not answer at all"
                if silent
                else "every rank answers, a barrier does not end"
            )
            error: WeightSyncError = DeadlineExceededError(
                f"{phase} did not end within {timeout_s:g} s: {who}; restart the engine if that stays",
                phase=phase,
            )
        elif (cause := task.exception()) is not None:
            error = (
                cause
                if isinstance(cause, WeightSyncError)
                else EngineRequestError(str(cause), phase=phase)
            )
            error.phase = error.phase or phase
        else:
            return
        await self._fail(held, f"{phase} failed: {error}")
        raise error

    async def _begin(self, transaction: Transaction) -> None:
        await self._ranks.ask("admit_transaction", transaction.id)
        await self._effects.begin_session()

    async def _prove_ranks(self, held: Transaction) -> None:
        """Every rank must have completed this transaction.

        Raises:
            EngineRequestError: naming the first rank that has not.
        """
        statuses = await self._ranks.statuses()
        for rank, status in enumerate(statuses):
            if status.transaction == held.id and status.report is not None and not status.in_flight:
                continue
            error = EngineRequestError(
                f"rank {rank} has not completed transaction {held.id!r}: {what_is_missing(status, held.id)}",
                rank=rank,
                phase="seal",
            )
            await self._fail(held, str(error))
            raise error
        self._rank_reports = statuses

    async def _drop_old_prefixes(self, held: Transaction) -> None:
        if not await self._effects.try_flush_cache():
            await self._ranks.ask("isolate_prefix_cache", held.id)

    async def _resume(
        self, transaction_id: str, timeout_s: float, *, stay_paused: bool = False
    ) -> None:
        verified = all(s.report is not None and s.report.verified for s in self._rank_reports)
        if self.machine.resume(transaction_id, verified=verified):
            self._disarm()
            self._tell_ended("committed")
            self._resume_pending = None if stay_paused else transaction_id
        if self._resume_pending == transaction_id:
            await self._let_go(timeout_s)

    async def _let_go(self, timeout_s: float) -> None:
        """The committed version is served from here on. A failure leaves it paused, and a repeated resume tries again.

        Raises:
            DeadlineExceededError, EngineRequestError: of phase "resume".
        """
        task = asyncio.ensure_future(self._effects.let_generation_go())
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            self._stuck = ("resume", task)
            raise DeadlineExceededError(
                f"the new version is committed but generation did not go on within {timeout_s:g} s: rank(s) "
                f"{await self._ranks.silent()!r} do not answer; resume again, or restart the engine",
                phase="resume",
            )
        if (cause := task.exception()) is not None:
            raise EngineRequestError(
                f"the new version is committed but generation did not go on: {cause}; resume again",
                phase="resume",
            ) from cause
        self._resume_pending = None

    async def _fail(self, held: Transaction, reason: str, *, written: bool | None = None) -> None:
        """End a transaction that did not come through, by what the ranks say of it."""
        self._disarm()
        if written is None:
            written = await self._ranks.anything_written(held)
        state = self.machine.fail(held.id, reason=reason, written=written)
        logger.error(
            "weight transaction %s of %s failed (%s): %s", held.id, held.owner, state.value, reason
        )
        if state is WeightState.TORN:
            await self._effects.fail_open_requests(self.machine.torn_reason or reason)
        elif self._stuck is None:
            await self._close_untouched_session()
            await self._effects.let_generation_go()
        self._tell_ended("torn" if state is WeightState.TORN else "aborted", reason)

    async def _close_untouched_session(self) -> None:
        """Close a session in which nothing was written.

        The engine serves its old weights whether that works or not: the next sync takes over a session that stayed
        open, and `status` shows why it did.
        """
        task = asyncio.ensure_future(self._effects.end_session())
        done, _ = await asyncio.wait([task], timeout=RANK_ANSWER_TIMEOUT_S)
        if not done:
            self._stuck = ("end", task)
            self._left_open = f"end did not return within {RANK_ANSWER_TIMEOUT_S:g} s"
        else:
            cause = task.exception()
            self._left_open = None if cause is None else str(cause)

    def _tell_ended(self, outcome: str, reason: str | None = None) -> None:
        pause_seconds = time.monotonic() - self._paused_at
        ranks = self._rank_reports if outcome == "committed" else ()
        self.history.ended(
            outcome,
            reason=reason,
            step_seconds=self._step_seconds,
            pause_seconds=pause_seconds,
            ranks=ranks,
        )
        if self._metrics is not None:
            self._metrics.ended(
                outcome,
                self.machine.state,
                step_seconds=self._step_seconds,
                pause_seconds=pause_seconds,
                ranks=ranks,
            )

    async def _make_way(self, transaction: Transaction, *, force: bool) -> None:
        """Check that nothing stuck remains, and take over from another owner when that was asked for."""
        if self._stuck is not None:
            phase, task = self._stuck
            if not task.done():
                raise TransactionBusyError(
                    f"an earlier {phase!r} has not come back from rank(s) {await self._ranks.silent()!r}; "
                    f"restart the engine",
                    phase=phase,
                )
            self._stuck = None
        held = self.machine.open_transaction
        if held is not None and held != transaction and force:
            await self._fail(held, f"{transaction.owner!r} took over from {held.owner!r}")

    # The owner's time

    def _arm(self, transaction: Transaction, ttl_s: float) -> None:
        self._disarm()
        self.history.began(transaction, self.machine.version)
        self._expires_at = time.monotonic() + ttl_s
        self._expiry = asyncio.ensure_future(self._expire(transaction, ttl_s))

    def _disarm(self) -> None:
        if self._expiry is not None and self._expiry is not asyncio.current_task():
            self._expiry.cancel()
        self._expiry = None

    async def _expire(self, transaction: Transaction, ttl_s: float) -> None:
        await asyncio.sleep(ttl_s)
        async with self._lock:
            if self.machine.open_transaction == transaction:
                await self._fail(
                    transaction, f"owner {transaction.owner!r} did not finish within {ttl_s:g} s"
                )

    def _locked(self, timeout_s: float) -> _Locked:
        return _Locked(self._lock, timeout_s)


class _Locked:
    """The fence's lock with a deadline: who waits longer is told who holds it up."""

    def __init__(self, lock: asyncio.Lock, timeout_s: float) -> None:
        self._lock = lock
        self._timeout_s = timeout_s

    async def __aenter__(self) -> None:
        try:
            await asyncio.wait_for(self._lock.acquire(), self._timeout_s)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"another weight operation of this engine was still going on after {self._timeout_s:g} s"
            ) from error

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
