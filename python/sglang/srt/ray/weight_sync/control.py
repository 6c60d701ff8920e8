"""How a publisher steers one engine: the protocol, whoever speaks it.

`weight_sync` knows no HTTP, Engine or Serve; the implementations live beside what they speak to
(`sglang.srt.ray.engine_control`). Every call has a deadline, may be repeated, and raises instead of returning a status.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

PauseMode = Literal["abort", "retract", "in_place"]
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """What a publisher asks an engine to begin."""

    transaction: str
    sequence: int
    """Higher than that of any transaction the engine has seen."""
    owner: str
    version: str
    pause: PauseMode
    ttl_s: float
    """The engine gives the transaction up when it is not served this many seconds later."""
    force: bool = False
    """Take over from another owner whose transaction is still open."""
    partial: bool = False
    """Whether only some of the weights will be sent, which can't mend a torn engine."""


class EngineControl(Protocol):
    """Control over one engine. Called by the publisher, from its own process and thread, one call at a time.

    Each method raises a `WeightSyncError` with the engine's own text when it refuses, and `DeadlineExceededError` when
    it doesn't answer within `timeout_s` seconds. Status dictionaries are what `GET /weight_sync` serves.
    """

    @property
    def name(self) -> str:
        """What errors and reports call this engine."""

    @property
    def actors(self) -> Sequence[Any]:
        """Handles of the engine's SchedulerActors, in rank order."""

    def open(self, request: OpenRequest, *, timeout_s: float) -> Mapping[str, Any]:
        """Pause generation and open the weight session on every rank."""

    def seal(self, transaction: str, *, resume: bool, timeout_s: float) -> Mapping[str, Any]:
        """Check that every rank holds the new weights, rebuild what is derived from them, drop what older weights
        cached and move the label. Generation stays paused unless `resume`."""

    def resume(self, transaction: str, *, timeout_s: float) -> Mapping[str, Any]:
        """Serve the sealed version."""

    def abort(self, transaction: str, reason: str, *, timeout_s: float) -> Mapping[str, Any]:
        """Give the transaction up: the old version serves again if no byte landed, the engine is TORN otherwise."""

    def status(self, *, timeout_s: float) -> Mapping[str, Any]:
        """State, version, transaction, owner and the last report of each rank."""
