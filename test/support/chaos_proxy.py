"""An HTTP proxy that loses one reply, or delivers one call twice."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import requests

Chaos = Literal["reply lost", "call repeated"]


class ChaosProxy:
    """Passes everything on to `url`; the next call whose path ends with `path` meets `chaos`, once."""

    def __init__(self, url: str) -> None:
        self._target = url
        self.chaos: Chaos | None = None
        self.path = ""
        self.met = 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy.answer(self)

            def do_POST(self) -> None:
                proxy.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, call: BaseHTTPRequestHandler) -> None:
        body = call.rfile.read(int(call.headers.get("Content-Length", 0)))
        chaos = self.chaos if call.path.endswith(self.path) else None
        if chaos is not None:
            self.chaos, self.met = None, self.met + 1
        for _ in range(2 if chaos == "call repeated" else 1):
            reply = requests.request(
                call.command,
                self._target + call.path,
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=120,
            )
        if chaos == "reply lost":
            call.close_connection = True
            call.connection.shutdown(socket.SHUT_RDWR)
            return
        call.send_response(reply.status_code)
        call.send_header("Content-Type", "application/json")
        call.send_header("Content-Length", str(len(reply.content)))
        call.end_headers()
        call.wfile.write(reply.content)

    @contextlib.contextmanager
    def running(self) -> Iterator[ChaosProxy]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join(timeout=10)
