"""The tokenizer manager of an engine that takes part in weight syncs: every pause, session and resume passes its fence.

Upstream's default pause, `abort`, ends all requests but never tells the scheduler, so nothing there could know whether
bytes may land; here it is followed by a pause that does. It also looks once a second, without end, whether they have
ended; here a pause lasts as long as they take. Engines without `--enable-rdt-weight-sync` keep upstream's pause.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException

from sglang.srt.entrypoints.engine import init_tokenizer_manager
from sglang.srt.managers.io_struct import (
    AbortReq,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    PauseGenerationReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.ray.hosted_engine import parts_being_launched
from sglang.srt.ray.hosted_tokenizer import HostedTokenizerManager
from sglang.srt.ray.weight_fence import WeightFence
from sglang.srt.ray.weight_metrics import WeightMetrics
from sglang.srt.ray.weight_sync.errors import (
    DeadlineExceededError,
    EngineRequestError,
    EngineTornError,
)
from sglang.srt.runtime_context import get_device, get_observability

SESSION_TTL_VARIABLE = "SGLANG_RDT_SESSION_TTL_S"
DEFAULT_SESSION_TTL_S = 600.0
_ABORT_DEADLINE_S = 60.0
_ABORT_AGAIN_S = 0.1
"""A request that was on its way to the scheduler when all were aborted is met by the next time."""
_LOOK_EVERY_S = 0.005


class RequestRefusedError(HTTPException, ValueError):
    """A request that a torn engine turns away. Upstream's handlers know one of the two bases each."""

    def __init__(self, error: EngineTornError) -> None:
        super().__init__(status_code=HTTPStatus.SERVICE_UNAVAILABLE, detail=str(error))


