"""The state machine against a model of what must hold, whatever the order of calls."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang.srt.ray.weight_sync.errors import (
    EngineTornError,
    StaleTransactionError,
    TransactionBusyError,
    TransactionError,
    UnknownTransactionError,
)
from sglang.srt.ray.weight_sync.states import Transaction, WeightState, WeightStateMachine


def transaction(number: int, version: str | None = None, owner: str = "trainer") -> Transaction:
    return Transaction(
        id=f"t{number}",
        sequence=number,
        owner=owner,
        version=str(number) if version is None else version,
    )


def opened(number: int = 1) -> tuple[WeightStateMachine, Transaction]:
    machine = WeightStateMachine("0")
    first = transaction(number)
    machine.open(first)
    return machine, first


def test_a_whole_sync_moves_the_version_only_at_the_end():
    machine, first = opened()
    machine.seal(first.id)
    assert (machine.state, machine.version) == (WeightState.SYNCING, "0")
    machine.resume(first.id, verified=True)
    assert (machine.state, machine.version) == (WeightState.SERVING, "1")


def test_repeating_any_step_changes_nothing():
    machine, first = opened()
    assert machine.open(first) is False
    assert machine.seal(first.id) is True
    assert machine.seal(first.id) is False
    assert machine.resume(first.id, verified=True) is True
    assert machine.resume(first.id, verified=True) is False
    assert machine.seal(first.id) is False
    assert (machine.state, machine.version) == (WeightState.SERVING, "1")


def test_a_failure_before_the_first_byte_goes_back_to_the_old_version():
    machine, first = opened()
    assert machine.fail(first.id, reason="x", written=False) is WeightState.SERVING
    assert (machine.version, machine.torn_reason) == ("0", None)


def test_a_failure_after_the_first_byte_tears_the_engine_and_says_why():
    machine, first = opened()
    assert machine.fail(first.id, reason="the wire broke", written=True) is WeightState.TORN
    assert "the wire broke" in str(machine.torn_reason)
    assert machine.version == "0"


def test_a_torn_engine_stays_torn_when_the_next_sync_fails_before_its_first_byte():
    machine, first = opened()
    machine.fail(first.id, reason="x", written=True)
    second = transaction(2)
    machine.open(second)
    assert machine.fail(second.id, reason="y", written=False) is WeightState.TORN


def test_a_complete_sync_or_a_reload_lifts_torn():
    machine, first = opened()
    machine.fail(first.id, reason="x", written=True)
    second = transaction(2)
    machine.open(second)
    machine.seal(second.id)
    machine.resume(second.id, verified=True)
    assert (machine.state, machine.version, machine.torn_reason) == (WeightState.SERVING, "2", None)
    third = transaction(3)
    machine.open(third)
    machine.fail(third.id, reason="x", written=True)
    machine.reload("disk")
    assert (machine.state, machine.version) == (WeightState.SERVING, "disk")


def test_an_unsealed_transaction_cannot_resume():
    machine, first = opened()
    with pytest.raises(EngineTornError, match="not sealed"):
        machine.resume(first.id, verified=True)


def test_another_owner_is_told_who_holds_the_engine():
    machine, _ = opened()
    with pytest.raises(TransactionBusyError, match=r"'trainer'.*'1'"):
        machine.open(transaction(2, owner="other"))


def test_a_late_or_repeated_transaction_is_stale():
    machine, first = opened(5)
    machine.seal(first.id)
    machine.resume(first.id, verified=True)
    with pytest.raises(StaleTransactionError, match="sequence 4"):
        machine.open(transaction(4, version="9"))
    with pytest.raises(StaleTransactionError, match="sequence 5"):
        machine.open(first)


def test_the_engines_own_transaction_may_try_its_sequence_again_but_none_that_is_older():
    machine, first = opened(5)
    machine.fail(first.id, reason="the peer died", written=True)
    again = dataclasses.replace(first, id="again")
    with pytest.raises(StaleTransactionError, match="sequence 5"):
        machine.open(again)
    assert machine.open(dataclasses.replace(again, own=True))
    with pytest.raises(StaleTransactionError, match="sequence 4"):
        machine.open(dataclasses.replace(again, id="older", sequence=4, own=True))


def test_an_older_number_never_replaces_a_newer_one_but_labels_have_no_order():
    machine = WeightStateMachine("10")
    with pytest.raises(StaleTransactionError, match="'9' is older than the served '10'"):
        machine.open(transaction(1, version="9"))
    assert machine.open(transaction(1, version="nine"))


def test_steps_of_an_unknown_transaction_are_refused_with_what_is_open():
    machine, _ = opened()
    for step in (
        lambda: machine.seal("t9"),
        lambda: machine.resume("t9", verified=True),
        lambda: machine.fail("t9", reason="x", written=False),
    ):
        with pytest.raises(UnknownTransactionError, match=r"'t9' is not open here.*'t1'"):
            step()


class RandomWalk(RuleBasedStateMachine):
    """Random calls; the model remembers what bytes stand in the engine and what may be served."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = WeightStateMachine("0")
        self.bytes_of: str | None = (
            "0"  # the version that all bytes belong to, None when they are mixed
        )
        self.opened: list[Transaction] = []
        self.highest = 0

    @rule(step=st.integers(-2, 3), version=st.integers(0, 30))
    def open(self, step: int, version: int) -> None:
        candidate = transaction(self.highest + step, version=str(version), owner=f"o{step}")
        busy = self.machine.open_transaction
        try:
            fresh = self.machine.open(candidate)
        except TransactionError:
            assert busy is not None or step <= 0 or self.bytes_of is not None
            return
        assert fresh
        assert candidate.sequence > self.highest
        self.highest = candidate.sequence
        self.opened.append(candidate)

    @rule(data=st.data(), everything=st.booleans())
    def write_then_seal_or_fail(self, data: st.DataObject, everything: bool) -> None:
        held = self.machine.open_transaction
        if held is None or self.machine.sealed:
            return
        self.bytes_of = held.version if everything else None
        if everything:
            self.machine.seal(held.id)
        else:
            assert self.machine.fail(held.id, reason="half", written=True) is WeightState.TORN

    @rule()
    def give_up_before_writing(self) -> None:
        held = self.machine.open_transaction
        if held is None or self.machine.sealed:
            return
        before = self.bytes_of
        state = self.machine.fail(held.id, reason="early", written=False)
        assert (state is WeightState.SERVING) == (before is not None)

    @rule()
    def time_out_after_sealing(self) -> None:
        held = self.machine.open_transaction
        if held is None or not self.machine.sealed:
            return
        self.bytes_of = None  # whole, but not everywhere: it may not be served
        assert self.machine.fail(held.id, reason="late", written=True) is WeightState.TORN

    @rule(data=st.data())
    def resume_any_transaction_ever_opened(self, data: st.DataObject) -> None:
        if not self.opened:
            return
        chosen = data.draw(st.sampled_from(self.opened))
        try:
            self.machine.resume(chosen.id, verified=True)
        except (TransactionError, EngineTornError):
            return
        assert self.machine.last_commitment is not None
        assert self.machine.last_commitment.id == chosen.id

    @rule(version=st.one_of(st.none(), st.just("disk")))
    def reload(self, version: str | None) -> None:
        self.machine.reload(version)
        self.bytes_of = self.machine.version

    @invariant()
    def what_is_served_is_whole_and_labelled_right(self) -> None:
        if self.machine.state is WeightState.SERVING:
            assert self.bytes_of == self.machine.version
            assert self.machine.open_transaction is None

    @invariant()
    def mixed_bytes_are_never_served(self) -> None:
        if self.bytes_of is None:
            assert self.machine.state is not WeightState.SERVING

    @invariant()
    def torn_always_says_why(self) -> None:
        if self.machine.state is WeightState.TORN:
            assert self.machine.torn_reason


RandomWalk.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestRandomWalk = RandomWalk.TestCase
