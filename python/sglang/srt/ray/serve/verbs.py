"""What fleet, trainer or ingress can have one replica do: each verb acts on the engine and answers with a state.

Verbs raise typed errors and never change a flag of their own: paused and asleep are read back from the ranks.
`agent.py` puts a deadline around them. Arguments and answers are JSON values.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    ProfileReq,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang.srt.ray.memory_occupation import MemoryOccupationError, unknown_tags
from sglang.srt.ray.rank_calls import RankCalls
from sglang.srt.ray.serve.aborts import Aborts
from sglang.srt.ray.serve.results import ControlError, described
from sglang.srt.ray.weight_sync.control import PAUSE_MODES, OpenRequest
from sglang.srt.ray.weight_sync.errors import DeadlineExceededError, WeightSyncDisabledError

RPC_METHODS = frozenset(
    {"engine_state", "register_weight_for_rdt", "weight_layout", "weight_status"}
)
"""What `collective_rpc` may call on the ranks: no code and no pickles come in, and none of these writes weights."""
_STATE_TIMEOUT_S = 5.0


class ReplicaVerbs:
    """The verbs of one replica. Called on the event loop of its engine."""

    def __init__(self, engine: Any) -> None:
        """Args:
        engine: the replica's `LaunchedEngine`.
        """
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._ranks = RankCalls(engine.scheduler_actors)
        self._aborts = Aborts(
            self._manager,
            lambda verb, args: self._ranks.each(verb, *args, timeout_s=_STATE_TIMEOUT_S),
        )
        self.asleep: list[str] = []
        """Released memory tags, as the ranks acknowledged them last."""

    async def perform(
        self, verb: str, arguments: Mapping[str, Any], deadline_s: float
    ) -> Mapping[str, Any]:
        """Dispatch by name.

        Raises:
            ValueError: no such verb, or arguments that it doesn't take.
            ControlError, WeightSyncError: the engine refused.
        """
        method = _VERBS.get(verb)
        if method is None:
            raise ValueError(f"unknown control verb {verb!r}; there are {sorted(_VERBS)!r}")
        answer: Mapping[str, Any] = await method(self, deadline_s=deadline_s, **arguments)
        return answer

    async def state(self, *, deadline_s: float = _STATE_TIMEOUT_S) -> dict[str, Any]:
        """The engine's truth: what every rank says, and what the tokenizer does with new requests."""
        ranks = [
            _answer_or_raise(index, answer)
            for index, answer in enumerate(
                await self._ranks.each("engine_state", timeout_s=deadline_s)
            )
        ]
        holds = bool(self._manager.is_pause)
        fence = getattr(self._manager, "weight_fence", None)
        return {
            "paused": holds or all(rank["paused"] for rank in ranks),
            "holds_new_requests": holds,
            "asleep": sorted({tag for rank in ranks for tag in rank["asleep"]}),
            "weight_version": str(self._manager.config_value("weight_version")),
            "weights": None if fence is None else fence.status()["state"],
            "open_requests": len(self._manager.rid_to_state),
            "ranks": ranks,
        }

    async def pause(self, *, deadline_s: float, mode: str = "abort") -> dict[str, Any]:
        """Hold generation: `abort` ends all requests, `retract` and `in_place` let them go on afterwards."""
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode={mode!r} is unknown; choose one of {PAUSE_MODES!r}")
        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))
        # Without weight sync upstream's `abort` never reaches the scheduler, which then has nothing to hold.
        told = mode != "abort" or getattr(self._manager, "weight_fence", None) is not None

        def is_paused(state: Mapping[str, Any]) -> bool:
            ranks = all(rank["paused"] for rank in state["ranks"])
            return bool(state["holds_new_requests"] and (ranks or not told))

        return await self._state_when(is_paused, "pause", deadline_s)

    async def resume(self, *, deadline_s: float) -> dict[str, Any]:
        await self._manager.continue_generation(ContinueGenerationReqInput())

        def runs(state: Mapping[str, Any]) -> bool:
            return not (state["holds_new_requests"] or any(r["paused"] for r in state["ranks"]))

        return await self._state_when(runs, "resume", deadline_s)

    async def is_paused(self, *, deadline_s: float) -> dict[str, Any]:
        return await self.state(deadline_s=deadline_s)

    async def sleep(
        self, *, deadline_s: float, tags: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Release memory: `kv_cache`, `weights`, `cuda_graph`; None and [] mean all of them."""
        self._check_tags(tags)
        request = ReleaseMemoryOccupationReqInput(tags=list(tags or ()) or None)
        return await self._change_memory(self._manager.release_memory_occupation(request))

    async def wakeup(
        self, *, deadline_s: float, tags: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Take memory back; what is not released stays as it is."""
        self._check_tags(tags)
        request = ResumeMemoryOccupationReqInput(tags=list(tags or ()) or None)
        return await self._change_memory(self._manager.resume_memory_occupation(request))

    async def is_sleeping(self, *, deadline_s: float) -> dict[str, Any]:
        return await self._told_asleep()

    async def reset_prefix_cache(self, *, deadline_s: float) -> dict[str, Any]:
        """Drop everything cached; refused while requests run."""
        self._manager.auto_create_handle_loop()
        request = FlushCacheReqInput(timeout_s=max(deadline_s - 1.0, 0.0))
        answers = await self._manager.flush_cache_communicator(request)
        if refused := [answer for answer in answers if not answer.success]:
            raise ControlError(
                f"the cache was not flushed on {len(refused)} of {len(answers)} scheduler(s): requests run or wait; "
                f"pause in mode 'abort' or 'retract' first"
            )
        if self._manager.mm_processor is not None:
            self._manager.mm_processor.clear_preprocess_cache()
        return await self.state()

    async def collective_rpc(
        self, *, deadline_s: float, method: str, args: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """Call a method on every rank, data-parallel ones included; an answer or an error for each."""
        if method not in RPC_METHODS:
            raise ControlError(
                f"method {method!r} is not allowed; collective_rpc calls {sorted(RPC_METHODS)!r}",
                status=HTTPStatus.FORBIDDEN,
            )
        answers = await self._ranks.each(method, *args, timeout_s=deadline_s)
        ranks = [_described_answer(rank, answer) for rank, answer in enumerate(answers)]
        if failed := [rank for rank in ranks if "error" in rank]:
            raise ControlError(
                f"{method!r} failed on {len(failed)} of {len(ranks)} rank(s): {ranks!r}",
                status=HTTPStatus.BAD_GATEWAY,
            )
        return {"method": method, "ranks": ranks}

    async def abort_request(
        self,
        *,
        deadline_s: float,
        rids: Sequence[str] | None = None,
        abort_all: bool = False,
    ) -> dict[str, Any]:
        """Abort exactly these requests (or all), and return once they have ended: id -> found, stage, ended."""
        if abort_all == bool(rids):
            raise ValueError("give either rids (a list of request ids) or abort_all=true")
        answer = await self._aborts.abort(
            None if abort_all else rids, deadline_s=max(deadline_s - 0.5, 0.1)
        )
        if running := sorted(rid for rid, each in answer.items() if not each["ended"]):
            raise DeadlineExceededError(
                f"request(s) {running!r} had not ended after {deadline_s:g} s: {answer!r}"
            )
        return {"requests": answer}

    async def start_profile(self, *, deadline_s: float, **options: Any) -> dict[str, Any]:
        """Options are those of upstream's `/start_profile`: output_dir, num_steps, activities and others."""
        try:
            request = ProfileReq(**options)
        except TypeError as error:
            raise ValueError(f"start_profile: {error}") from error
        return _profile_answer(await self._manager.start_profile(request))

    async def stop_profile(self, *, deadline_s: float) -> dict[str, Any]:
        return _profile_answer(await self._manager.stop_profile())

    # The weight fence: what `EngineControl` speaks

    async def weight_status(self, *, deadline_s: float) -> Mapping[str, Any]:
        return dict(self._fence.status())

    async def weight_open(
        self, *, deadline_s: float, request: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return dict(await self._fence.open(OpenRequest(**request), timeout_s=deadline_s))

    async def weight_seal(
        self, *, deadline_s: float, transaction: str, resume: bool
    ) -> Mapping[str, Any]:
        return dict(await self._fence.seal(transaction, resume=resume, timeout_s=deadline_s))

    async def weight_resume(self, *, deadline_s: float, transaction: str) -> Mapping[str, Any]:
        return dict(await self._fence.resume(transaction, timeout_s=deadline_s))

    async def weight_abort(
        self, *, deadline_s: float, transaction: str, reason: str
    ) -> Mapping[str, Any]:
        return dict(await self._fence.abort(transaction, reason, timeout_s=deadline_s))

    @property
    def _fence(self) -> Any:
        fence = getattr(self._manager, "weight_fence", None)
        if fence is None:
            raise WeightSyncDisabledError(
                "this engine was started without weight sync; set enable_rdt_weight_sync in engine_kwargs"
            )
        return fence

    # Helpers

    async def _state_when(self, reached: Any, what: str, deadline_s: float) -> dict[str, Any]:
        """The state, once it is what was asked for: a scheduler takes its message between two batches."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        while True:
            state = await self.state()
            if reached(state):
                return state
            if loop.time() > deadline:
                raise DeadlineExceededError(
                    f"{what} did not reach every rank within {deadline_s:g} s: {state!r}"
                )
            await asyncio.sleep(0.01)

    async def _change_memory(self, change: Any) -> dict[str, Any]:
        try:
            await change
        except MemoryOccupationError as error:
            raise ControlError(str(error)) from error
        finally:
            self.asleep = (await self._told_asleep())["asleep"]
        return await self._told_asleep()

    async def _told_asleep(self) -> dict[str, Any]:
        state = await self.state()
        saver = bool(self._engine_has_memory_saver())
        return {
            **state,
            "sleeping": bool(state["asleep"]),
            "memory_saver": saver,
            "note": None
            if saver
            else "enable_memory_saver is off: the state is kept, no memory is given back",
        }

    def _engine_has_memory_saver(self) -> Any:
        return self._manager.config_value("enable_memory_saver")

    @staticmethod
    def _check_tags(tags: Sequence[str] | None) -> None:
        if isinstance(tags, str):
            raise ValueError(f"tags={tags!r} must be a list of strings or null")
        if refusal := unknown_tags(tags):
            raise ValueError(refusal)


def _answer_or_raise(rank: int, answer: Any) -> dict[str, Any]:
    if isinstance(answer, BaseException):
        raise ControlError(
            f"rank {rank} did not say what it does: {answer}", status=HTTPStatus.SERVICE_UNAVAILABLE
        ) from answer
    return dict(answer)


def _described_answer(rank: int, answer: Any) -> dict[str, Any]:
    if isinstance(answer, BaseException):
        return {"rank": rank, "error": described(getattr(answer, "cause", None) or answer)[1]}
    if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
        answer = dataclasses.asdict(answer)
    return {"rank": rank, "result": answer}


def _profile_answer(answer: Any) -> dict[str, Any]:
    if not answer.success:
        raise ControlError(f"profiling: {answer.message}")
    return {"message": answer.message}


_VERBS: dict[str, Any] = {
    name: getattr(ReplicaVerbs, name)
    for name in (
        "abort_request",
        "collective_rpc",
        "is_paused",
        "is_sleeping",
        "pause",
        "reset_prefix_cache",
        "resume",
        "sleep",
        "start_profile",
        "stop_profile",
        "wakeup",
        "weight_abort",
        "weight_open",
        "weight_resume",
        "weight_seal",
        "weight_status",
    )
}
