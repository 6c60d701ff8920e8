"""What each replica made of a control call, and what all of it together is worth as an HTTP status.

A control call has one result for every replica that is known, the dead and the late included, so that none of them is
left out in silence (Serve's own broadcast skips dead replicas and doesn't say who answered).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal

Outcome = Literal["ok", "refused", "failed", "late", "dead"]


class ControlError(RuntimeError):
    """A control call that a replica can't carry out; `status` is its HTTP status."""

    def __init__(self, message: str, *, status: int = HTTPStatus.CONFLICT) -> None:
        super().__init__(message)
        self.status = int(status)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaResult:
    """One replica's answer to one control call."""

    replica: str
    """Serve's id of the replica."""
    outcome: Outcome
    """`refused`: the engine said no; `failed`: it broke; `late`: no answer by the deadline; `dead`: no process."""
    state: Mapping[str, Any] | None = None
    """What the engine says of itself, or answers to the question; JSON values."""
    error: Mapping[str, Any] | None = None
    """`type`, `message` and `status` of what went wrong, with `rank`, `tensor`, `phase` where they apply."""
    seconds: float = 0.0

    @property
    def status(self) -> int:
        if self.outcome == "ok":
            return HTTPStatus.OK
        if self.outcome == "late":
            return HTTPStatus.GATEWAY_TIMEOUT
        if self.outcome == "dead" or self.error is None:
            return HTTPStatus.SERVICE_UNAVAILABLE
        return int(self.error.get("status", HTTPStatus.INTERNAL_SERVER_ERROR))


def status_of(results: Sequence[ReplicaResult]) -> int:
    """200 when all did it, 207 when some did, else the worst of their statuses (503 when there is no replica)."""
    if not results:
        return HTTPStatus.SERVICE_UNAVAILABLE
    done = [result.outcome == "ok" for result in results]
    if all(done):
        return HTTPStatus.OK
    if any(done):
        return HTTPStatus.MULTI_STATUS
    return max(result.status for result in results)


def summary(verb: str, results: Sequence[ReplicaResult]) -> dict[str, Any]:
    """The body of a control answer."""
    words = {HTTPStatus.OK: "ok", HTTPStatus.MULTI_STATUS: "partial"}
    return {
        "verb": verb,
        "status": words.get(HTTPStatus(status_of(results)), "failed"),
        "replicas": [dataclasses.asdict(result) for result in results],
    }


def described(error: BaseException) -> tuple[Outcome, dict[str, Any]]:
    """Outcome and description of an exception that a control call ended with."""
    from sglang.srt.ray.weight_routes import status_of_weight_error
    from sglang.srt.ray.weight_sync.errors import WeightSyncError, places_of

    where: dict[str, Any] = {}
    if isinstance(error, WeightSyncError):
        status = int(status_of_weight_error(error))
        where = places_of(error)
    elif isinstance(error, ControlError):
        status = error.status
    elif isinstance(error, ValueError):
        status = HTTPStatus.BAD_REQUEST
    else:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
    message = getattr(error, "message", None) or str(error) or repr(error)
    outcome: Outcome = "failed" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "refused"
    described = {"type": type(error).__name__, "message": message, "status": int(status)}
    return outcome, described | {name: value for name, value in where.items() if value is not None}
