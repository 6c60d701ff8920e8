"""The release test's short form: 8 streams, 4 sessions, 2 syncs in each pause mode, the same assertions."""

from __future__ import annotations

from typing import Any

import release_run
from release_load import Notes
from rich.console import Console
from support.serve_app import ServedApp


def test_syncs_under_load_keep_every_promise(served: ServedApp, versions: Any) -> None:
    plan = release_run.Plan(streams=8, sessions=4, syncs=2, calibrations=2)
    measured = release_run.run(served, plan, first_version=versions.next(20))
    Console().print(release_run.table(measured))
    assert release_run.verdict(measured) == []
    assert set(measured.notes.endings) <= {"length", "abort"}
    assert measured.notes.endings["length"] > 10


def good() -> release_run.Measured:
    notes = Notes(cached_tokens=1, versions={"s": [1, 1, 2]})
    return release_run.Measured(
        bare=[0.1],
        nothing={"abort": [0.1]},
        nothing_latency={"abort": [0.2]},
        pauses={"abort": [0.3] * 20},
        latencies={"abort": [0.5] * 20},
        memory=[1 << 30] * 6,
        notes=notes,
    )


def test_the_verdict_finds_each_kind_of_failure() -> None:
    assert release_run.verdict(good()) == []
    slow = good()
    slow.pauses["abort"] = [0.3] * 18 + [9.0] * 2
    assert "p95 pause" in release_run.verdict(slow)[0]
    for field in ("stuck", "errors", "spills"):
        bad = good()
        getattr(bad.notes, field).append("x")
        assert len(release_run.verdict(bad)) == 1
    back = good()
    back.notes.versions["s"] = [2, 1]
    assert "went back" in release_run.verdict(back)[0]
    leaking = good()
    leaking.memory = [(1 << 30) + n * (30 << 20) for n in range(6)]
    assert "memory grew" in release_run.verdict(leaking)[0]
