"""What becomes of an engine when something fails at some step of a sync: computed by driving the real state machine.

`python -m sglang.srt.ray.weight_sync.fault_table` prints the table that docs/weight-sync.md shows, and the fault tests
hold a live engine against the same cells; so documentation, tests and code can't say different things.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from sglang.srt.ray.weight_sync.states import Transaction, WeightState, WeightStateMachine

STEPS = ("plan", "stage", "begin", "wire", "verify", "end", "flush", "version", "resume")
"""`direct` staging. Plan and stage happen in the trainer, wire and verify in the ranks, the others in the engine."""
SHADOW_STEPS = ("plan", "stage", "prefetch", "begin", "copy", "end", "flush", "version", "resume")
"""`shadow` staging: prefetch (wire and verify, beside the parameters) and copy happen in the ranks."""
STEPS_OF = {"direct": STEPS, "shadow": SHADOW_STEPS}
_FIRST_WRITE = {"direct": "wire", "shadow": "copy"}
FAULTS = (
    "exception",
    "trainer killed",
    "trainer frozen",
    "rank killed",
    "reply lost",
    "call repeated",
    "byte corrupted",
)
_CALLS = ("prefetch", "begin", "wire", "copy", "resume")
"""Steps that are (the end of) a call of the publisher, so that its reply can be lost: stage, open, commit, seal."""
_BY_ITSELF = ("end", "flush", "version")
"""Steps that an engine takes without the trainer once it was told to seal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a fault ends."""

    state: str
    """`SERVING`, `TORN`, or `gone` when the engine itself ends."""
    version: str
    """The label afterwards: `old` or `new`."""
    raises: bool
    """Whether the trainer (if it lives) gets an error."""
    after: str
    """When the engine leaves SYNCING: `at once`, or after the transaction's `time limit`."""

    @property
    def cure(self) -> str:
        if self.state == "gone":
            return "start the engine again"
        if self.state == WeightState.TORN.value:
            return "a complete sync, or a reload from disk"
        return "sync again" if self.version == "old" else "nothing to do"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Course:
    """One sync that meets a fault: how far it has come, in which staging, and the engine's state machine."""

    machine: WeightStateMachine
    transaction: Transaction
    staging: str
    step: str
    engines: int

    def reached(self, step: str) -> bool:
        steps = STEPS_OF[self.staging]
        return steps.index(self.step) >= steps.index(step)


def outcome(step: str, fault: str, *, engines: int = 1, staging: str = "direct") -> Outcome | None:
    """What `fault` at `step` leads to in a fleet of so many engines; None where the two can't meet.

    Raises:
        ValueError: an unknown staging, step or fault.
    """
    if staging not in STEPS_OF or step not in STEPS_OF[staging] or fault not in FAULTS:
        raise ValueError(f"unknown staging {staging!r}, step {step!r} or fault {fault!r}")
    if fault == "rank killed":
        return Outcome(state="gone", version="old", raises=True, after="at once")
    machine = WeightStateMachine("old")
    transaction = Transaction(id="t", sequence=1, owner="trainer", version="new")
    course = _Course(
        machine=machine, transaction=transaction, staging=staging, step=step, engines=engines
    )
    if course.reached("begin"):
        machine.open(transaction)
    return _MEETINGS[fault](course)


def _fail(course: _Course, after: str) -> Outcome:
    if course.machine.open_transaction is not None:
        written = course.reached(_FIRST_WRITE[course.staging])
        course.machine.fail("t", reason=course.step, written=written)
    return _seen(course.machine, raises=True, after=after)


def _finish(machine: WeightStateMachine) -> Outcome:
    machine.seal("t")
    machine.resume("t", verified=True)
    return _seen(machine, raises=False, after="at once")


def _seen(machine: WeightStateMachine, *, raises: bool, after: str) -> Outcome:
    return Outcome(state=machine.state.value, version=machine.version, raises=raises, after=after)


def _exception(course: _Course) -> Outcome | None:
    return None if course.step == "resume" else _fail(course, "at once")


def _owner_gone(course: _Course) -> Outcome | None:
    if course.step == "resume":
        return None
    if course.step in _BY_ITSELF and course.engines == 1:
        return _finish(course.machine)
    opened = course.machine.open_transaction is not None
    return _fail(course, "time limit" if opened else "at once")


def _repeated(course: _Course) -> Outcome | None:
    if course.step not in _CALLS:
        return None
    machine = course.machine
    machine.open(course.transaction)
    assert not machine.open(course.transaction)
    ended = _finish(machine)
    assert not machine.seal("t")
    assert not machine.resume("t", verified=True)
    return ended


def _corrupted(course: _Course) -> Outcome | None:
    return _fail(course, "at once") if course.step in ("wire", "prefetch") else None


_MEETINGS: dict[str, Callable[[_Course], Outcome | None]] = {
    "exception": _exception,
    "trainer killed": _owner_gone,
    "trainer frozen": _owner_gone,
    "reply lost": _repeated,
    "call repeated": _repeated,
    "byte corrupted": _corrupted,
}


def cells(*, engines: int = 1, staging: str = "direct") -> Iterator[tuple[str, str, Outcome]]:
    """Every step and fault that can meet, with what it leads to."""
    for step in STEPS_OF[staging]:
        for fault in FAULTS:
            found = outcome(step, fault, engines=engines, staging=staging)
            if found is not None:
                yield step, fault, found


def markdown() -> str:
    """The table of the documentation: one line for each distinct outcome of a fault."""
    lines = [
        "| staging | fault | at | state afterwards | serves | when | cure |",
        "|---|---|---|---|---|---|---|",
    ]
    for staging in STEPS_OF:
        lines += _rows_of(staging)
    return "\n".join(lines)


def _rows_of(staging: str) -> Iterator[str]:
    for engines, fleet in ((1, ""), (2, " (several engines)")):
        groups: dict[tuple[str, Outcome], list[str]] = {}
        for step, fault, found in cells(engines=engines, staging=staging):
            if engines == 1 or found != outcome(step, fault, staging=staging):
                groups.setdefault((fault, found), []).append(step)
        for (fault, found), steps in groups.items():
            serves = {"SERVING": f"the {found.version} version"}.get(found.state, "nothing")
            yield (
                f"| `{staging}` | {fault}{fleet} | {', '.join(steps)} | `{found.state}` | {serves} | {found.after} | "
                f"{found.cure} |"
            )


if __name__ == "__main__":
    print(markdown())
