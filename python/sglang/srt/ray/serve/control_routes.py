"""Control endpoints: each goes to every replica, and the answer has one result for each of them.

200 when all replicas did it, 207 when some did, else the worst status. Bodies are JSON; `deadline_s` bounds each
replica's work and `model` names the model where several are served. They ask for the same keys as upstream's own
control endpoints.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from sglang.srt.ray.serve.ingress import this_ingress
from sglang.srt.ray.serve.results import ReplicaResult, status_of, summary

DEADLINE_S = 60.0


class ControlBody(BaseModel):
    """What every control call takes."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    deadline_s: Annotated[float, Field(gt=0, le=3600)] = DEADLINE_S


class PauseBody(ControlBody):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class MemoryBody(ControlBody):
    tags: list[str] | None = None


class RpcBody(ControlBody):
    method: str
    args: list[Any] = []


class AbortBody(ControlBody):
    rid: str | list[str] | None = None
    abort_all: bool = False


class ProfileBody(ControlBody):
    output_dir: str | None = None
    start_step: int | None = None
    num_steps: int | None = None
    activities: list[str] | None = None
    profile_by_stage: bool = False
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_prefix: str | None = None


_POSTED: dict[str, type[ControlBody]] = {
    "pause": PauseBody,
    "resume": ControlBody,
    "sleep": MemoryBody,
    "wakeup": MemoryBody,
    "reset_prefix_cache": ControlBody,
    "collective_rpc": RpcBody,
    "start_profile": ProfileBody,
    "stop_profile": ControlBody,
}
_ASKED = {
    "is_paused": "is_paused",
    "is_sleeping": "is_sleeping",
    "weight_sync": "weight_status",
}
"""Path -> verb of the questions."""


def add_routes(app: FastAPI) -> None:
    for verb, body in _POSTED.items():
        app.add_api_route(f"/{verb}", _poster(verb, body), methods=["POST"], name=verb)
    for path, verb in _ASKED.items():
        app.add_api_route(f"/{path}", _asker(verb), methods=["GET"], name=path)
    app.add_api_route("/abort_request", _abort_request, methods=["POST"])
    app.add_api_route("/replicas", _replicas, methods=["GET"])
    app.add_api_route("/health", _health, methods=["GET"])


def _poster(verb: str, body_class: type[ControlBody]) -> Callable[..., Awaitable[JSONResponse]]:
    async def post(request: Request, body: Any = None) -> JSONResponse:
        told = body_class() if body is None else body
        arguments = told.model_dump(exclude={"model", "deadline_s"}, exclude_unset=True)
        return await control(request, verb, arguments, told.model, told.deadline_s)

    post.__annotations__["body"] = Annotated[body_class | None, Body()]
    return post


def _asker(verb: str) -> Callable[..., Awaitable[JSONResponse]]:
    async def ask(
        request: Request, model: str | None = None, deadline_s: float = DEADLINE_S
    ) -> JSONResponse:
        return await control(request, verb, {}, model, deadline_s)

    return ask


async def control(
    request: Request,
    verb: str,
    arguments: dict[str, Any],
    model: str | None,
    deadline_s: float,
    only: Sequence[str] | None = None,
) -> JSONResponse:
    """Have every replica perform the verb, and answer for all of them."""
    handles = this_ingress().handles(model)
    if not handles.keys.allow(request):
        return unauthorized()
    results = await handles.fleet.call.remote(verb, arguments, deadline_s=deadline_s, only=only)
    return JSONResponse(summary(verb, results), status_code=status_of(results))


def unauthorized() -> JSONResponse:
    return JSONResponse({"error": "Unauthorized"}, status_code=HTTPStatus.UNAUTHORIZED)


async def _abort_request(request: Request, body: AbortBody) -> JSONResponse:
    """Every replica is asked, and the one that holds a request ends it; `requests` says what became of each id."""
    rids = [body.rid] if isinstance(body.rid, str) else body.rid
    if body.abort_all == bool(rids):
        message = "give either rid (an id, or a list of them) or abort_all=true"
        return JSONResponse({"error": {"message": message}}, HTTPStatus.BAD_REQUEST)
    handles = this_ingress().handles(body.model)
    if not handles.keys.allow(request):
        return unauthorized()
    arguments = {"rids": rids, "abort_all": body.abort_all}
    results = await handles.fleet.call.remote(
        "abort_request", arguments, deadline_s=body.deadline_s
    )
    content = summary("abort_request", results) | {"requests": _by_id(results)}
    return JSONResponse(content, status_code=status_of(results))


def _by_id(results: Sequence[ReplicaResult]) -> dict[str, Any]:
    """What became of each request, from the replica that held it."""
    found: dict[str, Any] = {}
    for result in results:
        for rid, each in ((result.state or {}).get("requests") or {}).items():
            if each["found"] or rid not in found:
                found[rid] = each | {"replica": result.replica if each["found"] else None}
    return found


async def _replicas(request: Request, model: str | None = None) -> JSONResponse:
    handles = this_ingress().handles(model)
    if not handles.keys.allow(request):
        return unauthorized()
    return JSONResponse({"replicas": await handles.fleet.replicas.remote()})


async def _health() -> JSONResponse:
    """200 while every model has a replica that serves."""
    counts: dict[str, int] = {}
    for model in this_ingress().model_ids:
        replicas = await this_ingress().handles(model).fleet.replicas.remote()
        counts[model] = sum(1 for replica in replicas if replica["serving"])
    well = all(counts.values())
    status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
    return JSONResponse({"serving_replicas": counts}, status_code=status)
