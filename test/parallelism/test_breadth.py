"""`docs/models.md` says what the sweep over every shared architecture finds, and no plan is wrong."""

from __future__ import annotations

import breadth
import pytest

pytestmark = pytest.mark.slow


def test_the_table_of_models_is_what_the_sweep_finds() -> None:
    found = dict(breadth.sweep())
    wrong = {a: o for a, o in found.items() if any(e.kind == breadth.WRONG for e in o.values())}
    assert not wrong
    built = [o for o in found.values() if all(e.kind != breadth.NOT_BUILT for e in o.values())]
    exact = [o for o in built if all(e.kind == breadth.EXACT for e in o.values())]
    assert len(exact) >= 0.8 * len(built)
    assert breadth.page(found) == breadth.PAGE.read_text(), (
        "python test/parallelism/breadth.py --write"
    )


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("Qwen3MoeForCausalLM", breadth.EXACT), ("GemmaForCausalLM", breadth.LOADER)],
)
def test_two_kinds_of_models_as_the_table_says(architecture: str, kind: str) -> None:
    ((_, outcomes),) = breadth.sweep([architecture])
    assert {outcome.kind for outcome in outcomes.values()} == {kind}
    (row,) = [
        line for line in breadth.PAGE.read_text().splitlines() if f"| {architecture} |" in line
    ]
    assert row == next(breadth.rows({architecture: outcomes}))
