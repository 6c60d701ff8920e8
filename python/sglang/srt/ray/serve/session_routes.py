"""`POST /sessions`, `GET` and `DELETE /sessions/{id}`: each goes to the replica that Serve's hash of the key picks.

A turn is any serving request with the header `x-session-id` (`ingress.py`); `sessions.py` is the replica's side.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any

import ray
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from sglang.srt.ray.serve.ingress import this_ingress
from sglang.srt.ray.serve.sessions import DEFAULT_IDLE_S, key_of, new_key

SESSION_HEADER = os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id").lower()
"""The same setting as Serve's own."""


class SessionBody(BaseModel):
    """What opening a session takes."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    idle_s: Annotated[float, Field(gt=0, le=86400)] = DEFAULT_IDLE_S


def add_routes(app: FastAPI) -> None:
    app.add_api_route("/sessions", _open, methods=["POST"], status_code=HTTPStatus.CREATED)
    app.add_api_route("/sessions/{session}", _ask, methods=["GET"])
    app.add_api_route("/sessions/{session}", _close, methods=["DELETE"])


def session_of(headers: Mapping[str, str]) -> str | None:
    """The session that a request names; proxies turn '-' into '_' at times, so both spellings count."""
    wanted = SESSION_HEADER.replace("_", "-")
    for name, value in headers.items():
        if name.lower().replace("_", "-") == wanted:
            return value
    return None


async def _open(request: Request, body: SessionBody | None = None) -> JSONResponse:
    told = body or SessionBody()
    key = new_key()
    return await _call(request, told.model, key, "open", {"key": key, "idle_s": told.idle_s})


async def _ask(request: Request, session: str, model: str | None = None) -> JSONResponse:
    return await _call(request, model, key_of(session), "find", {"session_id": session})


async def _close(request: Request, session: str, model: str | None = None) -> JSONResponse:
    return await _call(request, model, key_of(session), "close", {"session_id": session})


async def _call(
    request: Request, model: str | None, key: str, verb: str, arguments: dict[str, Any]
) -> JSONResponse:
    handles = this_ingress().handles(model)
    if not handles.keys.serve(request):
        return JSONResponse({"error": "Unauthorized"}, status_code=HTTPStatus.UNAUTHORIZED)
    replica = handles.replicas.options(session_id=key)
    try:
        status, content = await replica.session.remote(verb, arguments)
    except ray.exceptions.RayActorError as error:
        message = f"the replica of this session died: {error}. Open a new session"
        told = {"type": "SessionGoneError", "message": message, "code": HTTPStatus.GONE}
        return JSONResponse({"error": told}, status_code=HTTPStatus.GONE)
    return JSONResponse(content, status_code=status)
