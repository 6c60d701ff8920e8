"""The one place that knows every replica of a model: a Serve deployment of one small replica without a CPU.

Ingress and trainers steer the fleet through its handle (`call`), replicas join and fetch their commands (`roster.py`).
It also keeps what is wanted of the fleet (paused or not, which weights), so that a replica which starts later is
brought to the same state before it serves. If it dies Serve restarts it, and the replicas join again within seconds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import ray

from sglang.srt.ray.serve.publication import Publication, PublishedWeights
from sglang.srt.ray.serve.results import ReplicaResult
from sglang.srt.ray.serve.roster import Command, Member, Roster

logger = logging.getLogger(__name__)

OPTIONS: dict[str, Any] = {
    "num_replicas": 1,
    "max_ongoing_requests": 100_000,  # every replica waits here for its commands
    "ray_actor_options": {"num_cpus": 0},
    "health_check_period_s": 2,
}
_SETTLE_S = 3.0
"""After a restart: time for serving replicas to say which weights they hold, before a newcomer is admitted."""
_HOLD_TIMEOUT_S = 10.0
_CATCH_UP_TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """The answer to a replica that asks to serve."""

    verdict: Literal["serve", "join", "again"]
    """`join` first when the fleet was restarted; `again`: look what is wanted now."""
    paused: str | None
    """The mode in which the fleet is paused; None while it runs."""


def deployment_name(model_id: str) -> str:
    """The name of a model's FleetControl deployment, for `serve.get_deployment_handle`."""
    return "SGLangFleet:" + model_id.replace("/", "--").replace(".", "_")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """A replica that holds the published weights."""

    replica: str
    ranks: Sequence[Any]
    """SchedulerActor handles, in rank order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a replica has to be brought to before it serves."""

    weights: PublishedWeights | None
    """None while the fleet serves its checkpoint."""
    generation: int
    """To be handed back with `admit`."""
    peer: Peer | None
    in_progress: bool
    """Whether a transaction is open: its peers can't lend what is being written."""


