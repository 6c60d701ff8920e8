"""HTTP face of the weight fence: `GET /weight_sync` and what a publisher posts.

JSON in and out, nothing that deserialises code; refs never come this way. The routes ask for the same keys as
upstream's own weight endpoints do. `engine_control.HttpEngineControl` is the client.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.ray import weight_ui
from sglang.srt.ray.weight_sync import errors
from sglang.srt.ray.weight_sync.control import OpenRequest
from sglang.srt.utils.auth import AuthLevel, auth_level

_STATUS_OF: tuple[tuple[type[errors.WeightSyncError], HTTPStatus], ...] = (
    (errors.EngineTornError, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.TransactionError, HTTPStatus.CONFLICT),
    (errors.WeightSyncDisabledError, HTTPStatus.NOT_FOUND),
    (errors.DeadlineExceededError, HTTPStatus.GATEWAY_TIMEOUT),
    (errors.WeightSyncError, HTTPStatus.BAD_REQUEST),
)


class OpenBody(BaseModel):
    transaction: str = Field(min_length=1)
    sequence: int
    owner: str
    version: str
    pause: Literal["abort", "retract", "in_place"] = "retract"
    ttl_s: float = Field(gt=0)
    force: bool = False
    partial: bool = False
    timeout_s: float = Field(gt=0)


class SealBody(BaseModel):
    transaction: str
    resume: bool
    timeout_s: float = Field(gt=0)


class ResumeBody(BaseModel):
    transaction: str
    timeout_s: float = Field(gt=0)


class AbortBody(BaseModel):
    transaction: str
    reason: str
    timeout_s: float = Field(gt=0)


def add_weight_routes(app: FastAPI, fence: Any | None) -> None:
    """Serve `fence` from `app`; None says that weight sync is off. May be called for every engine of a process."""
    if not hasattr(app.state, "weight_fence"):
        # Not include_router: FastAPI keeps an included router nested, and upstream's key check, looking for the route
        # to learn its level, then takes every one of ours for open to whoever has no admin key (fastapi 0.165).
        app.router.routes.extend(_router().routes)
        _lift_guarded_routes(app)
        app.add_exception_handler(errors.WeightSyncError, answer_with_error)
        app.add_middleware(TornGate, fastapi_app=app)
        app.state.first_middleware = list(app.user_middleware)
    # Upstream adds its own middleware (API keys) for every server, which an application that has run refuses.
    app.user_middleware = list(app.state.first_middleware)
    app.middleware_stack = None
    app.state.weight_fence = fence


def _lift_guarded_routes(app: FastAPI) -> None:
    """Do the same for what upstream itself includes: `/scale_elastic_ep` was open to whoever has no admin key.

    Included with a prefix or dependencies, a router is left as it is: its routes mean something else alone.
    """
    lifted: list[Any] = []
    for route in app.router.routes:
        inner = getattr(getattr(route, "original_router", None), "routes", [])
        context = getattr(route, "include_context", None)
        guarded = any(hasattr(getattr(each, "endpoint", None), "_auth_level") for each in inner)
        plain = context is not None and not context.prefix and not context.dependencies
        lifted.extend(inner if guarded and plain else [route])
    app.router.routes[:] = lifted


class TornGate:
    """ASGI middleware: while the weights are torn, requests get 503 before a stream could have begun."""

    _SERVING_PATHS = (
        "/generate",
        "/v1/",
        "/encode",
        "/classify",
        "/api/",
        "/invocations",
        "/vertex",
    )

    def __init__(self, app: ASGIApp, fastapi_app: FastAPI) -> None:
        self._inner = app
        self._app = fastapi_app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fence = self._app.state.weight_fence
        if (
            fence is not None
            and scope["type"] == "http"
            and scope["path"].startswith(self._SERVING_PATHS)
        ):
            try:
                fence.check_serving()
            except errors.EngineTornError as error:
                response = await answer_with_error(Request(scope), error)
                await response(scope, receive, send)
                return
        await self._inner(scope, receive, send)


def _fence(request: Request) -> Any:
    fence = request.app.state.weight_fence
    if fence is None:
        raise errors.WeightSyncDisabledError(
            "this engine was started without weight sync; start it with --enable-rdt-weight-sync"
        )
    return fence


def status_of_weight_error(error: Exception) -> HTTPStatus:
    """The HTTP status of a `WeightSyncError`."""
    return next(code for kind, code in _STATUS_OF if isinstance(error, kind))


async def answer_with_error(_request: Request, error: Exception) -> JSONResponse:
    """A weight error as JSON: its class, its text and where it happened."""
    status = status_of_weight_error(error)
    assert isinstance(error, errors.WeightSyncError)
    message = getattr(error, "message", str(error))
    places = errors.places_of(error)
    content = {"error": {"type": type(error).__name__, "message": message, **places}}
    return JSONResponse(content, status_code=status)


def _router() -> APIRouter:
    router = APIRouter()

    @router.get("/weight_sync")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def weight_sync(request: Request) -> dict[str, Any]:
        """State, version, open transaction and the last report of each rank."""
        return _fence(request).status()

    @router.get("/weight_sync/overview")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def overview(request: Request) -> dict[str, Any]:
        """The same, with what each rank says just now and the last syncs, newest first."""
        answer: dict[str, Any] = await _fence(request).overview()
        return answer

    @router.get("/weight_sync/ui", response_class=HTMLResponse)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def ui(request: Request) -> HTMLResponse:
        """A page that shows the overview."""
        _fence(request)
        return weight_ui.page()

    @router.post("/weight_sync/open")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def open_transaction(
        body: Annotated[OpenBody, Body()], request: Request
    ) -> dict[str, Any]:
        """Pause generation and open the weight session."""
        fields = body.model_dump(exclude={"timeout_s"})
        return await _fence(request).open(OpenRequest(**fields), timeout_s=body.timeout_s)

    @router.post("/weight_sync/seal")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def seal(body: Annotated[SealBody, Body()], request: Request) -> dict[str, Any]:
        """Prove every rank, end the session, drop the old cache, move the label."""
        fence = _fence(request)
        return await fence.seal(body.transaction, resume=body.resume, timeout_s=body.timeout_s)

    @router.post("/weight_sync/resume")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def resume(body: Annotated[ResumeBody, Body()], request: Request) -> dict[str, Any]:
        """Serve the sealed version."""
        return await _fence(request).resume(body.transaction, timeout_s=body.timeout_s)

    @router.post("/weight_sync/abort")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def abort(body: Annotated[AbortBody, Body()], request: Request) -> dict[str, Any]:
        """Give a transaction up."""
        fence = _fence(request)
        return await fence.abort(body.transaction, body.reason, timeout_s=body.timeout_s)

    return router
