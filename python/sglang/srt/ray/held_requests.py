"""Ends requests that have not reached a scheduler yet: those being tokenized, and those that a pause holds back.

Upstream sends an abort to the scheduler, which doesn't know such a request; it then runs in full. A request that has
been dispatched is aborted there (`serve/aborts.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

ABORT_MESSAGE = "aborted before it reached the scheduler"


def ids_of(obj: Any) -> list[str]:
    """The ids of a request object, which has several when it is a batch; none before upstream has made them."""
    rid = obj.rid
    return [] if rid is None else [rid] if isinstance(rid, str) else list(rid)


class HeldRequests:
    """Requests whose first answer has not come. Belongs to the engine's event loop."""

    def __init__(self) -> None:
        self._aborts: dict[int, tuple[Any, asyncio.Future[None]]] = {}

    def end(self, rid: str) -> bool:
        """Whether the request was waiting here and is being ended. A batch is ended as a whole."""
        for obj, abort in self._aborts.values():
            if rid in ids_of(obj) and not abort.done():
                abort.set_result(None)
                return True
        return False

    async def answers(
        self, obj: Any, inner: AsyncGenerator[Any, None], aborted_answer: Callable[[], Any]
    ) -> AsyncGenerator[Any, None]:
        """`inner`'s answers, unless `obj` is ended before the first one: then what `aborted_answer` makes."""
        abort: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._aborts[id(obj)] = (obj, abort)
        first = asyncio.ensure_future(anext(inner))
        waited: set[asyncio.Future[Any]] = {first, abort}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._aborts[id(obj)]
            if not first.done():
                first.cancel()  # upstream drops what has not been dispatched
                with contextlib.suppress(asyncio.CancelledError):
                    await first
        if first.cancelled():
            yield aborted_answer()
            return
        async with contextlib.aclosing(inner):  # a caller that stops early ends upstream's part too
            with contextlib.suppress(StopAsyncIteration):
                yield first.result()
                async for answer in inner:
                    yield answer
