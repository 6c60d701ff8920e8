"""A RayEngine's event loop on a thread of its own, so that every thread and every other loop can call the engine.

Upstream runs its loop on whichever thread calls, for as long as the call takes: it can't be called from a coroutine
(F16), from two threads at once, or from a thread other than the first. Here calls are handed over to one thread.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class EngineLoop(uvloop.Loop):
    """An event loop that runs on its own daemon thread from the start until `end`."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.Thread(target=self._run, name="sglang-engine-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self)
        self.run_forever()
        self.close()

    def run_until_complete(self, future: Any) -> Any:
        """Wait for an awaitable that runs on the loop's thread. From any thread, and inside a running coroutine too
        (which blocks that coroutine's loop, as every synchronous call does).

        Raises:
            RuntimeError: called on the loop's own thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a synchronous engine call on the engine's own loop would wait for itself; await the async one"
            )
        waiting = asyncio.run_coroutine_threadsafe(_as_coroutine(future), self)
        try:
            return waiting.result()
        except BaseException:
            waiting.cancel()
            raise

    async def bridged(self, awaitable: Awaitable[T]) -> T:
        """Await, on the caller's loop, something that runs on this one. Cancelling the one cancels the other."""
        if asyncio.get_running_loop() is self:
            return await awaitable
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(_as_coroutine(awaitable), self)
        )

    async def bridged_stream(self, stream: AsyncIterator[T]) -> AsyncIterator[T]:
        """Iterate, on the caller's loop, over an async generator that runs on this one."""
        try:
            while True:
                try:
                    item = await self.bridged(anext(stream))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if (close := getattr(stream, "aclose", None)) is not None:
                await self.bridged(close())

    def end(self) -> None:
        """Stop the loop and its thread. May be called twice."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self.call_soon_threadsafe(self.stop)
            self._thread.join(timeout=10)


def _as_coroutine(awaitable: Awaitable[T]) -> Coroutine[Any, Any, T]:
    if inspect.iscoroutine(awaitable):
        return awaitable

    async def wait() -> T:
        return await awaitable

    return wait()
