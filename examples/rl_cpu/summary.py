"""What stays after the run: ``summary.json`` with every step and the totals.

Totals called ``warm`` leave out the first sync, which pays once for planning and pinning memory.
The file is written after a failure or Ctrl-C too, with the outcome in it, so that a broken run can
be read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from records import Evaluation, StepRecord, SyncRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """All that a run produced; the fields that it did not reach are empty."""

    options: dict[str, Any]
    """The command line, as parsed."""

    outcome: str
    """``completed``, ``interrupted`` or ``failed``."""

    chance_reward: float
    gap_tolerance: float
    control_gap: float | None
    """The gap before the first sync: it must be large, or a small gap would prove nothing."""

    steps: tuple[StepRecord, ...]
    evaluation: Evaluation | None
    seconds: float
    """The whole run, start of Ray and of the engine included."""

    @property
    def syncs(self) -> tuple[SyncRecord, ...]:
        last = () if self.evaluation is None else (self.evaluation.sync,)
        return tuple(step.sync for step in self.steps) + last

    @property
    def gaps(self) -> tuple[float, ...]:
        last = () if self.evaluation is None else (self.evaluation.gap,)
        return tuple(step.update.gap for step in self.steps) + last


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    if not values or not 0 < share <= 1:
        raise ValueError(
            f"percentile needs values and a share in (0, 1], got {values!r} and {share!r}"
        )
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def totals(result: RunResult) -> dict[str, Any]:
    """Bytes, pauses and speeds over the run; empty when no step was finished."""
    if not result.steps:
        return {}
    warm = result.syncs[1:] or result.syncs
    pauses = [sync.pause_seconds for sync in warm]
    step_seconds = [step.seconds for step in result.steps]
    return {
        "num_syncs": len(result.syncs),
        "bytes_moved": sum(sync.total_bytes for sync in result.syncs),
        "first_sync_seconds": result.syncs[0].total_seconds,
        "warm_sync_mean_seconds": fmean(sync.total_seconds for sync in warm),
        "warm_pause_mean_seconds": fmean(pauses),
        "warm_pause_p95_seconds": percentile(pauses, 0.95),
        "warm_wire_mean_gigabytes_per_second": fmean(s.wire_gigabytes_per_second for s in warm),
        "steps_per_second": len(step_seconds) / sum(step_seconds),
        "tokens_per_second": fmean(step.tokens_per_second for step in result.steps),
        "first_reward": result.steps[0].reward,
        "final_reward": (result.evaluation or result.steps[-1]).reward,
        "largest_gap": max(result.gaps),
        "smallest_shift": min(step.update.shift for step in result.steps),
    }


def write_summary(result: RunResult, path: Path) -> None:
    """Write the result, its totals first."""
    body = {"outcome": result.outcome, "totals": totals(result), **asdict(result)}
    path.write_text(json.dumps(body, indent=2, default=str) + "\n")


def summary_line(result: RunResult) -> str:
    """The totals in one sentence, for the end of the run."""
    found = totals(result)
    pause, p95 = found["warm_pause_mean_seconds"] * 1e3, found["warm_pause_p95_seconds"] * 1e3
    return (
        f"{found['num_syncs']} syncs moved {found['bytes_moved'] / 1e6:.1f} MB; "
        f"warm pause mean {pause:.1f} ms, p95 {p95:.1f} ms; "
        f"{found['steps_per_second']:.2f} steps/s; largest gap {found['largest_gap']:.1e} "
        f"(tolerance {result.gap_tolerance:.0e}, "
        f"an update shifts by {found['smallest_shift']:.1e} or more)"
    )
