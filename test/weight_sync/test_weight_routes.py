"""The fence's HTTP face over a bare application: servers in a row, errors as JSON, the gate of a torn engine."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sglang.srt.ray.weight_routes import add_weight_routes
from sglang.srt.ray.weight_sync.errors import (
    DigestMismatchError,
    EngineTornError,
    TransactionBusyError,
)
from sglang.srt.utils.auth import add_api_key_middleware


class Fence:
    def __init__(self, *, torn: bool = False) -> None:
        self.torn = torn
        self.raising: Exception | None = None

    def check_serving(self) -> None:
        if self.torn:
            raise EngineTornError("weights are TORN")

    def status(self) -> dict[str, Any]:
        return {"state": "TORN" if self.torn else "SERVING"}

    async def resume(self, transaction: str, *, timeout_s: float) -> dict[str, Any]:
        if self.raising is not None:
            raise self.raising
        return {"resumed": transaction, "timeout_s": timeout_s}


@pytest.fixture
def app() -> FastAPI:
    made = FastAPI()

    @made.post("/generate")
    async def generate() -> dict[str, str]:
        return {"text": "hello"}

    return made


class Stamp:
    """A middleware that upstream would add for each server."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


def test_one_server_after_another_in_one_process_each_with_its_own_fence(app: FastAPI):
    for torn in (False, True, False):
        add_weight_routes(app, Fence(torn=torn))
        app.add_middleware(Stamp)
        assert len(app.user_middleware) == 2, "the last server's middleware is not this one's"
        with TestClient(app) as client:
            assert client.get("/weight_sync").json()["state"] == ("TORN" if torn else "SERVING")
            assert client.post("/generate").status_code == (503 if torn else 200)


def test_errors_are_told_with_class_text_place_and_a_fitting_status(app: FastAPI):
    fence = Fence()
    add_weight_routes(app, fence)
    with TestClient(app) as client:
        body = {"transaction": "t", "timeout_s": 3}
        assert client.post("/weight_sync/resume", json=body).json() == {
            "resumed": "t",
            "timeout_s": 3.0,
        }
        for error, status in (
            (TransactionBusyError("held"), 409),
            (DigestMismatchError("differs", rank=1, tensor="w"), 400),
            (EngineTornError("torn"), 503),
        ):
            fence.raising = error
            answer = client.post("/weight_sync/resume", json=body)
            told = answer.json()["error"]
            assert (answer.status_code, told["type"], told["message"]) == (
                status,
                type(error).__name__,
                error.message,
            )
            assert (told["rank"], told["tensor"]) == (error.rank, error.tensor)
        assert client.post("/weight_sync/resume", json={"transaction": "t"}).status_code == 422


def test_an_engine_without_weight_sync_says_so(app: FastAPI):
    add_weight_routes(app, None)
    with TestClient(app) as client:
        answer = client.get("/weight_sync")
        assert (answer.status_code, answer.json()["error"]["type"]) == (
            404,
            "WeightSyncDisabledError",
        )
        assert client.post("/generate").status_code == 200


EVERY_ROUTE = (
    ("GET", ""),
    ("GET", "/overview"),
    ("GET", "/ui"),
    ("POST", "/open"),
    ("POST", "/seal"),
    ("POST", "/resume"),
    ("POST", "/abort"),
)


@pytest.mark.parametrize(("method", "path"), EVERY_ROUTE)
@pytest.mark.parametrize(
    ("keys", "accepted"),
    [
        ({"api_key": "user", "admin_api_key": None}, "user"),
        ({"api_key": None, "admin_api_key": "admin"}, "admin"),
        ({"api_key": "user", "admin_api_key": "admin"}, "admin"),
    ],
)
def test_every_route_asks_for_the_key_of_upstreams_weight_endpoints(
    app: FastAPI, method: str, path: str, keys: dict[str, str | None], accepted: str
):
    add_weight_routes(app, None)
    add_api_key_middleware(app, **keys)
    url = f"/weight_sync{path}"
    with TestClient(app) as client:
        for key in (None, "user", "admin", "wrong"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            status = client.request(method, url, headers=headers).status_code
            assert (status == 401) == (key != accepted), f"key {key!r}: {status}"


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/scale_elastic_ep"), ("GET", "/is_scaling_elastic_ep")]
)
def test_guarded_routes_of_a_router_that_upstream_includes_ask_for_the_admin_key_too(
    app: FastAPI, method: str, path: str
):
    from sglang.srt.entrypoints.elastic_ep import router

    app.include_router(router)
    add_weight_routes(app, None)
    add_api_key_middleware(app, api_key=None, admin_api_key="admin")
    with TestClient(app, raise_server_exceptions=False) as client:
        for key in (None, "user", "admin"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            status = client.request(method, path, headers=headers).status_code
            assert (status == 401) == (key != "admin"), f"key {key!r}: {status}"


def test_every_guarded_route_of_upstreams_application_is_found_by_its_key_check():
    """On the application that is served: no route with a level of its own stays inside an included router."""
    from sglang.srt.entrypoints.http_server import app as served

    add_weight_routes(served, None)
    nested = [
        inner.path
        for route in served.router.routes
        for inner in getattr(getattr(route, "original_router", None), "routes", [])
        if hasattr(inner.endpoint, "_auth_level")
    ]
    assert nested == []
    assert "/scale_elastic_ep" in {getattr(route, "path", None) for route in served.router.routes}


def test_no_route_is_missing_from_the_list_above(app: FastAPI):
    add_weight_routes(app, None)
    ours = {
        (method, route.path.removeprefix("/weight_sync"))
        for route in app.routes
        if getattr(route, "path", "").startswith("/weight_sync")
        for method in route.methods - {"HEAD"}
    }
    assert ours == set(EVERY_ROUTE)
