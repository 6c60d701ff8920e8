"""`launch_server --ray` as a process: find or start Ray, launch, serve, and leave nothing behind.

The main thread only waits for a signal, a dead rank or the end of the server, so the engine is launched and served just
as in a caller's own actor (`launch.py`), and one bounded path ends it whatever the reason. Upstream's own shutdown
drains in 5 s steps without a limit and kills every child of the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

from sglang.srt.ray.cluster import connect_ray, namespace_of
from sglang.srt.ray.launch import LaunchedEngine, launch_engine, serve_http

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_VARIABLE = "SGLANG_RAY_DRAIN_TIMEOUT_S"
DEFAULT_DRAIN_TIMEOUT_S = 5.0
_SERVER_STOP_TIMEOUT_S = 4.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ServerStoppedError(RuntimeError):
    """The server ended although nobody asked it to."""


def run_server_process(server_args: Any) -> None:
    """Serve until a signal; main thread only, since signals arrive there.

    Raises:
        ServerStoppedError: the server or a rank ended by itself.
        Whatever `launch_engine` raises. Nothing that was started here is left behind in any case.
    """
    stop = threading.Event()
    started_ray = connect_ray(namespace=namespace_of(server_args))
    engine: LaunchedEngine | None = None
    try:
        engine = _launch_interruptibly(server_args)
        if engine is not None:
            with _signals_call(lambda *_: stop.set()):
                _serve_until_stopped(engine, server_args, stop)
    finally:
        if engine is not None:
            engine.shutdown()
        if started_ray:
            ray.shutdown()


@contextlib.contextmanager
def _signals_call(handler: Callable[..., None]) -> Iterator[None]:
    # After ray.init, which installs a SIGTERM handler of its own that exits at once.
    previous = {number: signal.signal(number, handler) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _launch_interruptibly(server_args: Any) -> LaunchedEngine | None:
    """Launch on this thread; None when a signal ended it (what had been started is gone then)."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with _signals_call(interrupt):
        try:
            return launch_engine(server_args)
        except KeyboardInterrupt:
            return None


def _serve_until_stopped(engine: LaunchedEngine, server_args: Any, stop: threading.Event) -> None:
    outcome: list[BaseException] = []

    def serve() -> None:
        try:
            serve_http(engine, server_args, on_ready=lambda: _say_ready(server_args))
        except BaseException as error:  # handed over to the main thread, which reports it
            outcome.append(error)
        finally:
            stop.set()

    server = threading.Thread(target=serve, name="sglang-http", daemon=True)
    server.start()
    stop.wait()
    if server.is_alive():
        _drain(engine)
        if (stop_server := engine.tokenizer_manager._server_stop_hook) is not None:
            stop_server()
        server.join(timeout=_SERVER_STOP_TIMEOUT_S)
    elif outcome:
        raise ServerStoppedError(f"the server stopped: {outcome[0]}") from outcome[0]
    else:
        raise ServerStoppedError("the server stopped by itself; its log says why")


def _drain(engine: LaunchedEngine) -> None:
    """Give open requests a bounded time to end."""
    deadline = time.monotonic() + float(
        os.environ.get(DRAIN_TIMEOUT_VARIABLE, DEFAULT_DRAIN_TIMEOUT_S)
    )
    while (
        open_requests := len(engine.tokenizer_manager.rid_to_state)
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    if open_requests:
        logger.warning("stopping with %d open request(s)", open_requests)


def _say_ready(server_args: Any) -> None:
    print(f"sglang: ready at {server_args.url()}", flush=True)
