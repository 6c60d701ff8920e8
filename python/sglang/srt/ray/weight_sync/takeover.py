"""Bring an engine to what another engine serves, rank from rank, while the trainer is busy or gone.

For an engine that starts, or comes back, between two syncs: it must not serve the checkpoint that it was started from.
The same transaction as a sync's, driven by whoever calls, with the peer's ranks as the source; the peer goes on
serving. On Ray Serve replicas do this by themselves (`serve/joining.py`); a fleet of one's own calls it before it
routes requests.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from typing import Any

from sglang.srt.ray.weight_sync.control import EngineControl, OpenRequest
from sglang.srt.ray.weight_sync.errors import StaleTransactionError, WeightMismatchError
from sglang.srt.ray.weight_sync.fleet import (
    RankAddress,
    abort_everywhere,
    on_every_engine,
    on_every_rank,
)
from sglang.srt.ray.weight_sync.ledger import PullReport
from sglang.srt.ray.weight_sync.report import PhaseClock, SyncReport, split_phases

DEFAULT_DEADLINE_S = 300.0
_CONTROL_S = 60.0
_ANSWER_MARGIN_S = 2.0


def take_over(
    newcomer: EngineControl, peer: EngineControl, *, deadline_s: float = DEFAULT_DEADLINE_S
) -> SyncReport:
    """Bring `newcomer` to the version that `peer` serves, verified by digest on every rank, and let it serve.

    Publishers that are to reach the newcomer from then on have to connect again. May be called from any process.

    Args:
        newcomer: an engine of the same model, dtype and topology; torn ones are mended.
        peer: an engine in state SERVING; its generation goes on.
        deadline_s: for the transfer, in seconds; each control step has a minute.

    Raises:
        StaleTransactionError: the peer is in a transaction, or moved on meanwhile: call again.
        WeightMismatchError: the engines' ranks don't hold the same parameters.
        WeightSyncError: any other failure; the newcomer serves what it did if no byte had landed, else it is TORN.
    """
    clock = PhaseClock()
    lent = _serving(peer)
    _check_alike(newcomer, peer)
    mine = _status(newcomer)
    request = OpenRequest(
        transaction=uuid.uuid4().hex,
        sequence=max(int(lent["last_sequence"]), int(mine["last_sequence"]) + 1),
        owner=f"{socket.gethostname()}:{os.getpid()}, from its peer {peer.name}",
        version=lent["version"],
        pause="retract",
        ttl_s=deadline_s + 4 * _CONTROL_S,
    )
    try:
        with clock.measure("control"):
            on_every_engine(
                [newcomer], "begin", lambda engine: engine.open(request, timeout_s=_CONTROL_S)
            )
            reports = _receive(newcomer, peer, request.transaction, deadline_s)
            if _what_serves(_serving(peer)) != _what_serves(lent):
                raise StaleTransactionError(
                    f"{peer.name} moved on from version {lent['version']!r} while it lent its weights: call again",
                    engine=newcomer.name,
                )
            states = on_every_engine(
                [newcomer],
                "seal",
                lambda engine: engine.seal(request.transaction, resume=True, timeout_s=_CONTROL_S),
            )
    except BaseException as error:
        abort_everywhere([newcomer], request.transaction, error, timeout_s=_CONTROL_S)
        raise
    by_engine = {newcomer.name: tuple(reports)}
    split_phases(clock, states, by_engine)
    return SyncReport(
        version=request.version,
        staging="direct",
        pause_mode="retract",
        partial=False,
        verified=all(report.verified for report in reports),
        phase_seconds=clock.seconds,
        ranks=by_engine,
    )


def _receive(
    newcomer: EngineControl, peer: EngineControl, transaction: str, deadline_s: float
) -> list[PullReport]:
    lenders = [RankAddress(engine=peer, rank=i, actor=a) for i, a in enumerate(peer.actors)]
    arguments = [(receiver, transaction, deadline_s) for receiver in newcomer.actors]
    reports: list[PullReport] = on_every_rank(
        lenders,
        "send_weights_to",
        arguments,
        timeout_s=deadline_s + _ANSWER_MARGIN_S,
        phase="wire",
    )
    return reports


def _serving(peer: EngineControl) -> Mapping[str, Any]:
    state = _status(peer)
    if state["state"] != "SERVING" or state["transaction"] is not None:
        raise StaleTransactionError(
            f"{peer.name} can't lend its weights now: it is {state['state']}, transaction {state['transaction']!r}; "
            f"call again",
            engine=peer.name,
        )
    return state


def _what_serves(state: Mapping[str, Any]) -> tuple[str, int]:
    return str(state["version"]), int(state["last_sequence"])


def _status(engine: EngineControl) -> Mapping[str, Any]:
    (state,) = on_every_engine(
        [engine], "status", lambda asked: asked.status(timeout_s=_CONTROL_S)
    )
    return state


def _check_alike(newcomer: EngineControl, peer: EngineControl) -> None:
    layouts = []
    for engine in (newcomer, peer):
        ranks = [RankAddress(engine=engine, rank=i, actor=a) for i, a in enumerate(engine.actors)]
        layouts.append(
            on_every_rank(
                ranks, "weight_layout", [()] * len(ranks), timeout_s=_CONTROL_S, phase="connect"
            )
        )
    ours, theirs = layouts
    if [layout.fingerprint for layout in ours] != [layout.fingerprint for layout in theirs]:
        raise WeightMismatchError(
            f"{newcomer.name} ({len(ours)} rank(s)) and {peer.name} ({len(theirs)}) don't hold the same parameters "
            f"on each rank: have a publisher sync {newcomer.name}",
            engine=newcomer.name,
        )
