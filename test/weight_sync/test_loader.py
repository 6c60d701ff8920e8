"""One rank's load of refs: what is refused before the loader runs, what the ledger says afterwards. No Ray."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.receiving_rank import FakeScheduler, plain_model

from sglang.srt.ray.weight_sync import transports
from sglang.srt.ray.weight_sync.errors import (
    DeadlineExceededError,
    DigestMismatchError,
    EngineRequestError,
    GenerationNotPausedError,
    StaleTransactionError,
    TransferError,
    WeightMismatchError,
    WeightNameError,
)
from sglang.srt.ray.weight_sync.manifest import WeightManifest
from sglang.srt.ray.weight_sync.receiver import WeightReceiver

VALUES = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}


class Rank:
    """A receiver over a small model, whose loader can be told to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = plain_model({"a": (2, 3), "b": (4,)})
        self.scheduler = FakeScheduler(self.model)
        self.receiver = WeightReceiver(self.scheduler, rank=3)
        self.receiver.admit("t")
        self.answer: tuple[bool, str] = (True, "")
        self.arrives: Any = dict(VALUES)
        monkeypatch.setattr(transports, "fetch", self._fetch)

    def _fetch(self, ref: Any, *, timeout_s: float) -> Any:
        if isinstance(self.arrives, Exception):
            raise self.arrives
        return self.arrives

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> tuple[bool, str]:
        for name, tensor in pairs:
            self.model.get_parameter(name).data.copy_(tensor)
        return self.answer

    def load(self, index: int = 0, expected: Any = None, transaction: str | None = "t") -> Any:
        return self.receiver.load(
            ["ref"],
            load=self.load_weights,
            transaction=transaction,
            index=index,
            expected=expected,
            deadline_s=5.0,
        )


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_what_arrived_stands_in_the_model_and_is_reported(rank: Rank) -> None:
    rank.load(expected=WeightManifest.of(VALUES))
    assert torch.equal(rank.model.get_parameter("a"), VALUES["a"])
    report = rank.receiver.finish_load("t", verified=True)
    assert (report.rank, report.total_bytes, report.verified) == (3, 40, True)
    status = rank.receiver.status()
    assert (status.transaction, status.written, status.failure) == ("t", True, None)
    assert status.report == report


def test_a_repeated_call_loads_nothing_again(rank: Rank) -> None:
    first = rank.load()
    rank.arrives = TimeoutError("asked twice")
    assert rank.load() == first


@pytest.mark.parametrize(
    ("arrives", "error"),
    [
        ({"a": VALUES["a"] + 1, "b": VALUES["b"]}, DigestMismatchError),
        ({"a": VALUES["a"].view(3, 2)}, WeightMismatchError),
        ({"a": VALUES["a"].double()}, WeightMismatchError),
        ({"c": VALUES["a"]}, WeightNameError),
        ([("a", VALUES["a"]), ("a", VALUES["a"])], WeightNameError),
        ({}, WeightNameError),
        ([1, 2], WeightNameError),
        ("text", WeightNameError),
        (TimeoutError("late"), DeadlineExceededError),
        (RuntimeError("died"), TransferError),
    ],
)
def test_what_is_not_as_announced_touches_nothing(rank: Rank, arrives: Any, error: Any) -> None:
    rank.arrives = arrives
    with pytest.raises(error) as refused:
        rank.load(expected=WeightManifest.of(VALUES))
    assert refused.value.rank == 3
    assert torch.equal(rank.model.get_parameter("b"), torch.full((4,), -1.0))
    assert not rank.receiver.status().written


def test_a_loader_that_fails_leaves_the_rank_written_and_every_later_step_refused(
    rank: Rank,
) -> None:
    rank.load()
    rank.answer = (False, "partially updated")
    with pytest.raises(EngineRequestError, match="partially updated") as failed:
        rank.load(index=1)
    assert (failed.value.rank, failed.value.phase) == (3, "load")
    status = rank.receiver.status()
    assert status.written
    assert "partially updated" in str(status.failure)
    rank.answer = (True, "")
    with pytest.raises(EngineRequestError):
        rank.load(index=1)
    with pytest.raises(EngineRequestError):
        rank.receiver.finish_load("t", verified=True)


def test_nothing_lands_while_generation_runs_or_in_anothers_transaction(rank: Rank) -> None:
    rank.scheduler._engine_paused = False
    with pytest.raises(GenerationNotPausedError):
        rank.load()
    rank.scheduler._engine_paused = True
    with pytest.raises(StaleTransactionError):
        rank.load(transaction="late")
    with pytest.raises(WeightNameError, match="nothing was loaded"):
        rank.receiver.finish_load("t", verified=True)


def test_a_clients_own_load_never_counts_as_complete(rank: Rank) -> None:
    """Which parameters a loader wrote is not known, so it can't mend a torn engine."""
    rank.receiver.admit(None)
    rank.load(transaction=None)
    status = rank.receiver.status()
    assert (status.session_open, status.written, status.tensors_written) == (True, True, 0)


def test_a_manifest_names_each_tensor_once() -> None:
    one = WeightManifest.of(VALUES)
    with pytest.raises(WeightNameError, match="'a'"):
        WeightManifest.joined([one, one])
    with pytest.raises(WeightNameError, match="'b'"):
        WeightManifest(tensors=one.tensors, digests={"a": one.digests["a"]})
