"""The tokenizer manager of an engine that lives in somebody else's process.

Upstream's installs signal handlers that kill the process, ends the process when its receive loop breaks, and leaves
requests waiting for ever when a scheduler has died. This one touches no signal, reports a broken loop to the engine's
watch, and ends every wait, of requests and of control calls alike, with the failure that is reported to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager
from sglang.srt.ray.held_requests import ABORT_MESSAGE, HeldRequests, ids_of
from sglang.srt.ray.liveness import EngineFailedError
from sglang.srt.ray.memory_occupation import check_answers
from sglang.srt.utils.common import get_or_create_event_loop

logger = logging.getLogger(__name__)


class TokenizerFailedError(EngineFailedError):
    """The loop that receives the engine's answers broke."""


class EngineStoppedError(EngineFailedError):
    """The engine was shut down while a call waited for it, or before."""


class HostedTokenizerManager(TokenizerManager):
    """Runs in the process that launched the engine, on the loop of the first call; `fail` may come from any thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.failure: EngineFailedError | None = None
        self._failed = _Failed()
        self._held = HeldRequests()
        self.report_failure: Callable[[EngineFailedError], None] = self.fail
        super().__init__(*args, **kwargs)
        for name, value in list(vars(self).items()):
            if isinstance(value, FanOutCommunicator):
                setattr(self, name, _EndingCommunicator(value, self._failed))

    def auto_create_handle_loop(self) -> None:
        """Called first by every request and control call."""
        if self.failure is not None:
            raise self.failure
        if self.event_loop is not None:
            self._check_loop()
            return
        self.event_loop = get_or_create_event_loop()  # type: ignore[no-untyped-call]
        task = self.event_loop.create_task(self._receive())
        self.asyncio_tasks.add(task)

    def _validate_one_request(self, obj: Any, input_ids: Any) -> None:
        """As upstream's, which lets a prompt without tokens through to the ranks; on a CPU it ends all of them.

        Raises:
            ValueError: an HTTP client gets status 400.
        """
        if (
            input_ids is not None
            and len(input_ids) == 0
            and getattr(obj, "input_embeds", None) is None
        ):
            raise ValueError(
                f"the prompt has no tokens (text {obj.text!r}); give at least one token"
            )
        super()._validate_one_request(obj, input_ids)

    def _check_loop(self) -> None:
        with contextlib.suppress(RuntimeError):  # no loop runs on this thread
            if (running := asyncio.get_running_loop()) is not self.event_loop:
                raise WrongLoopError(
                    f"the engine runs on the event loop {self.event_loop!r}, and was called on {running!r}; use "
                    f"RayEngine's own methods, or asyncio.run_coroutine_threadsafe(call, engine.loop)"
                )

    async def _receive(self) -> None:
        try:
            await self.handle_loop()  # type: ignore[no-untyped-call]
        except Exception as error:
            logger.exception("receiving the engine's answers broke")
            self.report_failure(TokenizerFailedError(f"receiving answers broke: {error!r}"))

    def fail(self, failure: EngineFailedError) -> None:
        """End every wait with `failure`, refuse new requests, and let `/health` answer 503. From any thread.

        The first failure stays.
        """
        if self.failure is not None:
            return
        self.failure = failure
        self.gracefully_exit = True
        self.server_status = ServerStatus.UnHealthy
        if self.event_loop is not None and not self.event_loop.is_closed():
            self.event_loop.call_soon_threadsafe(self._end_waits, failure)

    def _end_waits(self, failure: EngineFailedError) -> None:
        self._failed.end_all(failure)
        states: dict[str, Any] = dict(self.rid_to_state)
        for rid, state in states.items():
            if state.finished:
                continue
            state.finished = True
            state.time_stats.set_finished_time()
            reason = {
                "type": "abort",
                "message": str(failure),
                "status_code": http.HTTPStatus.SERVICE_UNAVAILABLE,
            }
            state.out_list.append(
                {
                    "text": state.get_text(),
                    "output_ids": state.output_ids,
                    "meta_info": {"id": rid, "finish_reason": reason},
                }
            )
            state.event.set()
        self.asyncio_tasks.add(asyncio.ensure_future(self._lift_pause()))

    async def _lift_pause(self) -> None:
        """Let requests that a pause holds back go on to their end."""
        async with self.is_pause_cond:
            self.is_pause = False
            self.is_pause_cond.notify_all()

    async def _handle_abort_finish_reason(
        self, out: dict[str, Any], state: Any, is_stream: bool
    ) -> Any:
        if self.failure is not None and not is_stream:
            self.rid_to_state.pop(state.obj.rid, None)
            raise self.failure
        return await super()._handle_abort_finish_reason(out, state, is_stream)

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """As upstream's; a request that is still held here can be ended by `end_held_request`."""
        inner: Any = super().generate_request(obj, request)

        def aborted() -> Any:
            answers = [self._aborted_answer(rid) for rid in ids_of(obj)]
            return answers[0] if obj.is_single else answers

        async with contextlib.aclosing(self._held.answers(obj, inner, aborted)) as answers:
            async for answer in answers:
                yield answer

    def end_held_request(self, rid: str) -> bool:
        """End a request that no scheduler knows yet; False when there is none."""
        state = self.rid_to_state.get(rid)
        return state is not None and not state.dispatched and self._held.end(rid)

    def _aborted_answer(self, rid: str) -> dict[str, Any]:
        return {
            "text": "",
            "output_ids": [],
            "meta_info": {
                "id": rid,
                "finish_reason": {"type": "abort", "message": ABORT_MESSAGE},
                "weight_version": self.config_value("weight_version"),
                "prompt_tokens": 0,
                "completion_tokens": 0,
                "cached_tokens": 0,
                "output_token_logprobs": [],
            },
        }

    async def release_memory_occupation(self, obj: Any, request: Any = None) -> None:
        """As upstream's, and raises what a rank refuses.

        Raises:
            MemoryOccupationError: requests run, or a tag is unknown. Nothing was released.
        """
        self.auto_create_handle_loop()
        answers = await self._fan_out("release_memory_occupation", obj)
        check_answers("release_memory_occupation", answers)

    async def resume_memory_occupation(self, obj: Any, request: Any = None) -> None:
        """As upstream's, and raises what a rank refuses."""
        self.auto_create_handle_loop()
        answers = await self._fan_out("resume_memory_occupation", obj)
        check_answers("resume_memory_occupation", answers)

    async def _fan_out(self, verb: str, obj: Any) -> Any:
        return await getattr(self, f"{verb}_communicator")(obj)  # upstream makes these by name

    def close(self) -> None:
        """Let go of tasks and sockets, on the loop's thread if it still runs. The engine is of no use afterwards."""
        loop = self.event_loop
        if loop is None or loop.is_closed() or not loop.is_running():
            self._close_here()
            return
        done: Any = asyncio.run_coroutine_threadsafe(self._close_on_loop(), loop)
        with contextlib.suppress(
            TimeoutError
        ):  # a loop that hangs keeps its sockets; the process goes on
            done.result(timeout=5)

    async def _close_on_loop(self) -> None:
        self._close_here()

    def _close_here(self) -> None:
        for task in self.asyncio_tasks:
            if not task.get_loop().is_closed():
                task.cancel()
        inbox: Any = self.recv_from_detokenizer
        inbox.context.destroy(
            linger=0
        )  # the context is this manager's own; its two sockets go with it


class WrongLoopError(Exception):
    """A call on another event loop than the engine's would wait for ever."""


class _Failed:
    """Futures of all control calls under way."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def end_all(self, failure: EngineFailedError) -> None:
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(failure)

    @contextlib.contextmanager
    def waiting(self) -> Any:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            yield future
        finally:
            self._waiting.discard(future)
            future.cancel()


class _EndingCommunicator:
    """A FanOutCommunicator whose calls end when the engine fails."""

    def __init__(self, inner: Any, failed: _Failed) -> None:
        self._inner = inner
        self._failed = failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def __call__(self, obj: Any) -> Any:
        with self._failed.waiting() as failure:
            call = asyncio.ensure_future(self._inner(obj))
            try:
                await asyncio.wait({call, failure}, return_when=asyncio.FIRST_COMPLETED)
                if failure.done():
                    failure.result()
                return call.result()
            finally:
                call.cancel()
