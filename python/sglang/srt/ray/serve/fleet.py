"""The one place that knows every replica of a model: a Serve deployment of one small replica without a CPU.

Ingress and trainers steer the fleet through its handle (`call`, `weights`), replicas join and fetch their commands
(`roster.py`). It also keeps what is wanted of the fleet, so that a replica which starts later is brought to the same
state before it serves. If it dies Serve restarts it, and the replicas join again within seconds.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from sglang.srt.ray.serve.results import ReplicaResult
from sglang.srt.ray.serve.roster import Command, Member, Roster

OPTIONS: dict[str, Any] = {
    "num_replicas": 1,
    "max_ongoing_requests": 100_000,  # every replica waits here for its commands
    "ray_actor_options": {"num_cpus": 0},
    "health_check_period_s": 2,
}


def deployment_name(model_id: str) -> str:
    """The name of a model's FleetControl deployment, for `serve.get_deployment_handle`."""
    return "SGLangFleet:" + model_id.replace("/", "--").replace(".", "_")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a replica that joins has to be brought to before it serves."""

    paused: str | None
    """The mode in which the fleet is paused; None while it runs."""


class FleetControl:
    """Methods are called through a Serve handle; all run on one event loop."""

    def __init__(self) -> None:
        self._roster = Roster(_process_is_dead)
        self._paused: str | None = None

    # What replicas call

    async def join(self, replica: str, info: Mapping[str, Any]) -> Wanted:
        """A replica's engine is up; it serves nothing yet."""
        self._roster.join(replica, info)
        return Wanted(paused=self._paused)

    async def admit(self, replica: str) -> bool:
        """Ask for permission to serve. False: `join` again, this process was restarted."""
        member = self._roster.find(replica)
        if member is None:
            return False
        member.serving = True
        return True

    async def leave(self, replica: str) -> None:
        self._roster.leave(replica)

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

    async def ranks(self, replica: str) -> list[Any]:
        """SchedulerActor handles of one replica, in rank order."""
        member = self._roster.find(replica)
        return [] if member is None else list(member.info["ranks"])

    async def check_health(self) -> None:
        """Nothing can be wrong that an answer would not show."""


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
