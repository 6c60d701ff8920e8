"""A replica's connection to its fleet: join, fetch commands, perform them, report what came of each.

Runs as a task on the replica's event loop, beside requests, so a control call never queues behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sglang.srt.ray.serve.fleet import Admission, Wanted
from sglang.srt.ray.serve.publication import PublishedWeights
from sglang.srt.ray.serve.results import ReplicaResult, described
from sglang.srt.ray.serve.roster import Command

logger = logging.getLogger(__name__)

_WAIT_S = 5.0
_RETRY_S = 0.5
FLEET_TIMEOUT_S = 60.0

Perform = Callable[[str, Mapping[str, Any], float], Awaitable[Mapping[str, Any]]]


async def perform_within(
    perform: Perform, replica: str, verb: str, arguments: Mapping[str, Any], deadline_s: float
) -> ReplicaResult:
    """Perform one verb under its deadline and describe what came of it; never raises.

    What does not end in time goes on: an engine's barriers can't be cancelled half-way without harm.
    """
    started = time.monotonic()
    task = asyncio.ensure_future(perform(verb, arguments, deadline_s))
    done, _ = await asyncio.wait([task], timeout=deadline_s)
    seconds = time.monotonic() - started
    if not done:
        task.add_done_callback(_log_late_end)
        message = f"replica {replica!r} had not finished {verb!r} after {deadline_s:g} s; it goes on with it"
        error: dict[str, Any] = {
            "type": "DeadlineExceededError",
            "message": message,
            "status": 504,
        }
        return ReplicaResult(replica=replica, outcome="late", error=error, seconds=seconds)
    if (cause := task.exception()) is not None:
        outcome, error = described(cause)
        return ReplicaResult(replica=replica, outcome=outcome, error=error, seconds=seconds)
    return ReplicaResult(replica=replica, outcome="ok", state=task.result(), seconds=seconds)


def _log_late_end(task: asyncio.Future[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    logger.warning("a control call that was late has ended: %r", error or "done")


class FleetAgent:
    """Keeps one replica in touch with its `FleetControl`."""

    def __init__(
        self,
        fleet: Any,
        replica: str,
        info: Mapping[str, Any],
        *,
        perform: Perform,
        serves: Callable[[], PublishedWeights | None],
    ) -> None:
        """Args:
        fleet: the FleetControl deployment's handle.
        replica: Serve's id of this replica.
        info: what the fleet keeps of it; see `roster.Member`.
        perform: performs a verb on this replica's engine.
        serves: the published weights that this replica holds; None while it has its checkpoint's.
        """
        self._fleet = fleet
        self._replica = replica
        self._info = dict(info)
        self._perform = perform
        self._serves = serves
        self._serving = False
        self._task: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def join(self) -> None:
        """Tell the fleet that the engine is up, and begin to obey.

        Raises:
            TimeoutError: the fleet's deployment did not answer.
        """
        serves = self._serves() if self._serving else None
        await self._ask("join", self._info, serves)
        if self._task is None:
            self._task = asyncio.ensure_future(self._obey())

    async def wanted(self) -> Wanted:
        """What this replica has to be brought to before it serves."""
        wanted: Wanted = await self._ask("wanted")
        return wanted

    async def admit(self, version: str, generation: int) -> Admission:
        """Ask for permission to serve; anything but `serve`: look again what is wanted."""
        self._serving = False
        admission: Admission = await self._ask("admit", version, generation)
        if admission.verdict == "join":
            await self.join()
        self._serving = admission.verdict == "serve"
        return admission

    async def broke(self, cause: str) -> None:
        """This replica serves nothing any more and obeys nobody; the fleet counts it as dead."""
        if self._task is not None:
            self._task.cancel()
        await self._ask("broke", cause)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        call = getattr(self._fleet, method).remote(self._replica, *arguments)
        return await asyncio.wait_for(call, FLEET_TIMEOUT_S)

    async def leave(self) -> None:
        """The replica ends."""
        if self._task is not None:
            self._task.cancel()
        with contextlib.suppress(Exception):  # the fleet may be ending too
            await asyncio.wait_for(self._fleet.leave.remote(self._replica), 2.0)

    async def _obey(self) -> None:
        while True:
            try:
                commands = await self._fleet.next_commands.remote(self._replica, _WAIT_S)
                if commands is None:
                    await self._come_back()
                    continue
            except Exception as error:  # the fleet's replica is being replaced
                logger.warning("the fleet did not answer, asking again: %r", error)
                await asyncio.sleep(_RETRY_S)
                continue
            for command in commands:
                task = asyncio.ensure_future(self._run(command))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _come_back(self) -> None:
        """The fleet's process was restarted and knows nobody."""
        await self.join()
        if self._serving and (serves := self._serves()) is not None:
            wanted = await self.wanted()
            while (await self.admit(serves.version, wanted.generation)).verdict != "serve":
                self._serving = True
                await asyncio.sleep(_RETRY_S)
                wanted = await self.wanted()

    async def _run(self, command: Command) -> None:
        result = await perform_within(
            self._perform, self._replica, command.verb, command.arguments, command.deadline_s
        )
        await self._fleet.report.remote(command.id, result)
