"""The table of faults: every cell that the state machine yields, and that the documentation prints exactly it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.ray.weight_sync.fault_table import FAULTS, STEPS_OF, cells, markdown, outcome

DOCUMENT = Path(__file__).parents[2] / "docs" / "weight-sync.md"


def test_the_documentation_prints_what_the_state_machine_yields():
    assert markdown() in DOCUMENT.read_text(), (
        "run python -m sglang.srt.ray.weight_sync.fault_table and paste its output"
    )


@pytest.mark.parametrize("staging", STEPS_OF)
def test_every_step_and_every_fault_has_a_cell(staging):
    found = list(cells(staging=staging))
    assert {step for step, _, _ in found} == set(STEPS_OF[staging])
    assert {fault for _, fault, _ in found} == set(FAULTS)


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize(("staging", "first_write"), [("direct", "wire"), ("shadow", "copy")])
def test_no_cell_serves_the_new_version_with_an_error_or_the_old_one_after_bytes_landed(
    engines, staging, first_write
):
    steps = STEPS_OF[staging]
    for step, fault, found in cells(engines=engines, staging=staging):
        if found.version == "new":
            assert (found.state, found.raises) == ("SERVING", False), (step, fault)
        if found.state == "SERVING" and found.version == "old":
            assert steps.index(step) < steps.index(first_write), (step, fault)


def test_what_can_not_meet_has_no_cell_and_what_is_unknown_is_refused():
    assert outcome("plan", "byte corrupted") is None
    assert outcome("copy", "byte corrupted", staging="shadow") is None
    with pytest.raises(ValueError, match="'nothing'"):
        outcome("nothing", "exception")
