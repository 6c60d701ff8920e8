"""The requests that one rank holds: which stage each is in, and aborts that mean exactly one of them.

Upstream's scheduler takes an abort's id as a prefix: with both alive, aborting "r-1" ends "r-10" too. While it handles
an abort, requests whose ids merely begin alike are given other ids; it runs on the event loop's thread, between two
batches, so nobody sees them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_HIDDEN = "\0hidden:"


def every_request(scheduler: Any) -> Iterator[tuple[str, Any]]:
    """Stage (`queued` or `running`) and request, for all that the scheduler knows."""
    for request in list(scheduler.waiting_queue):
        yield "queued", request
    for request in list(scheduler.grammar_manager.grammar_queue):
        yield "queued", request
    for name in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        for entry in list(getattr(getattr(scheduler, name, None), "queue", ())):
            yield "queued", getattr(entry, "req", entry)
    for entry in list(getattr(scheduler, "disagg_prefill_inflight_queue", None) or ()):
        yield "running", entry
    transfers = getattr(scheduler, "disagg_decode_transfer_queue", None)
    for entry in list(getattr(transfers, "queue", ())):
        yield "queued", entry.req
    if scheduler.chunked_req is not None:
        yield "running", scheduler.chunked_req
    for request in scheduler.collect_inflight_reqs():
        yield "running", request


def stages_of(scheduler: Any, ids: Sequence[str]) -> dict[str, str]:
    """The stage of each of these requests that this rank holds and has not finished."""
    asked = set(ids)
    return {
        request.rid: stage
        for stage, request in every_request(scheduler)
        if request.rid in asked and not request.finished()
    }


def exactly(abort_request: Callable[..., Any]) -> Callable[..., Any]:
    """Make `Scheduler.abort_request` mean one id."""

    @functools.wraps(abort_request)
    def abort_exactly(scheduler: Any, recv_req: Any) -> Any:
        if recv_req.abort_all:
            return abort_request(scheduler, recv_req)
        meant = recv_req.rid
        others = {
            id(request): request
            for _, request in every_request(scheduler)
            if request.rid != meant and request.rid.startswith(meant)
        }
        for request in others.values():
            request.rid = _HIDDEN + request.rid
        try:
            return abort_request(scheduler, recv_req)
        finally:
            for request in others.values():
                request.rid = request.rid.removeprefix(_HIDDEN)

    return abort_exactly


def make_aborts_exact() -> None:
    """Called once in a rank's process, before its scheduler binds the method."""
    from sglang.srt.managers.scheduler import Scheduler

    if not hasattr(Scheduler.abort_request, "__wrapped__"):
        Scheduler.abort_request = exactly(Scheduler.abort_request)  # type: ignore[method-assign]
