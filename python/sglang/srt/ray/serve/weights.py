"""A publisher's control over the replicas of a Serve deployment: `EngineControl`, one for each replica.

`WeightPublisher.connect(connect_replicas("app", "model"))` brings all of them to a version together. Each step goes
through the model's `FleetControl`, which sees every transaction: so replicas that start later, or that this publisher
doesn't know of, never serve older weights than the others (`publication.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.ray.serve.fleet import deployment_name
from sglang.srt.ray.serve.results import ReplicaResult
from sglang.srt.ray.weight_sync.control import OpenRequest
from sglang.srt.ray.weight_sync.errors import (
    DeadlineExceededError,
    EngineRequestError,
    WeightSyncError,
    retold,
)

_ANSWER_MARGIN_S = 5.0
"""How much longer we wait than the fleet was told to: its own answer names who is late or dead."""
FLEET_TIMEOUT_S = 30.0


def connect_replicas(app_name: str, model_id: str) -> list[ServeEngineControl]:
    """The replicas that serve a model now, for `WeightPublisher.connect`. From any process of the Ray cluster.

    Raises:
        EngineRequestError: there is no replica.
    """
    from ray import serve

    fleet = serve.get_deployment_handle(deployment_name(model_id), app_name)
    if not (controls := controls_of(fleet)):
        raise EngineRequestError(
            f"model {model_id!r} of application {app_name!r} has no replica yet"
        )
    return controls


def controls_of(fleet: Any) -> list[ServeEngineControl]:
    """One for each replica that a publisher has to bring to a version, by the fleet's handle."""
    receivers = fleet.receivers.remote().result(timeout_s=FLEET_TIMEOUT_S)
    return [ServeEngineControl(fleet, replica, ranks) for replica, ranks in receivers.items()]


class ServeEngineControl:
    """Steers one replica. Called by a `WeightPublisher`, on a thread without a running event loop."""

    def __init__(self, fleet: Any, replica: str, actors: Sequence[Any]) -> None:
        """Args:
        fleet: handle of the model's FleetControl deployment.
        replica: Serve's id of the replica.
        actors: its SchedulerActor handles, in rank order.
        """
        self._fleet = fleet
        self._replica = replica
        self._actors = list(actors)

    @property
    def name(self) -> str:
        return f"replica {self._replica}"

    @property
    def actors(self) -> Sequence[Any]:
        return self._actors

    def open(self, request: OpenRequest, *, timeout_s: float) -> Mapping[str, Any]:
        return self._call("weight_open", {"request": dataclasses.asdict(request)}, timeout_s)

    def seal(self, transaction: str, *, resume: bool, timeout_s: float) -> Mapping[str, Any]:
        arguments = {"transaction": transaction, "resume": resume}
        return self._call("weight_seal", arguments, timeout_s)

    def resume(self, transaction: str, *, timeout_s: float) -> Mapping[str, Any]:
        return self._call("weight_resume", {"transaction": transaction}, timeout_s)

    def abort(self, transaction: str, reason: str, *, timeout_s: float) -> Mapping[str, Any]:
        arguments = {"transaction": transaction, "reason": reason}
        return self._call("weight_abort", arguments, timeout_s)

    def status(self, *, timeout_s: float) -> Mapping[str, Any]:
        return self._call("weight_status", {}, timeout_s)

    def _call(self, verb: str, arguments: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        call = self._fleet.steer_weights.remote(self._replica, verb, arguments, timeout_s)
        try:
            result: ReplicaResult = call.result(timeout_s=timeout_s + _ANSWER_MARGIN_S)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the fleet did not answer {verb!r} within {timeout_s:g} s", engine=self.name
            ) from error
        if result.outcome == "ok":
            assert result.state is not None
            return result.state
        raise self._refusal(verb, result)

    def _refusal(self, verb: str, result: ReplicaResult) -> WeightSyncError:
        """The replica's own error again, by its class name."""
        unsaid = {"type": "EngineRequestError", "message": f"{verb!r}: {result.outcome}"}
        told = unsaid | dict(result.error or {})
        return retold(told, engine=self.name)
