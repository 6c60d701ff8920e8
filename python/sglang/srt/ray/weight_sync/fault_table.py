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
FAULTS = (
    "exception",
    "trainer killed",
    "trainer frozen",
    "rank killed",
    "reply lost",
    "call repeated",
    "byte corrupted",
)
_CALLS = ("begin", "wire", "resume")
"""Steps that are (the end of) a call of the publisher, so that its reply can be lost: open, commit, seal."""
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


def outcome(step: str, fault: str, *, engines: int = 1) -> Outcome | None:
    """What `fault` at `step` leads to in a fleet of so many engines; None where the two can't meet.

    Raises:
        ValueError: an unknown step or fault.
    """
    if step not in STEPS or fault not in FAULTS:
        raise ValueError(f"unknown step {step!r} or fault {fault!r}")
    if fault == "rank killed":
        return Outcome(state="gone", version="old", raises=True, after="at once")
    machine = WeightStateMachine("old")
    transaction = Transaction(id="t", sequence=1, owner="trainer", version="new")
    if STEPS.index(step) >= STEPS.index("begin"):
        machine.open(transaction)
    meeting = _MEETINGS[fault]
    return meeting(machine, transaction, step, engines)


def _fail(machine: WeightStateMachine, step: str, after: str) -> Outcome:
    if machine.open_transaction is not None:
        written = STEPS.index(step) >= STEPS.index("wire")
        machine.fail("t", reason=step, written=written)
    return _seen(machine, raises=True, after=after)


def _finish(machine: WeightStateMachine) -> Outcome:
    machine.seal("t")
    machine.resume("t", verified=True)
    return _seen(machine, raises=False, after="at once")


def _seen(machine: WeightStateMachine, *, raises: bool, after: str) -> Outcome:
    return Outcome(state=machine.state.value, version=machine.version, raises=raises, after=after)


def _exception(
    machine: WeightStateMachine, transaction: Transaction, step: str, engines: int
) -> Outcome | None:
    return None if step == "resume" else _fail(machine, step, "at once")


def _owner_gone(
    machine: WeightStateMachine, transaction: Transaction, step: str, engines: int
) -> Outcome | None:
    if step == "resume":
        return None
    if step in _BY_ITSELF and engines == 1:
        return _finish(machine)
    return _fail(machine, step, "at once" if machine.open_transaction is None else "time limit")


def _repeated(
    machine: WeightStateMachine, transaction: Transaction, step: str, engines: int
) -> Outcome | None:
    if step not in _CALLS:
        return None
    assert not machine.open(transaction)
    ended = _finish(machine)
    assert not machine.seal("t")
    assert not machine.resume("t", verified=True)
    return ended


def _corrupted(
    machine: WeightStateMachine, transaction: Transaction, step: str, engines: int
) -> Outcome | None:
    return _fail(machine, step, "at once") if step == "wire" else None


_MEETINGS: dict[str, Callable[[WeightStateMachine, Transaction, str, int], Outcome | None]] = {
    "exception": _exception,
    "trainer killed": _owner_gone,
    "trainer frozen": _owner_gone,
    "reply lost": _repeated,
    "call repeated": _repeated,
    "byte corrupted": _corrupted,
}


def cells(*, engines: int = 1) -> Iterator[tuple[str, str, Outcome]]:
    """Every step and fault that can meet, with what it leads to."""
    for step in STEPS:
        for fault in FAULTS:
            found = outcome(step, fault, engines=engines)
            if found is not None:
                yield step, fault, found


def markdown() -> str:
    """The table of the documentation: one line for each distinct outcome of a fault."""
    lines = [
        "| staging | fault | at | state afterwards | serves | when | cure |",
        "|---|---|---|---|---|---|---|",
    ]
    for engines, fleet in ((1, ""), (2, " (several engines)")):
        groups: dict[tuple[str, Outcome], list[str]] = {}
        for step, fault, found in cells(engines=engines):
            if engines == 1 or found != outcome(step, fault, engines=1):
                groups.setdefault((fault, found), []).append(step)
        for (fault, found), steps in groups.items():
            serves = {"SERVING": f"the {found.version} version"}.get(found.state, "nothing")
            lines.append(
                f"| `direct` | {fault}{fleet} | {', '.join(steps)} | `{found.state}` | {serves} | {found.after} | "
                f"{found.cure} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
