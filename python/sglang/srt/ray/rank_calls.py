"""Questions that the weight fence asks an engine's ranks by actor call, and what it concludes from the answers.

Every question has a deadline, and a rank that doesn't answer is named. The fence (`weight_fence.py`) acts; this file
only asks and judges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sglang.srt.ray.weight_sync.errors import (
    DeadlineExceededError,
    EngineRequestError,
    WeightSyncError,
)
from sglang.srt.ray.weight_sync.ledger import RankStatus
from sglang.srt.ray.weight_sync.states import Transaction

RANK_ANSWER_TIMEOUT_S = 3.0


class RankCalls:
    """The ranks of one engine, asked from the event loop of its tokenizer manager."""

    def __init__(self, actors: Sequence[Any]) -> None:
        """Args:
        actors: SchedulerActor handles in rank order.
        """
        self._actors = list(actors)

    async def ask(self, verb: str, *arguments: Any) -> list[Any]:
        """One verb on every rank; answers in rank order.

        Raises:
            DeadlineExceededError, EngineRequestError: naming the rank.
        """
        calls = [getattr(actor, verb).remote(*arguments) for actor in self._actors]
        answers = []
        for rank, call in enumerate(calls):
            try:
                future = asyncio.wrap_future(call.future())
                answers.append(await asyncio.wait_for(future, RANK_ANSWER_TIMEOUT_S))
            except TimeoutError as error:
                raise DeadlineExceededError(
                    f"rank {rank} did not answer {verb!r} within {RANK_ANSWER_TIMEOUT_S:g} s",
                    rank=rank,
                ) from error
            except WeightSyncError:
                raise
            except Exception as error:  # whatever Ray makes of a dead actor
                raise EngineRequestError(
                    f"rank {rank} failed to answer {verb!r}: {error}", rank=rank
                ) from error
        return answers

    async def each(
        self, verb: str, *arguments: Any, timeout_s: float = RANK_ANSWER_TIMEOUT_S
    ) -> list[Any]:
        """One verb on every rank at once; per rank its answer, or the exception that says why there is none."""
        calls = [
            asyncio.wrap_future(getattr(actor, verb).remote(*arguments).future())
            for actor in self._actors
        ]
        await asyncio.wait(calls, timeout=timeout_s)
        return [
            call.exception() or call.result()
            if call.done()
            else DeadlineExceededError(
                f"rank {rank} did not answer {verb!r} within {timeout_s:g} s", rank=rank
            )
            for rank, call in enumerate(calls)
        ]

    async def statuses(self) -> list[RankStatus]:
        return await self.ask("weight_status")

    async def silent(self) -> list[int]:
        """The ranks that do not answer at all."""
        answers = await self.each("weight_status")
        return [rank for rank, answer in enumerate(answers) if isinstance(answer, BaseException)]

    async def anything_written(self, held: Transaction) -> bool:
        """Whether a byte may have landed in this transaction. A rank that doesn't answer counts as written."""
        try:
            statuses = await self.statuses()
        except WeightSyncError:
            return True
        return any(status.in_flight or _wrote_in(status, held) for status in statuses)


def _wrote_in(status: RankStatus, held: Transaction) -> bool:
    """A client's own pulls (no version) belong to the open session, a publisher's to its transaction."""
    belongs = status.session_open if held.version is None else status.transaction == held.id
    return status.written and belongs


def what_is_missing(status: RankStatus, transaction: str) -> str:
    """Why a rank has not proved this transaction."""
    if status.in_flight:
        return "a read is still in flight"
    if status.transaction != transaction:
        return f"its last pull belongs to {status.transaction!r}"
    return status.failure or "its pull has not ended"


def failure_of_a_client(
    statuses: Sequence[RankStatus], answer: tuple[bool, str], *, torn: bool
) -> str | None:
    """Why a client's session leaves the engine torn, None when it doesn't.

    Args:
        statuses: the ranks', asked while the session was open.
        answer: what upstream's end said.
        torn: whether the engine was torn before, which only a complete update mends.
    """
    if not answer[0]:
        return f"end_weight_update failed: {answer[1]}"
    for status in statuses:
        if status.in_flight:
            return f"rank {status.rank}: a read is still in flight"
        if status.session_open and status.failure:
            return status.failure
        written = status.tensors_written if status.session_open else 0
        if torn and written < status.tensors_total:
            return (
                f"the engine was torn before, and rank {status.rank} received only {written} of "
                f"{status.tensors_total} tensors"
            )
    return None
