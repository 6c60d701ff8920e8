"""What one weight sync cost: bytes, seconds and GB/s by phase, and the version that the fleet then serves.

A report is made only by a sync that succeeded everywhere; a failed one raises. It prints as a table and as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.ray.weight_sync.ledger import PullReport

if TYPE_CHECKING:
    from rich.table import Table

PHASES = (
    "plan",
    "stage",
    "prefetch",
    "pause",
    "begin",
    "copy",
    "wire",
    "verify",
    "control",
    "end",
    "flush",
    "version",
    "resume",
)
"""In the order in which they happen; `copy`, `wire` and `verify` are the slowest rank's, `control` is what the call to
the ranks took beyond them, `prefetch` all of the transfer that comes before the pause with `shadow` staging. Between
`pause` and `resume` (both included) generation stands still."""

_PAUSED_PHASES = PHASES[PHASES.index("pause") :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncReport:
    """One successful sync of all engines to `version`. Seconds and bytes; GB are 1e9 bytes."""

    version: str
    staging: str
    pause_mode: str
    partial: bool = False
    """Whether only a declared subset of the weights was sent."""
    verified: bool
    """Whether every byte's digest was compared with its source's before generation went on."""
    phase_seconds: Mapping[str, float]
    ranks: Mapping[str, tuple[PullReport, ...]]
    """Engine name -> one report per rank."""

    @property
    def total_bytes(self) -> int:
        """Bytes that landed, over all ranks of all engines."""
        return sum(report.total_bytes for reports in self.ranks.values() for report in reports)

    @property
    def total_seconds(self) -> float:
        return sum(self.phase_seconds.values())

    @property
    def pause_seconds(self) -> float:
        """How long generation stood still, as seen by the publisher."""
        return sum(self.phase_seconds.get(phase, 0.0) for phase in _PAUSED_PHASES)

    @property
    def wire_gigabytes_per_second(self) -> float:
        """All bytes over the slowest rank's transfer time, into the shadow buffer or not."""
        slowest = max(report.wire_seconds for reports in self.ranks.values() for report in reports)
        return self.total_bytes / slowest / 1e9

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)
        fields |= {
            "total_bytes": self.total_bytes,
            "total_seconds": self.total_seconds,
            "pause_seconds": self.pause_seconds,
            "wire_gigabytes_per_second": self.wire_gigabytes_per_second,
        }
        return json.dumps(fields)

    def __rich__(self) -> Table:
        from rich.table import Table

        verified = "verified" if self.verified else "UNVERIFIED"
        verified += ", partial" if self.partial else ""
        table = Table(
            title=f"version {self.version!r}: {self.total_bytes / 1e6:.1f} MB, {verified}"
        )
        table.add_column("phase")
        table.add_column("ms", justify="right")
        for phase in PHASES:
            if phase in self.phase_seconds:
                table.add_row(phase, f"{self.phase_seconds[phase] * 1e3:.1f}")
        table.add_row("total", f"{self.total_seconds * 1e3:.1f}", style="bold")
        table.add_row("paused", f"{self.pause_seconds * 1e3:.1f}", style="bold")
        table.add_row("wire GB/s", f"{self.wire_gigabytes_per_second:.2f}")
        return table


class PhaseClock:
    """Seconds by phase, in the order in which they were measured."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def split(self, phase: str, **parts: float) -> None:
        """Take `parts` out of a measured phase."""
        self.seconds[phase] = max(self.seconds[phase] - sum(parts.values()), 0.0)
        self.seconds |= parts


def split_phases(
    clock: PhaseClock,
    states: Sequence[Mapping[str, Any]],
    reports: Mapping[str, tuple[PullReport, ...]],
) -> None:
    """Take the slowest engine's steps and the slowest rank's transfer out of what the calls took altogether."""
    ranks = [report for each in reports.values() for report in each]
    steps = [state["step_seconds"] for state in states]
    parts = {name: max(each[name] for each in steps) for name in steps[0]}
    clock.split(
        "control",
        **parts,
        **({"copy": copy} if (copy := max(report.copy_seconds for report in ranks)) else {}),
        wire=max(report.wire_seconds - report.early_wire_seconds for report in ranks),
        verify=max(report.verify_seconds - report.early_verify_seconds for report in ranks),
    )
