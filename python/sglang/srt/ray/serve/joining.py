"""How a replica gets to serve: it takes over what the fleet has published, from a peer, and asks to be admitted.

The same for a newcomer and for one that a publisher left behind. What it was given is checked by digest on every rank,
by the fence that every weight sync passes; the fleet admits it only if nothing was published meanwhile (F20).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from sglang.srt.ray.serve.agent import FleetAgent
from sglang.srt.ray.serve.fleet import Peer
from sglang.srt.ray.serve.publication import PublishedWeights
from sglang.srt.ray.serve.verbs import ReplicaVerbs
from sglang.srt.ray.weight_sync.control import OpenRequest
from sglang.srt.ray.weight_sync.errors import DeadlineExceededError, WeightMismatchError

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 60.0
TRANSFER_TIMEOUT_S = 300.0
_LOOK_AGAIN_S = 0.5


async def become_current(agent: FleetAgent, engine: Any, verbs: ReplicaVerbs, name: str) -> None:
    """Return once this replica holds what the fleet serves and may serve itself. Waits for a peer, or a publisher.

    Raises:
        WeightSyncError: a transfer failed; this replica has to be replaced.
    """
    while True:
        wanted = await agent.wanted()
        version = _version(engine)
        if wanted.weights is not None and version != wanted.weights.version:
            if wanted.peer is None:
                logger.warning(
                    "%s waits for weights %r: no replica that serves them is left, so a publisher has to connect",
                    name,
                    wanted.weights.version,
                )
                await asyncio.sleep(_LOOK_AGAIN_S)
                continue
            await _take_over(engine, wanted.peer, wanted.weights, name)
            version = wanted.weights.version
        paused = (await verbs.state())["paused"]
        if wanted.paused is not None:
            await verbs.pause(mode=wanted.paused, deadline_s=STEP_TIMEOUT_S)
        elif paused:
            await verbs.resume(deadline_s=STEP_TIMEOUT_S)
        if await agent.admit(version, wanted.generation):
            return
        await asyncio.sleep(_LOOK_AGAIN_S)


def published_weights(engine: Any) -> PublishedWeights | None:
    """What this engine serves, if that was published to it."""
    fence = getattr(engine.tokenizer_manager, "weight_fence", None)
    if fence is None or fence.machine.last_commitment is None:
        return None
    return PublishedWeights(version=fence.machine.version, sequence=fence.machine.last_sequence)


def _version(engine: Any) -> str:
    return str(engine.tokenizer_manager.config_value("weight_version"))


async def _take_over(engine: Any, peer: Peer, weights: PublishedWeights, name: str) -> None:
    fence = engine.tokenizer_manager.weight_fence
    mine = engine.scheduler_actors
    if len(mine) != len(peer.ranks):
        raise WeightMismatchError(
            f"{name} has {len(mine)} ranks and its peer {peer.replica!r} {len(peer.ranks)}"
        )
    request = OpenRequest(
        transaction=uuid.uuid4().hex,
        sequence=weights.sequence,
        owner=f"{name}, from its peer {peer.replica}",
        version=weights.version,
        pause="retract",
        ttl_s=2 * STEP_TIMEOUT_S + TRANSFER_TIMEOUT_S,
    )
    try:
        await fence.open(request, timeout_s=STEP_TIMEOUT_S)
        calls = [
            asyncio.wrap_future(
                theirs.send_weights_to.remote(
                    ours, request.transaction, TRANSFER_TIMEOUT_S
                ).future()
            )
            for theirs, ours in zip(peer.ranks, mine, strict=True)
        ]
        try:
            await asyncio.wait_for(asyncio.gather(*calls), TRANSFER_TIMEOUT_S + STEP_TIMEOUT_S)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"{name}: peer {peer.replica!r} did not deliver its weights in time"
            ) from error
        await fence.seal(request.transaction, resume=True, timeout_s=STEP_TIMEOUT_S)
    except BaseException as error:
        await fence.abort(request.transaction, str(error), timeout_s=STEP_TIMEOUT_S)
        raise
