"""The HTTP face of a fleet: serving paths go to one replica as they came, control paths to all of them.

Which replica serves is Serve's choice (a consistent hash of the session, `options.py`). Paths that steer an engine are
never passed to whichever replica happens to be chosen: either every replica gets them, or they don't exist here. Routes
are plain functions, so they work with any FastAPI (Ray's class-based ones break with 0.137).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

import ray
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve

from sglang.srt.ray.serve.exchange import Head, HttpCall, forwarded, refusal
from sglang.srt.ray.serve.sessions import SESSION_ID, key_of
from sglang.srt.utils.auth import AuthLevel, decide_request_auth

SERVING_PATHS = (
    "/generate",
    "/encode",
    "/classify",
    "/tokenize",
    "/detokenize",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/score",
    "/v1/rerank",
    "/v1/messages",
    "/v1/messages/count_tokens",
)
"""Endpoints of SGLang's that any replica can answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys:
    """SGLang's two API keys: the ingress asks for them where it answers itself."""

    api_key: str | None
    admin_api_key: str | None

    @classmethod
    def of(cls, engine_kwargs: Mapping[str, Any]) -> Keys:
        return cls(
            api_key=engine_kwargs.get("api_key"), admin_api_key=engine_kwargs.get("admin_api_key")
        )

    def allow(self, request: Request) -> bool:
        """Whether the request may steer the engine: the same rule as for upstream's weight endpoints."""
        return self._decide(request, AuthLevel.ADMIN_OPTIONAL)

    def serve(self, request: Request) -> bool:
        """Whether the request may generate."""
        return self._decide(request, AuthLevel.NORMAL)

    def _decide(self, request: Request, level: AuthLevel) -> bool:
        decision = decide_request_auth(
            method=request.method,
            path=request.url.path,
            authorization_header=request.headers.get("authorization"),
            api_key=self.api_key,
            admin_api_key=self.admin_api_key,
            auth_level=level,
        )
        return decision.allowed


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelHandles:
    """One model of the application."""

    replicas: Any
    """Handle of the `SGLangServer` deployment."""
    fleet: Any
    """Handle of its `FleetControl`."""
    keys: Keys


class UnknownModelError(Exception):
    """The request names no model of this application."""


