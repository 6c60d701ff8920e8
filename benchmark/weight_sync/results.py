"""Medians of a run and how they are shown: one row for each way, in times of the machine's own copy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table


def summary(syncs: Sequence[dict[str, Any]], copies: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians of one way's syncs; `copies` are the ceilings measured right before each of them."""
    names = list(dict.fromkeys(name for sync in syncs for name in sync["phases"]))
    felt = [sync["felt"] for sync in syncs if "felt" in sync]
    quiet = [(sync, copy) for sync, copy in zip(syncs, copies, strict=True) if "felt" not in sync]
    result = {
        "whole": statistics.median(sync["whole"] for sync, _ in quiet),
        "pause": statistics.median(sync["pause"] for sync, _ in quiet),
        "whole_over_copy": statistics.median(sync["whole"] / copy["copy"] for sync, copy in quiet),
        "phases": {
            name: statistics.median(sync["phases"].get(name, 0.0) for sync, _ in quiet)
            for name in names
        },
        "verified": all(sync["verified"] for sync in syncs),
        "repeats": len(quiet),
    }
    for name in ("longest_gap", "usual_gap", "tokens_per_second") if felt else ():
        result[name] = statistics.median(each[name] for each in felt)
    if "wire" in names:
        result["wire_over_ceiling"] = statistics.median(
            copy["copy"] / wire for sync, copy in quiet if (wire := wire_of(sync)) > 0
        )
    return result


def wire_of(sync: dict[str, Any]) -> float:
    """Seconds in which the slowest rank's bytes moved."""
    return float(sync["phases"].get("prefetch", 0.0) or sync["phases"].get("wire", 0.0))


def table(run: dict[str, Any]) -> Table:
    """One run (a size and a fleet) as a table for people."""
    megabytes = run["bytes"] / 1e6
    title = (
        f"{megabytes:.1f} MB in {run['tensors']} tensors, {run['engines']} engine(s), TP {run['tp']}, "
        f"{run['device']}; one copy {run['copy'] * 1e3:.2f} ms ({run['bytes'] / run['copy'] / 1e9:.2f} GB/s)"
    )
    made = Table(title=title)
    made.add_column("way")
    columns = ("whole ms", "/ copy", "pause ms", "gap felt ms", "wire / ceiling", "verified")
    for column in columns:
        made.add_column(column, justify="right")
    made.add_column("phases, ms")
    for way, row in run["ways"].items():
        phases = " ".join(f"{name} {s * 1e3:.1f}" for name, s in row["phases"].items() if s > 5e-5)
        made.add_row(
            way,
            f"{row['whole'] * 1e3:.1f}",
            f"{row['whole_over_copy']:.2f}",
            f"{row['pause'] * 1e3:.1f}",
            f"{row['longest_gap'] * 1e3:.0f}" if "longest_gap" in row else "",
            f"{row['wire_over_ceiling']:.2f}" if "wire_over_ceiling" in row else "",
            "yes" if row["verified"] else "no",
            phases,
        )
    return made
