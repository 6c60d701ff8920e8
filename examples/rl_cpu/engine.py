"""The engine actor: an SGLang engine on Ray and its HTTP server, hosted without a CPU of its own.

The engine's ranks are actors in a placement group of one CPU each, made by ``launch_engine``; this
actor holds only the tokenizer and the HTTP server.  If it dies, so do the ranks: Ray ends actors
with their owner.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import requests

if TYPE_CHECKING:
    from ray.actor import ActorHandle

HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    model_path: Path
    seed: int
    device: str
    max_total_tokens: int = 16384
    """Size of the KV cache; without it the engine takes most of the machine's memory on a CPU."""

    health_timeout_seconds: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAddress:
    """How to reach a running engine: HTTP for requests, the ranks' handles for weights."""

    url: str
    scheduler_actors: tuple[ActorHandle, ...]


class EngineHost:
    """Runs in its own Ray actor; the driver calls ``start`` once and ``stop`` at the end."""

    def __init__(self) -> None:
        # Seconds of imports, spent while the driver makes the model.
        import sglang.srt.ray.http_server
        import sglang.srt.server_args  # noqa: F401

        self._engine = None

    def start(self, config: EngineConfig) -> EngineAddress:
        """Launch the ranks, serve HTTP on a free loopback port, return once ``/health`` is 200."""
        from sglang.srt.ray import launch_engine, serve_http
        from sglang.srt.server_args import ServerArgs

        server_args = ServerArgs(
            model_path=str(config.model_path),
            device=config.device,
            dtype="float32",
            host=HOST,
            port=_free_port(),
            enable_rdt_weight_sync=True,
            max_total_tokens=config.max_total_tokens,
            random_seed=config.seed,
            sleep_on_idle=True,
            log_level="warning",
        )
        self._engine = launch_engine(server_args)
        server = threading.Thread(
            target=serve_http, args=(self._engine, server_args), name="serve-http", daemon=True
        )
        server.start()
        url = f"http://{HOST}:{server_args.port}"
        _wait_until_healthy(url, server, timeout_seconds=config.health_timeout_seconds)
        actors = self._engine.scheduler_init_result.scheduler_actors
        return EngineAddress(url=url, scheduler_actors=tuple(actors))

    def stop(self) -> None:
        """End the ranks and every helper process of the engine; harmless when it never started."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _wait_until_healthy(url: str, server: threading.Thread, *, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    session = requests.Session()
    session.trust_env = False  # an HTTP proxy of the user's must not see loopback traffic
    last = "no answer"
    while time.monotonic() < deadline:
        if not server.is_alive():
            raise RuntimeError(
                f"the HTTP server at {url!r} ended while it started; "
                f"its traceback is in the log of this actor"
            )
        try:
            status = session.get(f"{url}/health", timeout=5).status_code
            if status == requests.codes.ok:
                return
            last = f"status {status}"
        except requests.RequestException as e:
            last = repr(e)
        time.sleep(0.2)
    raise TimeoutError(
        f"the engine at {url!r} was not healthy within {timeout_seconds!r} s (last: {last}); "
        f"see the log of this actor and of the engine's ranks"
    )