def make_http_app() -> FastAPI:
    """Called in the ingress replica."""
    from sglang.srt.ray.serve import control_routes, session_routes

    app = FastAPI(title="SGLang on Ray Serve", docs_url=None, redoc_url=None)
    for path in SERVING_PATHS:
        app.add_api_route(path, _serve, methods=["POST"], include_in_schema=False)
    app.add_api_route("/v1/models", _models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", _model, methods=["GET"])
    control_routes.add_routes(app)
    session_routes.add_routes(app)
    app.add_exception_handler(UnknownModelError, _answer_unknown_model)
    return app


@serve.ingress(make_http_app)
class SGLangIngress:
    """Finds the model that a request means, and its handles."""

    def __init__(self, models: Mapping[str, ModelHandles]) -> None:
        self._models = dict(models)

    @property
    def model_ids(self) -> list[str]:
        return list(self._models)

    def handles(self, model: str | None) -> ModelHandles:
        """By model id; adapters are `id:adapter`. The only model when None.

        Raises:
            UnknownModelError: there is no such model, or several and none is named.
        """
        if model is None:
            if len(self._models) == 1:
                return next(iter(self._models.values()))
            raise UnknownModelError(
                f"several models are served, name one as 'model': {self.model_ids!r}"
            )
        found = self._models.get(model) or self._models.get(model.partition(":")[0])
        if found is None and len(self._models) > 1:
            raise UnknownModelError(f"model {model!r} is not served; there are {self.model_ids!r}")
        # One model: SGLang itself decides what to make of another name, as its own server does.
        return found or next(iter(self._models.values()))


def this_ingress() -> SGLangIngress:
    """The replica that a route runs in."""
    ingress: SGLangIngress = serve.get_replica_context().servable_object
    return ingress


def json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; empty for one that is none (SGLang's own handler then says what is wrong)."""
    try:
        content = json.loads(body)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


async def call_of(request: Request) -> HttpCall:
    return HttpCall(
        method=request.method,
        path=request.url.path,
        query=request.url.query,
        headers=forwarded(list(request.headers.items())),
        body=await request.body(),
    )


async def _serve(request: Request) -> Response:
    from sglang.srt.ray.serve.session_routes import session_of

    call = await call_of(request)
    model = json_object(call.body).get("model")
    handles = this_ingress().handles(model if isinstance(model, str) else None)
    session = session_of(request.headers)
    if session is None:
        return await passed_on(handles.replicas.options(stream=True), call)
    handle = handles.replicas.options(stream=True, session_id=key_of(session))
    return await passed_on(handle, call.with_headers([(SESSION_ID, session)]), session=session)


async def passed_on(handle: Any, call: HttpCall, *, session: str | None = None) -> Response:
    """A replica's answer to the call, streamed as it comes.

    Args:
        handle: a streaming one.
        session: what the call belongs to.
    """
    pieces: AsyncIterator[Head | bytes] = aiter(handle.http.remote(call))
    try:
        head = await anext(pieces)
    except ray.exceptions.RayActorError as error:
        return _replica_died(error, session)
    assert isinstance(head, Head)
    headers = dict(head.headers)
    if "text/event-stream" in headers.get("content-type", ""):
        return StreamingResponse(_events(pieces), status_code=head.status, headers=headers)
    try:
        content = b"".join([piece async for piece in pieces if isinstance(piece, bytes)])
    except ray.exceptions.RayActorError as error:
        return _replica_died(error, session)
    return Response(content, status_code=head.status, headers=headers)


async def _events(pieces: AsyncIterator[Head | bytes]) -> AsyncIterator[bytes]:
    """Server-sent events; the last one is an error when the replica dies meanwhile."""
    try:
        async for piece in pieces:
            assert isinstance(piece, bytes)
            yield piece
    except ray.exceptions.RayActorError as error:
        _, body = refusal(
            HTTPStatus.SERVICE_UNAVAILABLE, "ReplicaDiedError", f"the replica died: {error}"
        )
        yield b"data: " + body + b"\n\n"


def _replica_died(error: Exception, session: str | None) -> Response:
    if session is None:
        head, body = refusal(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "ReplicaDiedError",
            f"the replica died before it answered; ask again: {error}",
        )
    else:
        head, body = refusal(
            HTTPStatus.GONE,
            "SessionGoneError",
            f"the replica of session {session!r} died; open a new session, or repeat the turn with its full history "
            f"and the header 'x-session-history: full': {error}",
        )
    return Response(body, status_code=head.status, headers=dict(head.headers))


async def _models(request: Request) -> JSONResponse:
    """Every model of the application, as SGLang's own `/v1/models` lists one."""
    cards: list[Any] = []
    for model in this_ingress().model_ids:
        answer = await _asked_of_one(request, model, "/v1/models")
        if answer.status_code != HTTPStatus.OK:
            return JSONResponse(json.loads(bytes(answer.body)), answer.status_code)
        cards += json.loads(bytes(answer.body))["data"]
    return JSONResponse({"object": "list", "data": cards})


async def _model(request: Request, model: str) -> Response:
    this_ingress().handles(model)
    return await _asked_of_one(request, model, f"/v1/models/{model}")


async def _asked_of_one(request: Request, model: str, path: str) -> Response:
    call = dataclasses.replace(await call_of(request), path=path, body=b"")
    return await passed_on(this_ingress().handles(model).replicas.options(stream=True), call)


def _answer_unknown_model(_request: Request, error: Exception) -> JSONResponse:
    content = {
        "error": {"type": "UnknownModelError", "message": str(error), "code": HTTPStatus.NOT_FOUND}
    }
    return JSONResponse(content, status_code=HTTPStatus.NOT_FOUND)
