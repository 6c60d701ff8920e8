"""A trainer of another Ray job finds an engine's ranks by name and has them pull from its own refs.

Also how the server's own process ends when a rank dies: with the reason, and status 1.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import requests
from leftovers import free_port, port_is_open, wait_for
from support.local_ray import local_ray
from tiny_qwen import greedy_by_transformers, write_tiny_qwen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMESPACE = "the-engines"
PROMPT = [5, 17, 300, 22]

TRAINER = """
import sys, ray, requests

address, namespace, name, url, weights = sys.argv[1:]
ray.init(address=address, log_to_driver=False)  # a job of its own, in a namespace of its own


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Trainer:
    def push(self, name, namespace, weights):
        from safetensors.torch import load_file

        actor = ray.get_actor(name, namespace=namespace)
        ray.get(actor.register_weight_for_rdt.remote(), timeout=120)
        names = ["lm_head.weight"]
        tensors = [load_file(weights)[name].contiguous() for name in names]
        ref = ray.put(tensors, _tensor_transport="nixl")
        return ray.get(actor.pull_weights.remote([ref], names), timeout=120)


def post(path, body=None):
    answer = requests.post(f"{url}/{path}", json=body, timeout=120)
    answer.raise_for_status()


post("pause_generation", {"mode": "retract"})
post("begin_weight_update", {})
report = ray.get(Trainer.remote().push.remote(name, namespace, weights), timeout=300)
post("end_weight_update", {})
post("flush_cache")
post("continue_generation", {"torch_empty_cache": False})
assert report["bytes"] > 0, report
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with local_ray() as address:
        yield address


@pytest.fixture(scope="module")
def server(cluster, tiny_qwen, tmp_path_factory) -> Iterator[tuple[subprocess.Popen, str, Path]]:
    """`launch_server --ray` in a process without a Ray context: it joins the running cluster."""
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--ray",
        "--model-path",
        str(tiny_qwen),
    ]
    command += ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096"]
    command += ["--port", str(port), "--enable-rdt-weight-sync", "--sleep-on-idle"]
    command += ["--ray-namespace", NAMESPACE]
    with log.open("wb") as output:
        environment = os.environ | {"RAY_ADDRESS": cluster}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                return requests.get(f"{url}/health", timeout=30).status_code == 200
            except requests.ConnectionError:
                return False

        wait_for(ready, "the server's health", 300)
        yield process, url, log
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def rank_name() -> str:
    (found,) = [
        one
        for one in ray.util.list_named_actors(all_namespaces=True)
        if one["namespace"] == NAMESPACE
    ]
    return found["name"]


def generated(url: str) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    return requests.post(f"{url}/generate", json=body, timeout=120).json()["output_ids"]


def test_a_trainer_of_another_job_pulls_its_weights_into_the_engine(
    cluster, server, tiny_qwen, tmp_path
):
    _, url, _ = server
    assert generated(url) == greedy_by_transformers(tiny_qwen, [PROMPT], 8)[0]
    other = write_tiny_qwen(tmp_path / "other", seed=1)
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    weights = other / "model.safetensors"
    arguments = [cluster, NAMESPACE, rank_name(), url, str(weights)]
    run = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stderr[-3000:]
    expected = mixed_model(tiny_qwen, other, tmp_path / "mixed")
    assert generated(url) == greedy_by_transformers(expected, [PROMPT], 8)[0]


def mixed_model(base: Path, other: Path, path: Path) -> Path:
    """The engine's model with the other one's head."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(base, path)
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = load_file(other / "model.safetensors")["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_a_server_whose_rank_dies_exits_with_the_reason(server):
    process, url, log = server
    pid = pid_of(ray.get_actor(rank_name(), namespace=NAMESPACE))
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    assert process.wait(30) == 1
    assert time.monotonic() - killed < 15
    assert "rank 0 (dp 0, pp 0, tp 0) died" in log.read_text().splitlines()[-1]
    assert not port_is_open(int(url.rpartition(":")[2]))
    assert ray.is_initialized()
    assert (
        ray.get(ray.remote(lambda: 1).remote(), timeout=60) == 1
    )  # the cluster is not the server's


def pid_of(actor: Any) -> int:
    from ray._private import state

    return state.actors(actor._actor_id.hex())["Pid"]
