"""Aborts with an acknowledgement: for each id whether it was found, in which stage, and only once it has ended.

Upstream's abort answers at once and says nothing. Here the replica follows each request until its tokenizer has let go
of it; ids are exact (`rank_requests.py`), and an id that is unknown or has ended already is no error.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

_POLL_S = 0.01

AskRanks = Callable[[str, Sequence[Any]], Awaitable[list[Any]]]


@dataclasses.dataclass(kw_only=True)
class _Followed:
    stage: str
    state: Any
    told: bool = False


class Aborts:
    """Aborts of one replica. Called on the event loop of its engine."""

    def __init__(self, manager: Any, ask_ranks: AskRanks) -> None:
        """Args:
        manager: the engine's tokenizer manager.
        ask_ranks: one answer (or exception) of each rank to a verb.
        """
        self._manager = manager
        self._ask_ranks = ask_ranks

    async def abort(self, ids: Sequence[str] | None, *, deadline_s: float) -> dict[str, Any]:
        """Abort these requests, or all (None); id -> `found`, `stage`, `ended`.

        A request that has not ended by the deadline says so (`ended` is False).
        """
        known = self._manager.rid_to_state
        ids = list(known) if ids is None else list(dict.fromkeys(ids))
        stages = await self._stages([rid for rid in ids if rid in known])
        followed = {
            rid: _Followed(stage=stages.get(rid, "tokenizing"), state=known[rid])
            for rid in ids
            if rid in known
        }
        deadline = asyncio.get_running_loop().time() + deadline_s
        while open_ids := [rid for rid, each in followed.items() if self._is_open(rid, each)]:
            for rid in open_ids:
                self._tell(rid, followed[rid])
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(_POLL_S)
        return {rid: self._report(rid, followed.get(rid)) for rid in ids}

    def _is_open(self, rid: str, request: _Followed) -> bool:
        """Whether this very request is still there: its id may belong to a later one by now."""
        return self._manager.rid_to_state.get(rid) is request.state and not request.state.finished

    def _tell(self, rid: str, request: _Followed) -> None:
        if request.told:
            return
        if not request.state.dispatched:
            request.told = bool(self._manager.end_held_request(rid))
            return  # else it is on its way to the scheduler: asked again at the next turn
        request.told = True
        self._manager.abort_request(rid)
        if self._manager.is_pause and request.stage == "running":
            # No batch runs until generation goes on; the scheduler lets go of it then, and nobody waits for that.
            self._manager._handle_abort_req(
                AbortReq(rid=rid, finished_reason={"type": "abort", "message": "aborted"})
            )

    def _report(self, rid: str, request: _Followed | None) -> dict[str, Any]:
        if request is None:
            return {"found": False, "stage": None, "ended": True}
        ended = not self._is_open(rid, request)
        return {"found": True, "stage": request.stage, "ended": ended}

    async def _stages(self, ids: list[str]) -> dict[str, str]:
        """Of those that a scheduler holds; running on any rank counts."""
        stages: dict[str, str] = {}
        if ids:
            for answer in await self._ask_ranks("request_stages", (ids,)):
                if isinstance(answer, BaseException):
                    raise answer
                stages |= {rid: s for rid, s in answer.items() if stages.get(rid) != "running"}
        return stages
