"""A real engine on this machine's CPU, in this process or as a server of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

START_TIMEOUT_S = 420.0  # a loaded machine takes minutes where an idle one takes 20 s
STOP_TIMEOUT_S = 60.0
API_KEY = "a key for tests"
HEADERS = {"Authorization": f"Bearer {API_KEY}"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def engine_arguments(folder: Path, **values: Any) -> dict[str, Any]:
    return {
        "model_path": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 1024,
        "skip_server_warmup": True,
        "api_key": API_KEY,
        "port": free_port(),
        **values,
    }


def wait_until_serving(port: int, alive: Any) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert alive(), "the server ended before it served"
        with contextlib.suppress(requests.exceptions.RequestException):
            if requests.get(f"http://127.0.0.1:{port}/model_info", headers=HEADERS, timeout=60).ok:
                return
        time.sleep(0.5)
    raise TimeoutError(f"the server on port {port} did not answer within {START_TIMEOUT_S:g} s")


@contextlib.contextmanager
def ray_engine(folder: Path, **values: Any) -> Iterator[tuple[Any, Any]]:
    """An engine under Ray, hosted and served by this process. Yields it and its server args."""
    from sglang.srt.ray import launch_engine, serve_http
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(**engine_arguments(folder, use_ray=True, **values))
    engine = launch_engine(server_args)
    server = threading.Thread(target=serve_http, args=(engine, server_args), daemon=True)
    server.start()
    try:
        wait_until_serving(server_args.port, server.is_alive)
        yield engine, server_args
    finally:
        engine.shutdown()
        server.join(timeout=STOP_TIMEOUT_S)


class EngineHost:
    """Hosts and serves one engine; as a Ray actor, since upstream's HTTP app can be served once in a process."""

    def start(self, folder: Path, values: dict[str, Any]) -> tuple[list[Any], int]:
        """The scheduler actors and the HTTP port."""
        self._running = ray_engine(folder, **values)
        engine, server_args = self._running.__enter__()
        return engine.scheduler_actors, server_args.port

    def stop(self) -> None:
        self._running.__exit__(None, None, None)


@contextlib.contextmanager
def hosted_engine(folder: Path, **values: Any) -> Iterator[tuple[list[Any], int]]:
    """An engine under Ray in a host actor. Yields its scheduler actors and its HTTP port."""
    import ray

    ray.cloudpickle.register_pickle_by_value(
        sys.modules[__name__]
    )  # no package, so not importable there
    host = ray.remote(num_cpus=0)(EngineHost).remote()
    try:
        yield ray.get(host.start.remote(folder, values), timeout=START_TIMEOUT_S)
        ray.get(host.stop.remote(), timeout=STOP_TIMEOUT_S)
    finally:
        ray.kill(host)


@contextlib.contextmanager
def plain_server(folder: Path, log: Path, *flags: str) -> Iterator[int]:
    """`python -m sglang.launch_server` without Ray. Yields its port."""
    values = engine_arguments(folder)
    options = [f"--{k.replace('_', '-')}={v}" for k, v in values.items() if v is not True]
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        *options,
        "--skip-server-warmup",
        *flags,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env=dict(os.environ)
        )
        try:
            wait_until_serving(values["port"], lambda: process.poll() is None)
            yield values["port"]
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=STOP_TIMEOUT_S)
