"""What a failed sync raises and what a good one reports."""

from __future__ import annotations

import io
import json
import pickle
import re

import cloudpickle
import pytest
from rich.console import Console

from sglang.srt.ray import weight_sync
from sglang.srt.ray.weight_sync import PullReport, SyncReport, WeightSyncError
from sglang.srt.ray.weight_sync.errors import places_of, retold
from sglang.srt.ray.weight_sync.report import PHASES

KINDS = sorted(
    (
        kind
        for kind in vars(weight_sync).values()
        if isinstance(kind, type) and issubclass(kind, WeightSyncError)
    ),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("library", [pickle, cloudpickle])
def test_an_error_survives_pickling_with_its_fields(kind: type[WeightSyncError], library):
    error = kind("it broke", engine="e0", rank=3, tensor="model.norm.weight", phase="wire")
    arrived = library.loads(library.dumps(error))
    assert type(arrived) is kind
    assert vars(arrived) == vars(error)
    assert str(arrived) == str(error)
    assert "it broke [engine='e0', rank=3, tensor='model.norm.weight', phase='wire']" in str(error)


def test_an_error_names_only_the_places_that_apply():
    assert str(WeightSyncError("it broke")) == "it broke"
    assert str(WeightSyncError("it broke", rank=0)) == "it broke [rank=0]"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_told_in_json_is_raised_as_its_class_under_the_callers_name_of_the_engine(kind):
    error = kind("it broke", engine="here", rank=3, tensor="lm_head.weight", phase="wire")
    told = {"type": kind.__name__, "message": error.message} | places_of(error)
    arrived = retold(json.loads(json.dumps(told)), engine="e0")
    assert type(arrived) is kind
    assert vars(arrived) == vars(error) | {"engine": "e0"}


@pytest.mark.parametrize("name", ["Any", "places_of", "OSError", "NoSuchError"])
def test_a_class_that_is_none_of_ours_is_a_request_that_failed(name):
    arrived = retold({"type": name, "message": "it broke"}, engine="e0")
    assert type(arrived) is weight_sync.EngineRequestError
    assert str(arrived) == "it broke [engine='e0']"
    with pytest.raises(KeyError):
        retold({"message": "no class"}, engine="e0")


def test_callers_mistakes_are_value_errors_and_deadlines_are_timeouts():
    assert issubclass(weight_sync.WeightNameError, ValueError)
    assert issubclass(weight_sync.WeightMismatchError, ValueError)
    assert issubclass(weight_sync.DeadlineExceededError, TimeoutError)
    assert not issubclass(weight_sync.TransferError, ValueError)


def make_report(**changes) -> SyncReport:
    rank = PullReport(
        rank=0, total_bytes=3_000_000, wire_seconds=0.5, verify_seconds=0.125, verified=True
    )
    seconds = dict.fromkeys(PHASES, 0.0625) | {"wire": 0.5, "verify": 0.125, "plan": 2.0}
    fields = {
        "version": "7",
        "staging": "direct",
        "pause_mode": "retract",
        "verified": True,
        "phase_seconds": seconds,
        "ranks": {"e0": (rank, rank), "e1": (rank, rank)},
    }
    return SyncReport(**(fields | changes))


def test_totals_are_over_all_ranks_and_the_pause_leaves_out_what_runs_before_it():
    report = make_report()
    assert report.total_bytes == 12_000_000
    assert report.total_seconds == sum(report.phase_seconds.values())
    assert report.pause_seconds == report.total_seconds - 2.0 - 2 * 0.0625  # plan, stage, prefetch
    assert report.wire_gigabytes_per_second == 12e6 / 0.5 / 1e9


def test_the_json_holds_every_field_and_the_totals():
    read = json.loads(make_report().to_json())
    assert read["version"] == "7"
    assert read["total_bytes"] == 12_000_000
    assert read["pause_seconds"] == make_report().pause_seconds
    assert read["ranks"]["e1"][1]["total_bytes"] == 3_000_000
    assert list(read["phase_seconds"]) == list(PHASES)


@pytest.mark.parametrize(("verified", "word"), [(True, "verified"), (False, "UNVERIFIED")])
def test_the_table_shows_phases_in_order_and_whether_it_was_verified(verified: bool, word: str):
    console = Console(file=io.StringIO(), width=100)
    console.print(make_report(verified=verified))
    text = console.file.getvalue()
    assert f"version '7': 12.0 MB, {word}" in " ".join(text.split())
    assert "500.0" in text
    rows = re.findall(r"^\W+(\w+)[^\w\n]+[\d.]+\W*$", text, flags=re.MULTILINE)
    assert rows == [*PHASES, "total", "paused"]