class FleetControl:
    """Methods are called through a Serve handle; all run on one event loop."""

    def __init__(self) -> None:
        self._roster = Roster(_process_is_dead)
        self._publication = Publication()
        self._paused: str | None = None
        self._started_at = time.monotonic()
        self._held: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()

    # What replicas call

    async def join(
        self, replica: str, info: Mapping[str, Any], serves: PublishedWeights | None = None
    ) -> None:
        """A replica's engine is up, or this process was restarted.

        Args:
            serves: the published weights that it serves already.
        """
        # It may be here because another was killed, which nobody has asked for since: that one's place is free.
        await self._roster.look_for_the_dead()
        self._roster.join(replica, info)
        if serves is not None:
            self._publication.remember(serves)

    async def wanted(self, replica: str) -> Wanted:
        """What `replica` has to be brought to, and a peer to get the weights from."""
        peer = await self._peer_of(replica)
        return Wanted(
            weights=self._publication.published,
            generation=self._publication.generation,
            peer=peer,
            in_progress=self._publication.in_progress,
        )

    async def admit(self, replica: str, version: str, generation: int) -> Admission:
        """Ask for permission to serve. From then on a commit that leaves this replica out holds it first."""
        member = self._roster.find(replica)
        if time.monotonic() - self._started_at < _SETTLE_S:
            return Admission(verdict="again", paused=self._paused)
        if member is None:
            return Admission(verdict="join", paused=self._paused)
        if not self._publication.may_serve(version, generation):
            return Admission(verdict="again", paused=self._paused)
        member.serving = True
        return Admission(verdict="serve", paused=self._paused)

    async def leave(self, replica: str) -> None:
        self._roster.leave(replica)

    async def broke(self, replica: str, cause: str) -> None:
        """A replica's engine died, or can't take the published weights over; Serve will replace it."""
        logger.error("replica %s is broken: %s", replica, cause)
        self._roster.bury(replica, cause)

    async def next_commands(self, replica: str, wait_s: float) -> list[Command] | None:
        """See `Roster.next_commands`. None: `join` again, this process was restarted."""
        if self._roster.find(replica) is None:
            return None
        return await self._roster.next_commands(replica, wait_s=wait_s)

    async def report(self, command_id: str, result: ReplicaResult) -> None:
        self._roster.report(command_id, result)

    # What ingress and trainers call

    async def call(
        self,
        verb: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        deadline_s: float = 60.0,
        only: Sequence[str] | None = None,
    ) -> list[ReplicaResult]:
        """A control verb on every replica (or on those named); see `verbs.py` for the verbs."""
        arguments = dict(arguments or {})
        if only is None and verb == "pause":
            self._paused = str(arguments.get("mode", "abort"))
        elif only is None and verb == "resume":
            self._paused = None
        return await self._roster.call(verb, arguments, deadline_s=deadline_s, only=only)

    async def steer_weights(
        self, replica: str, verb: str, arguments: Mapping[str, Any], deadline_s: float
    ) -> ReplicaResult:
        """One step of a publisher's transaction on one replica; `ServeEngineControl` calls it.

        Before the first replica resumes with new weights, those that the publisher doesn't know of (they started after
        it connected) are held, and afterwards brought to the same weights by a peer.
        """
        transaction = str(arguments.get("transaction"))
        if verb == "weight_open":
            request = arguments["request"]
            self._publication.opened(
                request["transaction"],
                replica,
                version=request["version"],
                sequence=request["sequence"],
                ttl_s=request["ttl_s"],
            )
        elif verb == "weight_abort":
            self._publication.aborted(transaction)
        resumes = verb == "weight_resume" or (verb == "weight_seal" and arguments["resume"])
        if resumes:
            await self._hold_others(self._publication.covers(transaction))
        (result,) = await self._roster.call(verb, arguments, deadline_s=deadline_s, only=[replica])
        if resumes and result.outcome == "ok":
            self._held.discard(replica)
            self._publication.committed(transaction)
        if resumes:  # after a failure too: those that were held go on with what is still published
            self._catch_up()
        return result

    async def replicas(self) -> list[dict[str, Any]]:
        """Who is in the fleet: id, node, pid, whether it serves, whether it died. JSON values."""
        return [
            {
                "replica": member.id,
                "node": member.info.get("node"),
                "pid": member.info.get("pid"),
                "serving": member.serving,
                "dead": member.died_at is not None,
            }
            for member in self._roster.members
        ]

    async def receivers(self) -> dict[str, list[Any]]:
        """Replicas that a publisher has to bring to a version: id -> SchedulerActor handles in rank order.

        Those that serve. Newcomers get what is published from one of them; with none, they wait for a publisher.
        """
        living = self._roster.living
        chosen = [member for member in living if member.serving] or living
        return {member.id: list(member.info["ranks"]) for member in chosen}

    async def ranks(self, replica: str) -> list[Any]:
        """SchedulerActor handles of one replica, in rank order."""
        member = self._roster.find(replica)
        return [] if member is None else list(member.info["ranks"])

    # Replicas that a publisher does not know of

    async def _peer_of(self, replica: str) -> Peer | None:
        for member in self._roster.living:
            if member.serving and member.id != replica and not await self._roster.is_dead(member):
                return Peer(replica=member.id, ranks=list(member.info["ranks"]))
        return None

    async def _hold_others(self, covered: set[str]) -> None:
        """Have serving replicas hold that a committing transaction does not cover. `covered` is empty once it has."""
        stale = [m.id for m in self._roster.living if m.serving and m.id not in covered]
        if not covered or not stale:
            return
        for member in self._roster.living:
            member.serving = member.serving and member.id in covered
        self._held.update(stale)
        results = await self._roster.call(
            "pause", {"mode": "retract"}, deadline_s=_HOLD_TIMEOUT_S, only=stale
        )
        for result in results:
            if result.outcome not in ("ok", "dead"):
                logger.error("replica %s could not be held: %s", result.replica, result.error)

    def _catch_up(self) -> None:
        held, self._held = self._held, set()
        for replica in held:
            self._in_background(self._bring_up_to_date(replica))

    async def _bring_up_to_date(self, replica: str) -> None:
        """It serves nothing meanwhile; one that can't fails its health check, and Serve replaces it."""
        (result,) = await self._roster.call(
            "catch_up", {}, deadline_s=_CATCH_UP_TIMEOUT_S, only=[replica]
        )
        if result.outcome != "ok":
            logger.error("replica %s has not caught up: %s", replica, result.error)

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _process_is_dead(member: Member) -> bool:
    """Whether the replica's process is gone. A frozen one doesn't answer, and is not dead."""
    try:
        await asyncio.wait_for(_ready(member.info["actor"]), 5.0)
    except TimeoutError:
        return False
    except ray.exceptions.ActorDiedError:
        return True
    return False


async def _ready(actor: Any) -> None:
    await actor.__ray_ready__.remote()
