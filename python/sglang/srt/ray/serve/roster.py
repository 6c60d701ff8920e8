"""Who is in the fleet and what each is told to do, without Ray or Serve: members fetch commands and report outcomes.

A replica fetches its commands (it asks and waits) instead of being called, so that each has an identity, a frozen one
holds nobody up, and one that is still starting can already be steered. `fleet.py` makes a Serve deployment of this;
`agent.py` is the replica's side.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from sglang.srt.ray.serve.results import ReplicaResult

ANSWER_MARGIN_S = 2.0
"""How much longer we wait than a replica was told to: its own error says more than `late`."""
DEAD_REMEMBERED_S = 600.0
_PROBE_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One verb for one replica."""

    id: str
    verb: str
    arguments: Mapping[str, Any]
    deadline_s: float


@dataclasses.dataclass(kw_only=True, eq=False)
class Member:
    """One replica that has joined."""

    id: str
    info: Mapping[str, Any]
    """What it says of itself: `actor` (its own handle), `ranks` (SchedulerActor handles), node, pid."""
    serving: bool = False
    """Whether Serve may route requests to it; False until it is admitted."""
    died_at: float | None = None
    cause: str | None = None
    """What it said of its end, if it could."""
    commands: asyncio.Queue[Command] = dataclasses.field(default_factory=asyncio.Queue)


class Roster:
    """All members. One event loop owns it."""

    def __init__(self, is_dead: Callable[[Member], Awaitable[bool]]) -> None:
        """Args:
        is_dead: asks a member's process; returns at once when it is dead, may wait for ever otherwise.
        """
        self._is_dead = is_dead
        self._members: dict[str, Member] = {}
        self._outcomes: dict[str, asyncio.Future[ReplicaResult]] = {}

    @property
    def members(self) -> list[Member]:
        """In the order in which they joined, the dead included."""
        self._forget_the_long_dead()
        return list(self._members.values())

    @property
    def living(self) -> list[Member]:
        return [member for member in self.members if member.died_at is None]

    def find(self, member_id: str) -> Member | None:
        return self._members.get(member_id)

    def join(self, member_id: str, info: Mapping[str, Any]) -> Member:
        """A replica came up, or came back after this process restarted. It takes the place of the first dead one."""
        if (known := self._members.get(member_id)) is not None:
            return known
        dead = next((member.id for member in self.members if member.died_at is not None), None)
        if dead is not None:
            del self._members[dead]
        self._members[member_id] = Member(id=member_id, info=info)
        return self._members[member_id]

    def leave(self, member_id: str) -> None:
        """A replica ends because it was asked to. One that broke before stays in results as dead."""
        known = self._members.get(member_id)
        if known is not None and known.died_at is None:
            del self._members[member_id]

    def bury(self, member_id: str, cause: str) -> None:
        """A replica's engine is dead, though its process may still answer: count it as dead from now on."""
        if (known := self._members.get(member_id)) is not None and known.died_at is None:
            known.died_at, known.cause, known.serving = time.monotonic(), cause, False

    async def is_dead(self, member: Member) -> bool:
        """Ask a member's process now."""
        if member.died_at is None and await self._is_dead(member):
            self.bury(member.id, "its process is gone")
        return member.died_at is not None

    async def look_for_the_dead(self) -> None:
        """Ask every member's process now."""
        await asyncio.gather(*(self.is_dead(member) for member in self.living))

    async def next_commands(self, member_id: str, *, wait_s: float) -> list[Command]:
        """What a member has to do, as soon as there is something; empty after `wait_s` seconds.

        Raises:
            KeyError: it has to join first.
        """
        queue = self._members[member_id].commands
        try:
            commands = [await asyncio.wait_for(queue.get(), wait_s)]
        except TimeoutError:
            return []
        while not queue.empty():
            commands.append(queue.get_nowait())
        return commands

    def report(self, command_id: str, result: ReplicaResult) -> None:
        """A member's answer. One that nobody waits for any more is dropped: its caller has been told `late`."""
        future = self._outcomes.get(command_id)
        if future is not None and not future.done():
            future.set_result(result)

    async def call(
        self,
        verb: str,
        arguments: Mapping[str, Any],
        *,
        deadline_s: float,
        only: Sequence[str] | None = None,
    ) -> list[ReplicaResult]:
        """Have members perform a verb; one result for each, in the order in which they joined.

        Args:
            deadline_s: for each member, in seconds.
            only: ids of those that are meant; all when None.
        """
        meant = self.members if only is None else [self._known_or_dead(each) for each in only]
        return list(
            await asyncio.gather(*(self._ask(m, verb, arguments, deadline_s) for m in meant))
        )

    def _known_or_dead(self, member_id: str) -> Member:
        known = self._members.get(member_id)
        return known or Member(id=member_id, info={}, died_at=time.monotonic())

    async def _ask(
        self, member: Member, verb: str, arguments: Mapping[str, Any], deadline_s: float
    ) -> ReplicaResult:
        if member.died_at is not None:
            return _dead(member)
        started = time.monotonic()
        command = Command(
            id=uuid.uuid4().hex, verb=verb, arguments=arguments, deadline_s=deadline_s
        )
        answer: asyncio.Future[ReplicaResult] = asyncio.get_running_loop().create_future()
        self._outcomes[command.id] = answer
        member.commands.put_nowait(command)
        death: asyncio.Future[Any] = asyncio.ensure_future(self._death_of(member))
        try:
            waited: set[asyncio.Future[Any]] = {answer, death}
            await asyncio.wait(
                waited,
                timeout=deadline_s + ANSWER_MARGIN_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if answer.done():
                return answer.result()
            if death.done():
                return _dead(member)
            return _late(member, verb, time.monotonic() - started)
        finally:
            death.cancel()
            del self._outcomes[command.id]

    async def _death_of(self, member: Member) -> None:
        while not await self.is_dead(member):
            await asyncio.sleep(_PROBE_S)

    def _forget_the_long_dead(self) -> None:
        now = time.monotonic()
        for member in list(self._members.values()):
            if member.died_at is not None and now - member.died_at > DEAD_REMEMBERED_S:
                del self._members[member.id]


def _dead(member: Member) -> ReplicaResult:
    cause = f" ({member.cause})" if member.cause else ""
    message = f"replica {member.id!r} is dead{cause}; Serve replaces it"
    return ReplicaResult(
        replica=member.id,
        outcome="dead",
        error={"type": "ReplicaDiedError", "message": message, "status": 503},
    )


def _late(member: Member, verb: str, seconds: float) -> ReplicaResult:
    message = f"replica {member.id!r} did not answer {verb!r} within {seconds:.1f} s; its state is not known"
    return ReplicaResult(
        replica=member.id,
        outcome="late",
        error={"type": "DeadlineExceededError", "message": message, "status": 504},
        seconds=seconds,
    )
