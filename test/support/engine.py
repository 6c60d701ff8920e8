"""A real engine for tests: hosted by an actor of ours, served over HTTP, one call to have it.

```python
with running_engine(model_path) as engine:      # or the session's own: the fixture `shared_engine`
    answer = engine.generate([5, 6, 7], 4)      # -> Generation, greedy
    engine.post("pause_generation", {"mode": "retract"})
    engine.actors                               # SchedulerActor handles, rank order
    engine.control()                            # HttpEngineControl, for a WeightPublisher
```
Ray must be running (fixture `local_ray`). The host takes no CPU, each rank takes one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import requests

from .oracle import Generation, scored_request

START_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 120.0
HOST = "127.0.0.1"
ON_A_GPU = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.3,
    "cuda_graph_max_bs_decode": 8,
    "cuda_graph_backend_prefill": "disabled",
}
"""Of a small model that shares one GPU, with kernels that need no further package."""


class EngineHost:
    """What a user's own hosting actor does: launch the ranks, serve HTTP on a thread."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._server: threading.Thread | None = None

    def start(
        self, server_args: dict[str, Any], placement_group: Any = None
    ) -> tuple[str, list[Any]]:
        """Returns the engine's URL and its SchedulerActor handles once `/health` answers."""
        from sglang.srt.ray.http_server import launch_engine, serve_http
        from sglang.srt.server_args import ServerArgs

        arguments = ServerArgs(host=HOST, port=free_port(), **server_args)
        self._engine = launch_engine(arguments, placement_group=placement_group)
        self._server = threading.Thread(
            target=serve_http, args=(self._engine, arguments), daemon=True
        )
        self._server.start()
        url = f"http://{HOST}:{arguments.port}"
        wait_until_healthy(url, timeout_s=START_TIMEOUT_S, alive=self._server.is_alive)
        return url, list(self._engine.scheduler_init_result.scheduler_actors)

    def stop(self) -> bool:
        """End the engine; returns whether its server thread ended too."""
        self._engine.shutdown()
        assert self._server is not None
        self._server.join(timeout=30)
        return not self._server.is_alive()

    def pid(self) -> int:
        return os.getpid()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunningEngine:
    """A served engine. Every call has a deadline."""

    url: str
    actors: list[Any]
    host: Any
    model_path: Path

    def post(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> requests.Response:
        """The raw answer, whatever its status."""
        return requests.post(f"{self.url}/{path}", json=body, timeout=timeout_s)

    def get(self, path: str, timeout_s: float = CALL_TIMEOUT_S) -> requests.Response:
        return requests.get(f"{self.url}/{path}", timeout=timeout_s)

    def generate(
        self,
        prompt: Sequence[int],
        length: int,
        *,
        temperature: float = 0.0,
        timeout_s: float = CALL_TIMEOUT_S,
        **body: Any,
    ) -> Generation:
        """One completion of exactly `length` tokens (unless it was aborted) with its log-probabilities."""
        request = scored_request(prompt, length, temperature=temperature)
        response = self.post("generate", request | body, timeout_s)
        response.raise_for_status()
        return Generation.of_answer(response.json())

    def ask(self, verb: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a verb on rank 0."""
        return ray.get(getattr(self.actors[0], verb).remote(*arguments), timeout=timeout_s)

    def control(self, name: str | None = None) -> Any:
        from sglang.srt.ray import HttpEngineControl

        return HttpEngineControl(self.url, self.actors, name=name)

    def make_usable(self) -> None:
        """Whatever a failed test left open is closed: session, pause."""
        self.post("end_weight_update", {})  # refused when no session is open, which is fine
        response = self.post("continue_generation", {"torch_empty_cache": False})
        response.raise_for_status()


@contextlib.contextmanager
def running_engine(
    model_path: Path,
    *,
    placement_group: Any = None,
    host_environment: dict[str, str] | None = None,
    **server_args: Any,
) -> Iterator[RunningEngine]:
    """Start an engine for weight syncs (on the CPU) and end it; `server_args` win over the defaults here."""
    arguments = {
        "model_path": str(model_path),
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 16384,
        "random_seed": 0,
        "log_level": "warning",
        "enable_rdt_weight_sync": True,
        "sleep_on_idle": True,  # else the idle loop takes a whole core from everybody else
    } | server_args
    environment = {"env_vars": host_environment or {}}
    host = ray.remote(num_cpus=0, runtime_env=environment)(EngineHost).remote()
    try:
        url, actors = ray.get(
            host.start.remote(arguments, placement_group), timeout=START_TIMEOUT_S
        )
        yield RunningEngine(url=url, actors=actors, host=host, model_path=Path(model_path))
        assert ray.get(host.stop.remote(), timeout=CALL_TIMEOUT_S), "the HTTP server did not end"
    finally:
        ray.kill(host)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(url: str, *, timeout_s: float, alive: Any = lambda: True) -> None:
    """Return once `/health` answers 200; fail when the server ends before, or at the deadline."""
    deadline = time.monotonic() + timeout_s
    last: object = "no answer"
    while time.monotonic() < deadline:
        if not alive():
            raise RuntimeError(f"the server at {url!r} ended before it was healthy")
        try:
            last = requests.get(f"{url}/health", timeout=10).status_code
        except requests.RequestException as error:
            last = error
        if last == requests.codes.ok:
            return
        time.sleep(0.2)
    raise TimeoutError(f"{url!r} was not healthy within {timeout_s:g} s (last: {last!r})")
