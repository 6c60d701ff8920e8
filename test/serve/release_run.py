"""The release test: two replicas under load while weights are synced in every pause mode; a table and a verdict.

The budget of a pause is not a number of this file: it is `FACTOR` times the bare transfer of the same bytes plus what a
sync of nothing costs in that mode, and both are measured in the same run, under the same load, in turns with what is
judged. `make release-test` runs all of it,
`test_release_short.py` a short form.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import ray
from release_load import Load
from rich.console import Console
from rich.table import Table
from support.serve_app import (
    MODEL,
    ServedApp,
    llm_config,
    rank_pids,
    replica_ids,
    running_app,
)
from support.trainer import start_serve_trainer

FACTOR = 5.0
"""A sync also pauses, verifies, flushes and resumes, twice over two cores at worst."""
FLAT_BYTES = 48 << 20
"""How much a process may grow between the first and the last third of the run: arenas, not leaks."""
PAUSES = ("retract", "in_place", "abort")
NOTHING = ["model.norm.weight"]
"""The smallest subset that is a sync: what it costs is the fixed part."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of everything."""

    streams: int = 64
    sessions: int = 16
    syncs: int = 20
    """In each pause mode."""
    calibrations: int = 7
    """Bare transfers and syncs of nothing, in each pause mode too."""


@dataclasses.dataclass(kw_only=True)
class Measured:
    """Seconds and bytes of one run."""

    bare: list[float] = dataclasses.field(default_factory=list)
    """Transfers of the same bytes between two processes without an engine."""
    nothing: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """Pauses of syncs of nothing, by mode; then how long those syncs took."""
    nothing_latency: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    pauses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    latencies: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    memory: list[int] = dataclasses.field(default_factory=list)
    """Resident bytes of replicas and ranks together, after each sync."""
    notes: Any = None


def p95(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[math.ceil(0.95 * len(ordered)) - 1]


class Receiver:
    """Takes the same bytes without an engine: the bare transfer."""

    def pull(self, refs: list[Any]) -> float:
        import torch  # noqa: F401 (the transport needs it)

        started = time.perf_counter()
        ray.get(refs[0])
        return time.perf_counter() - started


def run(app: ServedApp, plan: Plan, *, first_version: int) -> Measured:
    """Everything that is measured; versions count up from `first_version`."""
    measured = Measured()
    trainer = start_serve_trainer()
    receiver = ray.remote(num_cpus=0, enable_tensor_transport=True)(Receiver).remote()
    version = first_version
    try:
        ray.get(trainer.connect_serve.remote(app.name, MODEL), timeout=120)
        ray.get(trainer.sync.remote(version, str(version)), timeout=120)
        with Load(app.url, streams=plan.streams, sessions=plan.sessions) as load:
            pids = _pids(app)
            for pause in PAUSES:
                for number in range(max(plan.syncs, plan.calibrations)):
                    # In turns, so that whatever else the machine does falls on both.
                    if number < plan.calibrations:
                        refs = ray.get(trainer.put_everything.remote(), timeout=120)
                        measured.bare.append(ray.get(receiver.pull.remote(refs), timeout=120))
                        version += 1
                        call = trainer.sync_only.remote(version, str(version), NOTHING, pause)
                        _note(call, pause, measured.nothing, measured.nothing_latency)
                    if number < plan.syncs:
                        version += 1
                        call = trainer.sync.remote(version, str(version), pause)
                        _note(call, pause, measured.pauses, measured.latencies)
                        measured.memory.append(
                            sum(psutil.Process(p).memory_info().rss for p in pids)
                        )
        measured.notes = load.notes
        return measured
    finally:
        ray.kill(trainer)
        ray.kill(receiver)


def _note(
    call: Any, pause: str, pauses: dict[str, list[float]], latencies: dict[str, list[float]]
) -> None:
    started = time.monotonic()
    report = ray.get(call, timeout=120)
    latencies.setdefault(pause, []).append(time.monotonic() - started)
    pauses.setdefault(pause, []).append(report.pause_seconds)


def _pids(app: ServedApp) -> list[int]:
    """Of replicas and ranks."""
    ranks = [pid for replica in replica_ids(app) for pid in rank_pids(app, replica)]
    return [*(int(replica["pid"]) for replica in app.replicas()), *ranks]


def verdict(measured: Measured) -> list[str]:
    """What the run violates; empty when the release may go out."""
    notes, failures = measured.notes, []
    for what, values, nothing in (
        ("pause", measured.pauses, measured.nothing),
        ("latency", measured.latencies, measured.nothing_latency),
    ):
        for mode, seconds in values.items():
            budget = FACTOR * p95(measured.bare) + p95(nothing[mode])
            if p95(seconds) > budget:
                failures.append(
                    f"p95 {what} ({mode}) {p95(seconds):.3f} s is over its budget of {budget:.3f} s"
                )
    if notes.stuck:
        failures.append(f"{len(notes.stuck)} request(s) did not end: {notes.stuck[:5]!r}")
    if notes.errors:
        failures.append(f"{len(notes.errors)} request(s) failed: {notes.errors[:3]!r}")
    if notes.spills:
        failures.append(f"{len(notes.spills)} turn(s) left their replica: {notes.spills[:3]!r}")
    for session, versions in notes.versions.items():
        if versions != sorted(versions):
            failures.append(f"versions of session {session!r} went back: {versions!r}")
    if not notes.cached_tokens:
        failures.append("no turn used its session's cache")
    third = max(len(measured.memory) // 3, 1)
    grown = statistics.median(measured.memory[-third:]) - statistics.median(measured.memory[:third])
    if grown > FLAT_BYTES:
        failures.append(f"memory grew by {grown / 1e6:.0f} MB during the run")
    return failures


def table(measured: Measured) -> Table:
    shown = Table(title="syncs under load (ms)")
    for column in ("", "count", "median", "p95", "most"):
        shown.add_column(column, justify="left" if not column else "right")
    rows = [("bare transfer", measured.bare)]
    rows += [(f"pause of nothing ({mode})", each) for mode, each in measured.nothing.items()]
    rows += [(f"pause ({mode})", values) for mode, values in measured.pauses.items()]
    rows += [
        (f"latency of nothing ({mode})", each) for mode, each in measured.nothing_latency.items()
    ]
    rows += [(f"latency ({mode})", values) for mode, values in measured.latencies.items()]
    rows += [("stream", measured.notes.stream_seconds), ("turn", measured.notes.turn_seconds)]
    for name, values in rows:
        if values:
            numbers = [statistics.median(values), p95(values), max(values)]
            shown.add_row(name, str(len(values)), *(f"{1e3 * number:.1f}" for number in numbers))
    return shown


def main() -> int:
    from support.local_ray import local_ray
    from support.models import write_model

    console = Console()
    with tempfile.TemporaryDirectory() as folder, local_ray(num_cpus=4):
        config = llm_config(write_model(Path(folder)))
        with running_app(config) as app:
            app.wait_for_replicas(2)
            measured = run(app, Plan(), first_version=1)
    console.print(table(measured))
    console.print(f"endings: {measured.notes.endings!r}")
    failures = verdict(measured)
    for failure in failures:
        console.print(f"FAILED: {failure}", style="red")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
