"""How a publisher steers one engine: the protocol, whoever speaks it.

`weight_sync` knows no HTTP, Engine or Serve; the implementations live beside what they speak to
(`sglang.srt.ray.engine_control`). Every call has a deadline, and raises instead of returning a status.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, get_args

PauseMode = Literal["abort", "retract", "in_place"]
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)


class EngineControl(Protocol):
    """Control over one engine. Called by the publisher, from its own process and thread, one call at a time.

    Each method raises `EngineRequestError` with the engine's own text when it refuses, and `DeadlineExceededError`
    when it doesn't answer within `timeout_s` seconds.
    """

    @property
    def name(self) -> str:
        """What errors and reports call this engine."""

    @property
    def actors(self) -> Sequence[Any]:
        """Handles of the engine's SchedulerActors, in rank order."""

    def pause(self, mode: PauseMode, *, timeout_s: float) -> None:
        """Keep batches out: `abort` ends open requests, `retract` and `in_place` let them go on afterwards."""

    def begin(self, *, timeout_s: float) -> None:
        """Open the weight session on every rank."""

    def end(self, *, timeout_s: float) -> None:
        """Close the session: rebuild what is derived from the weights."""

    def flush(self, *, timeout_s: float) -> None:
        """Drop the prefix cache; a refused flush is an error."""

    def set_version(self, version: str, *, timeout_s: float) -> None:
        """Label what is served from now on. Aborts no request."""

    def resume(self, *, timeout_s: float) -> None:
        """Let batches run again."""
