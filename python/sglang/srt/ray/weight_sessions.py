"""A rank's weight sessions: which one is open, and whether bytes were pulled past the loader in it.

Upstream rebuilds what is derived from weights at the end of a session only if no call loaded any. A session in which
one call loads and another pulls would keep derived tensors of the weights before; here a pull always has them rebuilt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from sglang.srt.ray.weight_sync.ledger import SessionBook

BOOK = SessionBook()
"""One scheduler runs in a process."""


def rebuilding_after_pulls(end: Callable[..., Any], book: SessionBook) -> Callable[..., Any]:
    """Wrap `SchedulerWeightUpdaterManager.end_weight_update`; runs on the event loop's thread."""

    @functools.wraps(end)
    def end_weight_update(manager: Any, recv_req: Any) -> Any:
        if manager._session is not None and book.pulled:
            manager._session = msgspec.structs.replace(manager._session, loaded_weights=False)
        answer = end(manager, recv_req)
        if manager._session is None:
            book.ended()
        return answer

    return end_weight_update


def watch_sessions() -> None:
    """Called once in a rank's process, before its scheduler binds the method."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    if not hasattr(SchedulerWeightUpdaterManager.end_weight_update, "__wrapped__"):
        wrapped = rebuilding_after_pulls(SchedulerWeightUpdaterManager.end_weight_update, BOOK)
        SchedulerWeightUpdaterManager.end_weight_update = wrapped  # type: ignore[method-assign]


def note_loaded(manager: Any) -> None:
    """The open session's weights came through the loader, which derived what it derives."""
    manager._session = msgspec.structs.replace(manager._session, loaded_weights=True)
