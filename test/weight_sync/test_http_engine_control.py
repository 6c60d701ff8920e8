"""How the HTTP control waits: a broken connection is asked again, a deadline is the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang.srt.ray.engine_control import HttpEngineControl
from sglang.srt.ray.weight_sync import DeadlineExceededError, EngineRequestError


class Server:
    """Counts calls; breaks the first `broken` of them and makes the others wait `delay_s`."""

    def __init__(self, *, broken: int, delay_s: float) -> None:
        self.calls = 0
        mine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mine.calls += 1
                if mine.calls <= broken:
                    self.close_connection = True
                    return
                time.sleep(delay_s)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'{"state": "SERVING"}')

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.control = HttpEngineControl(f"http://127.0.0.1:{self._server.server_port}", [])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Any]:
    started: list[Server] = []

    def make(**options: Any) -> Server:
        started.append(Server(**options))
        return started[-1]

    yield make
    for server in started:
        server.stop()


def test_a_lost_reply_is_asked_for_again(serve):
    server = serve(broken=2, delay_s=0.0)
    assert server.control.status(timeout_s=5)["state"] == "SERVING"
    assert server.calls == 3


def test_an_engine_that_keeps_breaking_is_an_error(serve):
    server = serve(broken=100, delay_s=0.0)
    with pytest.raises(EngineRequestError, match="failed"):
        server.control.status(timeout_s=5)


def test_a_deadline_is_waited_for_once(serve, monkeypatch):
    monkeypatch.setattr("sglang.srt.ray.engine_control._ANSWER_MARGIN_S", 0.1)
    server = serve(broken=0, delay_s=2.0)
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"within 0\.2 s"):
        server.control.status(timeout_s=0.2)
    assert time.monotonic() - started < 1.5
    assert server.calls == 1