class FencedCondition(asyncio.Condition):
    """The condition that requests wait on while generation is paused; a torn engine turns them away."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    async def wait_for(self, predicate: Callable[[], Any]) -> Any:
        """As the base class does, but raises what `check` raises before waiting and after every wake-up."""
        self._check()
        while not (result := predicate()):
            await self.wait()
            self._check()
        return result


class WeightSyncTokenizerManager(HostedTokenizerManager):
    """Runs in the process that launched the engine, on its event loop. Implements `weight_fence.EngineEffects`."""

    weight_fence: WeightFence

    def init_weight_update(self) -> None:
        super().init_weight_update()  # type: ignore[no-untyped-call]
        actors = parts_being_launched().ranks.scheduler_actors
        self.weight_fence = WeightFence(
            self,
            actors,
            version=str(self.config_value("weight_version")),
            metrics=WeightMetrics(own_endpoint=bool(get_observability().enable_metrics)),
        )
        self.is_pause_cond = FencedCondition(self._check_serving)

    def _check_serving(self) -> None:
        try:
            self.weight_fence.check_serving()
        except EngineTornError as error:
            raise RequestRefusedError(error) from error

    # What clients call

    async def pause_generation(self, obj: PauseGenerationReqInput) -> None:
        if obj.mode != "abort":
            await super().pause_generation(obj)
            return
        async with self.is_pause_cond:
            self.is_pause = True
            try:
                await self._end_all_requests()
            except DeadlineExceededError:
                self.is_pause = False
                self.is_pause_cond.notify_all()
                raise
            # `retract`, not `in_place`: it also lets go of the batch that ran last, which would otherwise make every
            # flush of the cache fail.
            await self._async_dispatch_to_scheduler(PauseGenerationReqInput(mode="retract"))

    async def _end_all_requests(self) -> None:
        """Abort what runs until nothing does; upstream's readers of the update lock are the requests that run."""
        started = time.monotonic()
        abort_at = started
        while True:
            now = time.monotonic()
            if now >= abort_at:
                self.abort_request(abort_all=True)
                abort_at = now + _ABORT_AGAIN_S
            if not await self.model_update_lock.is_locked():  # type: ignore[no-untyped-call]
                return
            if now > started + _ABORT_DEADLINE_S:
                left = sorted(self.rid_to_state)
                raise DeadlineExceededError(
                    f"the pause was given up and generation goes on: {len(left)} request(s) had not ended "
                    f"{_ABORT_DEADLINE_S:g} s after they were aborted: {left[:8]!r}",
                    phase="pause",
                )
            await asyncio.sleep(_LOOK_EVERY_S)

    async def continue_generation(self, obj: ContinueGenerationReqInput) -> None:
        await self.weight_fence.check_may_resume()
        await super().continue_generation(obj)

    async def begin_weight_update(
        self, obj: BeginWeightUpdateReqInput, request: Any = None
    ) -> tuple[bool, str]:
        ttl_s = float(os.environ.get(SESSION_TTL_VARIABLE, DEFAULT_SESSION_TTL_S))
        begin = super().begin_weight_update
        return await self.weight_fence.client_begin(lambda: begin(obj, request), ttl_s=ttl_s)

    async def end_weight_update(
        self, obj: EndWeightUpdateReqInput, request: Any = None
    ) -> tuple[bool, str]:
        end = super().end_weight_update
        return await self.weight_fence.client_end(lambda: end(obj, request))

    async def update_weights_from_disk(self, obj: Any, request: Any = None) -> tuple[bool, str]:
        answer: tuple[bool, str] = await super().update_weights_from_disk(obj, request)
        if answer[0]:
            await self.weight_fence.reloaded(obj.weight_version)
        return answer

    # What the fence does

    async def hold_generation(self, mode: str) -> None:
        await self.pause_generation(PauseGenerationReqInput(mode=mode))  # type: ignore[arg-type]

    async def let_generation_go(self) -> None:
        await super().continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def begin_session(self) -> None:
        answers = await self._communicator("begin_weight_update")(BeginWeightUpdateReqInput())
        # A session that a failed transaction left open is ours by now: its weights are written again.
        self._check_answers("begin", [a for a in answers if "already open" not in a.message])

    async def end_session(self) -> None:
        answers = await self._communicator("end_weight_update")(EndWeightUpdateReqInput())
        self._check_answers(
            "end", [a for a in answers if "no weight-update session" not in a.message]
        )

    async def try_flush_cache(self) -> bool:
        return bool((await self.flush_cache()).success)

    async def move_version_label(self, version: str) -> None:
        await self.update_weight_version(
            UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        )

    async def fail_open_requests(self, reason: str) -> None:
        """End every request with status 503: those that wait here, and those that the scheduler holds."""
        async with self.is_pause_cond:
            self.is_pause = True
            self.is_pause_cond.notify_all()
        finish: Any = {
            "type": "abort",
            "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
            "message": f"TORN: {reason}",
        }
        # Running requests can only be aborted between batches, of which there are none now; retracted ones at once.
        await self._async_dispatch_to_scheduler(PauseGenerationReqInput(mode="retract"))
        await self._async_dispatch_to_scheduler(AbortReq(abort_all=True, finished_reason=finish))
        for rid in list(self.rid_to_state):
            # Told from here: a dead rank would never answer, and a live one's later answer finds the request gone.
            self._handle_abort_req(AbortReq(rid=rid, finished_reason=finish))

    def _communicator(self, verb: str) -> Any:
        self.auto_create_handle_loop()
        return getattr(self, f"{verb}_communicator")  # upstream makes these by name

    @staticmethod
    def _check_answers(what: str, answers: list[Any]) -> None:
        if refused := [answer.message for answer in answers if not answer.success]:
            raise EngineRequestError(f"{what} was refused: {refused!r}", phase=what)


def init_ray_tokenizer_manager(server_args: Any, port_args: Any) -> tuple[Any, Any]:
    """What RayEngine calls in place of upstream's `init_tokenizer_manager`."""
    chosen: Any = HostedTokenizerManager
    if get_device().enable_rdt_weight_sync:
        chosen = WeightSyncTokenizerManager
    return init_tokenizer_manager(server_args, port_args, chosen)
