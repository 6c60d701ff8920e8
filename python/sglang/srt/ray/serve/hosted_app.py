"""SGLang's own HTTP application inside a replica, without a port: requests come over Serve's handles.

`launch.serve_http` runs the same application under uvicorn. Here it is called in place (ASGI), on the replica's event
loop, which is also the engine's, so that every endpoint, middleware and error of upstream's is what a client gets.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.ray.launch import LaunchedEngine, answer_failure
from sglang.srt.ray.liveness import EngineFailedError
from sglang.srt.ray.serve.exchange import Head, HttpCall, forwarded
from sglang.srt.ray.warmup import WarmupFailedError

_WARM_UP_S = 180.0
_WARM_UP_AGAIN_S = 0.2
_UNWIND_S = 10.0  # time for a handler whose client has gone to notice it and to abort its request


class HostedApp:
    """One engine's application. Used on the event loop that called `start`."""

    def __init__(self, engine: LaunchedEngine, server_args: Any) -> None:
        self._engine = engine
        self._server_args = server_args
        self._lifespan = contextlib.AsyncExitStack()
        self._unwinding: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Set the application up for this engine and answer one request.

        Raises:
            WarmupFailedError: that request failed.
        """
        from sglang.srt.entrypoints import http_server
        from sglang.srt.ray.weight_routes import add_weight_routes

        app: Any = http_server.app
        self._app = app
        manager = self._engine.tokenizer_manager
        http_server.set_global_state(
            http_server._GlobalState(
                tokenizer_manager=manager,
                template_manager=self._engine.template_manager,
                scheduler_info=self._engine.scheduler_init_result.scheduler_infos[0],
            )
        )
        app.add_exception_handler(EngineFailedError, answer_failure)
        add_weight_routes(app, getattr(manager, "weight_fence", None))
        app.is_single_tokenizer_mode = True
        app.server_args = self._server_args
        # Upstream's warm-up calls a port, which there is none of; `_warm_up` does its work.
        app.warmup_thread_kwargs = {
            "server_args": self._server_args,
            "execute_warmup_func": lambda _: False,
        }
        _add_keys(app)
        await self._lifespan.enter_async_context(app.router.lifespan_context(app))
        await self._warm_up(manager)

    async def stop(self) -> None:
        for task in list(self._unwinding):
            task.cancel()
        await self._lifespan.aclose()

    async def exchange(self, call: HttpCall) -> AsyncIterator[Head | bytes]:
        """The answer's head, then its body in the pieces that the handler sends.

        When the caller goes away (the iterator is closed or cancelled), the handler is told that its client has gone.
        """
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        gone = asyncio.Event()
        messages = iter([{"type": "http.request", "body": call.body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            if (message := next(messages, None)) is not None:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            await sent.put(message)

        task = asyncio.ensure_future(self._app(_scope(call), receive, send))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield _head(message)
                elif message.get("body"):
                    yield message["body"]
            task.result()
        finally:
            gone.set()
            if not task.done():
                self._let_unwind(task)

    async def answer(self, call: HttpCall) -> tuple[Head, bytes]:
        """The whole answer at once."""
        head, body = Head(status=HTTPStatus.INTERNAL_SERVER_ERROR), b""
        async with contextlib.aclosing(self.exchange(call)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                if isinstance(piece, Head):
                    head = piece
                else:
                    body += piece
        return head, body

    def _let_unwind(self, task: asyncio.Task[None]) -> None:
        self._unwinding.add(task)
        task.add_done_callback(self._unwinding.discard)
        asyncio.get_running_loop().call_later(_UNWIND_S, task.cancel)

    async def _warm_up(self, manager: Any) -> None:
        """One generated token. Upstream's probe waits 20 s: not enough where many engines start on few cores."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _WARM_UP_S
        while True:
            manager.server_status = ServerStatus.Up
            head, body = await self.answer(HttpCall(method="GET", path="/health_generate"))
            if head.status == HTTPStatus.OK:
                return
            if self._engine.failure is not None:
                raise self._engine.failure
            if loop.time() > deadline:
                raise WarmupFailedError(
                    f"the first request had no answer after {_WARM_UP_S:g} s (status {head.status}): "
                    f"{body.decode(errors='replace')!r}; is the detokenizer still starting?"
                )
            await asyncio.sleep(_WARM_UP_AGAIN_S)


def _add_keys(app: Any) -> None:
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.auth import add_api_key_middleware, app_has_admin_force_endpoints

    serving = get_serving()
    if serving.api_key or serving.admin_api_key or app_has_admin_force_endpoints(app):
        add_api_key_middleware(app, api_key=serving.api_key, admin_api_key=serving.admin_api_key)


def _scope(call: HttpCall) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "root_path": "",
        "query_string": call.query.encode("latin-1"),
        "headers": [
            (key.lower().encode("latin-1"), value.encode("latin-1")) for key, value in call.headers
        ]
        + [(b"content-length", str(len(call.body)).encode())],
        "client": ("serve", 0),
        "server": ("serve", 0),
        "state": {},
    }


def _head(message: dict[str, Any]) -> Head:
    headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in message.get("headers", ())]
    return Head(status=int(message["status"]), headers=forwarded(headers))
