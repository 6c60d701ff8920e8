"""What the demo shows and keeps: table rows, log lines, totals, plots."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from plots import plot_reward, plot_sync_phases
from records import GAP_TOLERANCE, StepRecord, SyncRecord, UpdateRecord
from report import COLUMNS, LiveReport, phase_text, step_line, table_row
from rich.console import Console
from summary import RunResult, percentile, totals, write_summary

SYNC = SyncRecord(
    version="3",
    total_bytes=5_800_000,
    total_seconds=0.025,
    pause_seconds=0.02,
    wire_gigabytes_per_second=1.25,
    phase_seconds={"pause": 0.001, "wire": 0.02, "verify": 0.0035, "resume": 0.0005},
)
STEP = StepRecord(
    step=3,
    reward=0.25,
    tokens_per_second=1234.5,
    sync=SYNC,
    update=UpdateRecord(loss=-0.01, gap=4.8e-7, shift=0.12, seconds=0.2),
    engine_version="3",
    seconds=0.9,
)


def test_a_table_row_has_a_cell_for_each_column():
    row = table_row(STEP)
    assert len(row) == len(COLUMNS)
    assert row[:5] == ("3", "3", "0.250", "-0.010", "1,234")
    assert row[-1] == "pause 1.0 wire 20.0 verify 3.5 resume 0.5"


def test_a_narrow_row_keeps_the_largest_phases():
    assert phase_text(SYNC.phase_seconds, keep=2) == "wire 20.0 verify 3.5 other 1.5"


def test_without_a_terminal_each_step_is_one_line():
    console = Console(force_terminal=False, width=80, file=io.StringIO())
    with LiveReport(console, num_steps=5) as report:
        report.add(STEP)
    assert console.file.getvalue().strip() == step_line(STEP, num_steps=5)


def test_percentile_is_the_nearest_rank():
    assert percentile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert percentile(list(range(1, 101)), 0.95) == 95
    with pytest.raises(ValueError, match="needs values"):
        percentile([], 0.95)


def make_result(**changes: object) -> RunResult:
    result = RunResult(
        options={"seed": 0, "model_size": "tiny", "out": Path("out")},
        outcome="completed",
        chance_reward=0.125,
        gap_tolerance=GAP_TOLERANCE,
        control_gap=1.0,
        steps=(dataclasses.replace(STEP, step=1), dataclasses.replace(STEP, step=2)),
        evaluation=None,
        seconds=3.0,
    )
    return dataclasses.replace(result, **changes)


def test_totals_count_all_bytes_and_leave_the_first_sync_out_of_the_pause():
    slow = dataclasses.replace(SYNC, pause_seconds=9.0)
    first = dataclasses.replace(STEP, step=1, sync=slow)
    found = totals(make_result(steps=(first, STEP)))
    assert found["bytes_moved"] == 2 * SYNC.total_bytes
    assert found["warm_pause_mean_seconds"] == SYNC.pause_seconds
    assert found["steps_per_second"] == pytest.approx(1 / 0.9)


def test_a_run_that_failed_before_its_first_step_still_writes_a_summary(tmp_path: Path):
    write_summary(make_result(steps=(), outcome="failed"), tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["outcome"] == "failed"
    assert written["totals"] == {}


def test_both_plots_are_drawn(tmp_path: Path):
    plot_reward(make_result(), tmp_path / "reward.png")
    plot_sync_phases(make_result(), tmp_path / "phases.png")
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())
