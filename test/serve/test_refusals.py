"""A replica's refusal, from the exception on its side to the one that the trainer gets; the fleet between is a fake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.ray.serve.results import ReplicaResult, described
from sglang.srt.ray.serve.weights import ServeEngineControl
from sglang.srt.ray.weight_sync.errors import EngineRequestError, TransferError, WeightSyncError


def refused(result: ReplicaResult) -> WeightSyncError:
    answer = SimpleNamespace(result=lambda timeout_s: result)
    fleet: Any = SimpleNamespace(steer_weights=SimpleNamespace(remote=lambda *_: answer))
    with pytest.raises(WeightSyncError) as caught:
        ServeEngineControl(fleet, "r1", []).status(timeout_s=1)
    return caught.value


def test_a_typed_error_arrives_as_its_class_with_its_places_and_the_replica() -> None:
    outcome, told = described(TransferError("it broke", rank=3, phase="wire"))
    assert told == {
        "type": "TransferError",
        "message": "it broke",
        "status": 400,
        "rank": 3,
        "phase": "wire",
    }
    error = refused(ReplicaResult(replica="r1", outcome=outcome, error=told))
    assert type(error) is TransferError
    assert str(error) == "it broke [engine='replica r1', rank=3, phase='wire']"


def test_any_other_error_and_a_dead_replica_are_requests_that_failed() -> None:
    outcome, told = described(OSError("no disk"))
    error = refused(ReplicaResult(replica="r1", outcome=outcome, error=told))
    assert type(error) is EngineRequestError
    assert "no disk" in str(error)
    error = refused(ReplicaResult(replica="r1", outcome="dead"))
    assert type(error) is EngineRequestError
    assert "'weight_status': dead" in str(error)
