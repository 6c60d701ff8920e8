"""An engine to try the examples on: a local Ray of two CPUs, one rank, HTTP on a free loopback port."""

import contextlib
import os
import socket
import threading
import time

import ray
import requests

START_TIMEOUT_S = 300


class EngineHost:
    """Hosts tokenizer and HTTP server in an actor of its own, as a framework would."""

    def start(self, model_path):
        from sglang.srt.ray import launch_engine, serve_http
        from sglang.srt.server_args import ServerArgs

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        arguments = ServerArgs(
            model_path=model_path, device="cpu", dtype="float32", port=port, max_total_tokens=4096,
            enable_rdt_weight_sync=True, sleep_on_idle=True, log_level="warning",
        )  # fmt: skip
        self.engine = launch_engine(arguments)
        threading.Thread(target=serve_http, args=(self.engine, arguments), daemon=True).start()
        return f"http://127.0.0.1:{port}", list(self.engine.scheduler_actors)

    def stop(self):
        self.engine.shutdown()


@contextlib.contextmanager
def local_engine(model_path):
    """Yields (URL, rank handles); ends engine and Ray."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        host = ray.remote(num_cpus=0)(EngineHost).remote()
        url, actors = ray.get(
            host.start.remote(os.path.abspath(model_path)), timeout=START_TIMEOUT_S
        )
        wait_until_healthy(url)
        yield url, actors
        ray.get(host.stop.remote(), timeout=60)
    finally:
        ray.shutdown()


def wait_until_healthy(url):
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(requests.ConnectionError):
            if requests.get(f"{url}/health", timeout=10).ok:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url!r} was not healthy within {START_TIMEOUT_S} s")
        time.sleep(0.2)
