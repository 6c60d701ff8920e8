"""The engine side of a weight sync, one per rank: pin parameters, pull into them, prove what arrived.

A pull writes straight into live parameters, so it is refused unless a weight session is open and generation is
paused; everything that can be checked is checked before its first byte moves, and its success is proved by address and
by digest. The publisher's counterpart is `publisher.py`; the engine-wide verdict is the fence's; none knows HTTP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from sglang.srt.ray.weight_sync import loader, preflight, transports
from sglang.srt.ray.weight_sync.digest import settle, tensor_digests
from sglang.srt.ray.weight_sync.errors import (
    DeadlineExceededError,
    DigestMismatchError,
    GenerationNotPausedError,
    SessionNotOpenError,
    StaleTransactionError,
    TransferError,
    UnplannableModelError,
    WeightMismatchError,
    WeightNameError,
    WeightSyncError,
)
from sglang.srt.ray.weight_sync.lane_meter import RankLaneMeter
from sglang.srt.ray.weight_sync.layout import TensorPiece, TensorSpec, WeightLayout, repeated
from sglang.srt.ray.weight_sync.ledger import PullReport, RankLedger, RankStatus, SessionBook
from sglang.srt.ray.weight_sync.manifest import WeightManifest
from sglang.srt.ray.weight_sync.paused_loop import paused_wait
from sglang.srt.ray.weight_sync.planning import trace_shard_plan
from sglang.srt.ray.weight_sync.prefix_cache import PrefixCacheNamespace
from sglang.srt.ray.weight_sync.shadow import ShadowBuffer, Staged
from sglang.srt.ray.weight_sync.shards import ShardPlan

DEFAULT_PULL_DEADLINE_S = 60.0


class WeightReceiver:
    """Pulls weights into the parameters of one scheduler's model.

    Called by the verbs of its SchedulerActor on threads of the actor's concurrency groups; the scheduler's event loop
    runs on another thread of the same process, paused while bytes land.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        rank: int,
        pins_allowed: bool = True,
        sessions: SessionBook | None = None,
    ) -> None:
        """Args:
        scheduler: the live `Scheduler` of this process.
        rank: this rank's index in the engine, for errors and reports.
        pins_allowed: False with the memory saver on, whose releases move memory from under a pin.
        sessions: counts the scheduler's weight sessions; None where nothing ends one.
        """
        self._sessions = sessions or SessionBook()
        self._scheduler = scheduler
        self._rank = rank
        self._pins_allowed = pins_allowed
        self._pinned: dict[int, torch.Tensor] = {}
        self._pull_lock = threading.Lock()
        self._ledger = RankLedger(rank)
        self._shadow = ShadowBuffer(rank, pins_allowed=pins_allowed)
        self._admitted: str | None = None
        self._prefix_cache = PrefixCacheNamespace(scheduler)
        self.lane_meter = RankLaneMeter(next(self._model().parameters()).device, rank=rank)
        self._sleep_while_paused()

    # Layout, plan, status

    def layout(self) -> WeightLayout:
        return WeightLayout.of_model(self._model())

    def plan(self, manifest: Sequence[TensorSpec]) -> ShardPlan:
        """Which elements of the manifest's tensors each parameter takes; generation may go on meanwhile."""
        return trace_shard_plan(self._model(), manifest, self.layout().fingerprint)

    def plan_load(self, manifest: Sequence[TensorSpec]) -> ShardPlan:
        """What of a manifest the loader will take: by elements, or by names where it computes."""
        try:
            return self.plan(manifest)
        except UnplannableModelError:
            from sglang.srt.ray.weight_sync.name_coverage import plan_by_names

            return plan_by_names(self._model(), manifest, self.layout().fingerprint)

    def status(self) -> RankStatus:
        """What happened to this rank's weights. Never waits for a pull."""
        total = sum(1 for _ in self._model().named_parameters())
        is_open = self._scheduler.weight_updater._session is not None
        return self._ledger.status(self._sessions.key if is_open else None, total)

    def admit(self, transaction: str | None) -> None:
        """From now on only pulls of `transaction` may start; None admits a client's own pulls.

        The fence calls it on every rank before a transaction's first byte. A commit that was given up and comes late is
        then refused, or (when it had started) ends before the next transaction's commit gets the pull lock.
        """
        self._admitted = transaction

    def isolate_prefix_cache(self, namespace: str) -> None:
        """Make what is cached now unreachable for every request that has not started."""
        self._prefix_cache.switch(namespace)

    # Pins

    def register(self) -> dict[str, Any]:
        """Pin every parameter with NIXL, once. With the memory saver on, do nothing and say so.

        Returns:
            `registered`, and `not_reached`: what this rank computes with and no sync reaches.

        Raises:
            WeightMismatchError: a parameter is not contiguous, so it can't be a target.
        """
        # A draft proposes and the target decides, so answers stay right; it only guesses worse.
        drafts = getattr(self._scheduler, "draft_worker", None) is not None
        not_reached = ["the draft model: it keeps its weights"] if drafts else []
        if not self._pins_allowed:
            return {
                "registered": False,
                "not_reached": not_reached,
                "reason": "the memory saver is on: a pin would outlive the memory that sleep releases, "
                "so every pull pins its targets for its own duration",
            }
        targets = self._parameters()
        preflight.check_contiguous(targets, rank=self._rank)
        by_storage = {p.untyped_storage().data_ptr(): p for p in targets.values()}
        for address in list(self._pinned):
            if address not in by_storage:  # a session re-created this parameter's storage
                transports.unpin(self._pinned.pop(address))
        for address, parameter in by_storage.items():
            if address not in self._pinned:
                transports.pin(parameter)
                self._pinned[address] = parameter
        return {
            "registered": True,
            "not_reached": not_reached,
            "tensors": len(targets),
            "regions": len(self._pinned),
        }

    # Pull

    def pull(
        self,
        refs: Sequence[Any],
        names: Sequence[str | TensorPiece],
        *,
        transaction: str | None = None,
        layout_fingerprint: str | None = None,
        digests: Mapping[str, str] | None = None,
        deadline_s: float = DEFAULT_PULL_DEADLINE_S,
        after_staged: bool = False,
    ) -> PullReport:
        """Pull the tensors of `refs`, in order, into the parameters (or pieces of them) called `names`.

        Args:
            refs: RDT ObjectRefs of lists of contiguous tensors; `names` runs over all of them in order.
            transaction: what the bytes belong to; a repeated call of one that completed returns its report again,
                one that failed its error. None for a client's own pulls, which belong to the open session.
            layout_fingerprint: what the sender planned for; a rank that changed refuses.
            digests: what each name's bytes must have as digest afterwards; None leaves the pull unverified.
            deadline_s: for the whole pull, in seconds.
            after_staged: first copy what `stage` left for this transaction; `refs` then hold the rest, if any.

        Raises:
            SessionNotOpenError, GenerationNotPausedError: bytes may not land now. Nothing was written.
            WeightNameError, WeightMismatchError: names, counts, shapes or dtypes don't fit. Nothing was written.
            ReadInFlightError: an earlier read is not over. Nothing was written.
            DeadlineExceededError, TransferError, DigestMismatchError: take the targets as torn.
        """
        deadline = time.monotonic() + deadline_s
        with self._alone(deadline_s):
            if transaction is not None and self._ledger.holds(transaction):
                if self._ledger.report is not None:
                    return self._ledger.report
                if self._ledger.failure is not None:
                    raise self._ledger.failure
            self._check_writable()
            self._check_admitted(transaction)
            self._ledger.open(self._record_key(transaction), transaction)
            if layout_fingerprint is not None:
                self._check_layout(layout_fingerprint)
            pieces = [TensorPiece(name=n) if isinstance(n, str) else n for n in names]
            targets, labels = self._targets(pieces), [str(piece) for piece in pieces]
            if digests is not None:
                preflight.check_digests(labels, targets, digests, rank=self._rank)
            counts = preflight.check_sources(
                refs, labels, targets, deadline=deadline, rank=self._rank
            )
            staged = self._shadow.staged(str(transaction)) if after_staged else None
            staged_targets = self._targets(staged.pieces) if staged is not None else []
            written = [piece.name for piece in (*pieces, *(staged.pieces if staged else ()))]
            self._ledger.will_write(written)
            self._sessions.pulled = True
            try:
                copied = None if staged is None else self._copy_staged(staged, staged_targets)
                if copied is not None and not refs:
                    report = copied
                else:
                    rest = self._pull_into(
                        refs, labels, targets, counts, digests, deadline, keeper=self._ledger
                    )
                    report = rest if copied is None else _together(copied, rest)
            except WeightSyncError as error:
                self._ledger.failed(written, error)
                raise
            self._ledger.succeeded(written)
            if transaction is not None:
                self._ledger.report = report
            return report

    def stage(
        self,
        refs: Sequence[Any],
        pieces: Sequence[TensorPiece],
        *,
        transaction: str,
        layout_fingerprint: str,
        digests: Mapping[str, str],
        deadline_s: float,
    ) -> PullReport:
        """Pull and verify as `pull` does, but into the shadow buffer: no parameter is touched, generation goes on.

        Repeating it with the same transaction returns the same report, or raises the same error, again.

        Raises:
            WeightSyncError: as `pull`; the rank holds and serves what it did before.
        """
        deadline = time.monotonic() + deadline_s
        with self._alone(deadline_s):
            if (known := self._shadow.answer(transaction)) is not None:
                return known
            self._check_layout(layout_fingerprint)
            targets, labels = self._targets(pieces), [str(piece) for piece in pieces]
            preflight.check_digests(labels, targets, digests, rank=self._rank)
            counts = preflight.check_sources(
                refs, labels, targets, deadline=deadline, rank=self._rank
            )
            buffers = self._shadow.open(transaction, pieces, targets)
            try:
                report = self._pull_into(
                    refs, labels, buffers, counts, digests, deadline, keeper=self._shadow
                )
            except WeightSyncError as error:
                self._shadow.failed(error)
                raise
            self._shadow.succeeded(report)
            return report

    def release_shadow(self) -> int:
        """Give the shadow buffer's memory back; returns how many bytes it was."""
        with self._alone(DEFAULT_PULL_DEADLINE_S):
            return self._shadow.release()

    @contextlib.contextmanager
    def _alone(self, timeout_s: float) -> Iterator[None]:
        if not self._pull_lock.acquire(timeout=timeout_s):
            raise DeadlineExceededError(
                f"another write into this rank was still going on after {timeout_s:g} s",
                rank=self._rank,
                phase="wire",
            )
        try:
            yield
        finally:
            self._pull_lock.release()

    # Load

    def load(
        self,
        refs: Sequence[Any],
        *,
        load: loader.Load,
        transaction: str | None,
        index: int,
        expected: WeightManifest | None,
        deadline_s: float,
    ) -> loader.LoadedRef:
        """Give the named tensors of one ref to the engine's loader; see `loader.load_ref` for what can go wrong.

        Args:
            refs: one ref in a list, so that Ray hands it over unresolved.
            load: the scheduler's loader.
            transaction: as for `pull`; a repeated call of one that completed returns its result again.
            index: which ref of the transaction this is, counted from 0.
        """
        deadline = time.monotonic() + deadline_s
        with self._alone(deadline_s):
            if transaction is not None and self._ledger.holds(transaction):
                if index < len(self._ledger.loaded):
                    return cast(loader.LoadedRef, self._ledger.loaded[index])
                if self._ledger.failure is not None:
                    raise self._ledger.failure
            self._check_writable()
            self._check_admitted(transaction)
            self._ledger.open(self._record_key(transaction), transaction)
            (ref,) = refs
            loaded = loader.load_ref(
                ref,
                ledger=self._ledger,
                load=load,
                expected=expected,
                timeout_s=deadline - time.monotonic(),
                rank=self._rank,
            )
            self._ledger.loaded.append(loaded)
            return loaded

    def finish_load(self, transaction: str, *, verified: bool) -> PullReport:
        """All refs of the transaction were loaded: what the fence asks for before it seals.

        Args:
            verified: whether the digests that were compared came from the source itself.
        """
        with self._pull_lock:
            self._check_admitted(transaction)
            if not self._ledger.holds(transaction) or not self._ledger.loaded:
                raise WeightNameError(
                    f"nothing was loaded in transaction {transaction!r}",
                    rank=self._rank,
                    phase="load",
                )
            if self._ledger.failure is not None:
                raise self._ledger.failure
            report = loader.report_of(self._ledger.loaded, rank=self._rank)
            self._ledger.report = dataclasses.replace(report, verified=verified and report.verified)
            return self._ledger.report

    def _copy_staged(self, staged: Staged, targets: Sequence[torch.Tensor]) -> PullReport:
        """Proved bytes into the parameters. Their digests were compared in the buffer, which nobody writes since."""
        settle(targets)
        started = time.perf_counter()
        torch._foreach_copy_(list(targets), list(staged.buffers))
        settle(targets)
        return dataclasses.replace(
            staged.report,
            early_wire_seconds=staged.report.wire_seconds,
            early_verify_seconds=staged.report.verify_seconds,
            copy_seconds=time.perf_counter() - started,
        )

    def verify(self, digests: Mapping[str, str]) -> None:
        """Compare parameters with a client's manifest of digests (name -> `algorithm:hex`).

        Raises:
            WeightNameError: a name is unknown.
            DigestMismatchError: naming the tensor and both digests; the engine then counts as torn.
        """
        with self._pull_lock:
            targets = self._targets([TensorPiece(name=name) for name in digests])
            try:
                self._verify(list(digests), targets, digests)
            except DigestMismatchError as error:
                self._ledger.failed([str(error.tensor)], error)
                raise

    def _record_key(self, transaction: str | None) -> Hashable:
        return transaction or self._sessions.key

    def _pull_into(
        self,
        refs: Sequence[Any],
        names: Sequence[str],
        targets: Sequence[torch.Tensor],
        counts: Sequence[int],
        digests: Mapping[str, str] | None,
        deadline: float,
        *,
        keeper: RankLedger | ShadowBuffer,
    ) -> PullReport:
        settle(targets)
        started = time.perf_counter()
        ends = list(itertools.accumulate(counts))
        groups = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        arrived_at = started
        for wave in transports.waves(refs):
            arrived_at = self._pull_wave(
                refs[wave], groups[wave], names, targets, digests, deadline, keeper
            )
        return PullReport(
            rank=self._rank,
            total_bytes=sum(t.numel() * t.element_size() for t in targets),
            wire_seconds=arrived_at - started,
            verify_seconds=time.perf_counter() - arrived_at,
            verified=digests is not None,
        )

    def _pull_wave(
        self,
        refs: Sequence[Any],
        groups: Sequence[slice],
        names: Sequence[str],
        targets: Sequence[torch.Tensor],
        digests: Mapping[str, str] | None,
        deadline: float,
        keeper: RankLedger | ShadowBuffer,
    ) -> float:
        """Reads that may be under way together; returns when (`perf_counter`) the last one had arrived."""
        reads: list[transports.Read] = []
        arrived_at = 0.0
        # A GPU reads all of it in about the time that starting and awaiting one kernel takes.
        at_once = targets[0].device.type != "cpu"
        try:
            for ref, group in zip(refs, groups, strict=True):
                reads.append(self._start(ref, names[group], targets[group]))
            for read, group in zip(reads, groups, strict=True):
                self._finish(read, names[group], targets[group], deadline)
                arrived_at = time.perf_counter()
                # While this bucket is hashed the next ones are on the wire (NIXL has a thread of its own).
                if digests is not None and not at_once:
                    self._verify(names[group], targets[group], digests)
            if digests is not None and at_once:
                whole = slice(groups[0].start, groups[-1].stop)
                self._verify(names[whole], targets[whole], digests)
        except BaseException:
            keeper.give_up(reads)
            raise
        return arrived_at

    def _start(
        self, ref: Any, names: Sequence[str], targets: Sequence[torch.Tensor]
    ) -> transports.Read:
        try:
            return transports.Read(ref, targets)
        except transports.TRANSPORT_ERRORS as error:
            raise self._transfer_error(names, str(error)) from error

    def _finish(
        self,
        read: transports.Read,
        names: Sequence[str],
        targets: Sequence[torch.Tensor],
        deadline: float,
    ) -> None:
        try:
            arrived = read.wait(timeout_s=deadline - time.monotonic())
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the source did not deliver {_range_of(names)} in time: {error}",
                rank=self._rank,
                phase="wire",
            ) from error
        except transports.TRANSPORT_ERRORS as error:
            raise self._transfer_error(names, str(error)) from error
        for name, target, tensor in zip(names, targets, arrived, strict=True):
            if tensor.data_ptr() != target.data_ptr() or tensor.device != target.device:
                raise TransferError(
                    f"{name!r} arrived at address {tensor.data_ptr():#x} on {tensor.device}, not in the parameter at "
                    f"{target.data_ptr():#x} on {target.device}",
                    rank=self._rank,
                    tensor=name,
                    phase="wire",
                )

    def _transfer_error(self, names: Sequence[str], cause: str) -> TransferError:
        return TransferError(
            f"the transfer of {_range_of(names)} failed (its source died, or the lane broke): {cause}",
            rank=self._rank,
            phase="wire",
        )

    def _verify(
        self, names: Sequence[str], targets: Sequence[torch.Tensor], digests: Mapping[str, str]
    ) -> None:
        by_algorithm: dict[str, dict[str, torch.Tensor]] = {}
        for name, target in zip(names, targets, strict=True):
            by_algorithm.setdefault(digests[name].partition(":")[0], {})[name] = target
        for algorithm, chosen in by_algorithm.items():
            found = tensor_digests(list(chosen.values()), algorithm)
            for name, digest in zip(chosen, found, strict=True):
                if digest != digests[name]:
                    raise DigestMismatchError(
                        f"{name!r} does not hold what was sent: source {digests[name]}, here {digest}",
                        rank=self._rank,
                        tensor=name,
                        phase="verify",
                    )

    # Checks before the first byte

    def _check_admitted(self, transaction: str | None) -> None:
        if transaction != self._admitted:
            raise StaleTransactionError(
                f"this rank admits {_admission(self._admitted)}, not {_admission(transaction)}: the call comes late, "
                f"or another owner took over",
                rank=self._rank,
            )

    def _check_writable(self) -> None:
        if not self._scheduler._engine_paused:
            raise GenerationNotPausedError(
                "generation is running: call pause_generation (any mode) before weights are pulled",
                rank=self._rank,
            )
        if self._scheduler.weight_updater._session is None:
            raise SessionNotOpenError(
                "no weight session is open: call begin_weight_update before weights are pulled",
                rank=self._rank,
            )

    def _check_layout(self, expected: str) -> None:
        if (found := self.layout().fingerprint) != expected:
            raise WeightMismatchError(
                f"this rank's layout changed since it was planned (planned {expected[:16]!r}, now {found[:16]!r}); "
                f"connect again",
                rank=self._rank,
                phase="stage",
            )

    def _targets(self, pieces: Sequence[TensorPiece]) -> list[torch.Tensor]:
        parameters = self._parameters()
        if unknown := sorted({piece.name for piece in pieces} - set(parameters)):
            raise WeightNameError(
                f"unknown weight name(s) {unknown!r}; weight_layout() lists them", rank=self._rank
            )
        if duplicate := repeated(map(str, pieces)):
            raise WeightNameError(
                f"weight name(s) given more than once: {duplicate!r}", rank=self._rank
            )
        chosen = {piece.name: parameters[piece.name] for piece in pieces}
        preflight.check_contiguous(chosen, rank=self._rank)
        return [piece.of(chosen[piece.name]) for piece in pieces]

    # The scheduler

    def _model(self) -> torch.nn.Module:
        return self._scheduler.tp_worker.model_runner.model

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self._model().named_parameters()}

    def _sleep_while_paused(self) -> None:
        """Let the paused event loop sleep between its polls.

        It spins otherwise, and while a pull runs the two threads fight for the interpreter lock (a pull of 3 MB took
        several times as long); on a CPU it also takes a core away from the trainer.
        """
        record = self._scheduler._record_scheduler_state_for_paused_engine
        wait = paused_wait(self._scheduler)

        def record_and_sleep() -> None:
            record()
            wait()

        self._scheduler._record_scheduler_state_for_paused_engine = record_and_sleep


def _together(staged: PullReport, rest: PullReport) -> PullReport:
    """One report of what came through the shadow buffer and what came straight into the parameters."""
    return dataclasses.replace(
        staged,
        total_bytes=staged.total_bytes + rest.total_bytes,
        wire_seconds=staged.wire_seconds + rest.wire_seconds,
        verify_seconds=staged.verify_seconds + rest.verify_seconds,
        verified=staged.verified and rest.verified,
    )


def _admission(transaction: str | None) -> str:
    return "a client's own pulls" if transaction is None else f"transaction {transaction!r}"


def _range_of(names: Sequence[str]) -> str:
    return f"{len(names)} tensor(s) ({names[0]!r} ... {names[-1]!r})"
