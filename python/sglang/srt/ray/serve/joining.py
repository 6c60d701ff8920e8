"""How a replica gets to serve: it takes over what the fleet has published, from a peer, and asks to be admitted.

The same for a newcomer and for one that a publisher left behind. What it was given is checked by digest on every rank,
by the fence that every weight sync passes; the fleet admits it only if nothing was published meanwhile (F20), and until
then its generation stays paused. A transfer that fails is tried again, from another peer when that one died.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

import ray

from sglang.srt.ray.serve.agent import FleetAgent
from sglang.srt.ray.serve.fleet import Peer, Wanted
from sglang.srt.ray.serve.publication import PublishedWeights
from sglang.srt.ray.serve.verbs import ReplicaVerbs
from sglang.srt.ray.weight_sync.control import OpenRequest
from sglang.srt.ray.weight_sync.errors import (
    DeadlineExceededError,
    TransferError,
    WeightMismatchError,
    WeightSyncError,
)
from sglang.srt.ray.weight_sync.states import WeightState

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 60.0
TRANSFER_TIMEOUT_S = 300.0
MAX_FAILURES = 5
"""Transfers in a row that may fail before this replica gives up and is replaced."""
_LOOK_AGAIN_S = 0.5


class Joining:
    """One replica's way into the fleet. Called on the event loop of its engine."""

    def __init__(self, agent: FleetAgent, engine: Any, verbs: ReplicaVerbs, name: str) -> None:
        """Args:
        agent: the replica's connection to the fleet.
        engine: its `LaunchedEngine`.
        verbs: what the fleet can have it do.
        name: Serve's id of it.
        """
        self._agent = agent
        self._engine = engine
        self._verbs = verbs
        self._name = name
        self.gate = asyncio.Lock()
        """Whoever pauses or resumes generation for others holds it, so that an admission can't undo their pause."""

    async def become_current(self) -> None:
        """Return once this replica holds what the fleet serves and serves it. Waits for a peer, or a publisher.

        Raises:
            WeightMismatchError: the peer's engine is of another shape.
            WeightSyncError: transfers failed `MAX_FAILURES` times in a row; this replica has to be replaced.
        """
        failures = 0
        while True:
            wanted = await self._agent.wanted()
            try:
                ready = await self._holds(wanted)
            except WeightMismatchError:
                raise
            except WeightSyncError as error:
                failures += 1
                logger.warning(
                    "%s: transfer %d of %d failed: %s", self._name, failures, MAX_FAILURES, error
                )
                if failures == MAX_FAILURES:
                    raise
                ready = False
            if ready and await self._admitted(wanted):
                return
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _holds(self, wanted: Wanted) -> bool:
        """Whether this replica holds the published weights, after taking them over where there is a peer."""
        weights = wanted.weights
        if weights is None or not self._needs(weights):
            return True
        if wanted.in_progress:
            return False
        if wanted.peer is None:
            logger.warning(
                "%s waits for weights %r: no replica that serves them is left, so a publisher has to connect",
                self._name,
                weights.version,
            )
            return False
        await self._take_over(wanted.peer, weights)
        return True

    def _needs(self, weights: PublishedWeights) -> bool:
        fence = getattr(self._engine.tokenizer_manager, "weight_fence", None)
        torn = fence is not None and fence.machine.state is WeightState.TORN
        return torn or _version(self._engine) != weights.version

    async def _admitted(self, wanted: Wanted) -> bool:
        """Ask to serve, and let generation go on or not as the fleet has it."""
        async with self.gate:
            admission = await self._agent.admit(_version(self._engine), wanted.generation)
            if admission.verdict != "serve":
                return False
            if admission.paused is not None:
                await self._verbs.pause(mode=admission.paused, deadline_s=STEP_TIMEOUT_S)
            elif (await self._verbs.state())["paused"]:
                await self._verbs.resume(deadline_s=STEP_TIMEOUT_S)
        return True

    async def _take_over(self, peer: Peer, weights: PublishedWeights) -> None:
        """Bring this engine to the peer's weights; its generation stays paused."""
        fence = self._engine.tokenizer_manager.weight_fence
        request = OpenRequest(
            transaction=uuid.uuid4().hex,
            sequence=weights.sequence,
            owner=f"{self._name}, from its peer {peer.replica}",
            version=weights.version,
            pause="retract",
            ttl_s=2 * STEP_TIMEOUT_S + TRANSFER_TIMEOUT_S,
        )
        try:
            await fence.open(request, timeout_s=STEP_TIMEOUT_S, own=True)
            await self._receive(peer, request.transaction)
            await fence.seal(
                request.transaction, resume=True, stay_paused=True, timeout_s=STEP_TIMEOUT_S
            )
        except BaseException as error:
            await fence.abort(request.transaction, str(error), timeout_s=STEP_TIMEOUT_S)
            raise

    async def _receive(self, peer: Peer, transaction: str) -> None:
        mine = self._engine.scheduler_actors
        if len(mine) != len(peer.ranks):
            raise WeightMismatchError(
                f"{self._name} has {len(mine)} ranks and its peer {peer.replica!r} {len(peer.ranks)}"
            )
        calls = [
            asyncio.wrap_future(
                theirs.send_weights_to.remote(ours, transaction, TRANSFER_TIMEOUT_S).future()
            )
            for theirs, ours in zip(peer.ranks, mine, strict=True)
        ]
        try:
            await asyncio.wait_for(asyncio.gather(*calls), TRANSFER_TIMEOUT_S + STEP_TIMEOUT_S)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"{self._name}: peer {peer.replica!r} did not deliver its weights in time"
            ) from error
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, WeightSyncError):
                raise cause from error
            raise TransferError(
                f"peer {peer.replica!r} could not lend its weights: {error}", phase="wire"
            ) from error


def published_weights(engine: Any) -> PublishedWeights | None:
    """What this engine serves, if that was published to it."""
    fence = getattr(engine.tokenizer_manager, "weight_fence", None)
    if fence is None or fence.machine.last_commitment is None:
        return None
    return PublishedWeights(version=fence.machine.version, sequence=fence.machine.last_sequence)


def _version(engine: Any) -> str:
    return str(engine.tokenizer_manager.config_value("weight_version"))
