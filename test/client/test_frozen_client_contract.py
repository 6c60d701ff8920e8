"""FROZEN. What existing trainers call, to the letter: names, shapes and order of calls must keep working unchanged.

Launching inside a caller's own actor, pulling by the actors' verbs with the default pause mode and several buckets,
from a trainer in another actor that fills SGLang's own parameters by hand. The right answers are Hugging Face's.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import requests
from support.models import ENGINE_SEED, new_model
from support.oracle import GAP, greedy

NEW_SEED = 77
PROMPT = [7, 8, 9, 10, 11]
LENGTH = 12
START_S = 300.0
CALL_S = 120.0


class HostingActor:
    """A trainer's rollout actor: gets the actor handles from `launch_engine`, serves on a thread."""

    def __init__(self, bundle_indices: str) -> None:
        os.environ["SGLANG_RAY_BUNDLE_INDICES"] = bundle_indices

    def start(self, model_path: str, pg: Any) -> tuple[str, list[Any]]:
        from sglang.srt.ray.http_server import launch_engine, serve_http
        from sglang.srt.server_args import ServerArgs

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server_args = ServerArgs(
            model_path=model_path,
            device="cpu",
            dtype="float32",
            port=port,
            max_total_tokens=8192,
            log_level="warning",
            enable_rdt_weight_sync=True,
        )
        engine = launch_engine(server_args, placement_group=pg)
        _, _, _, scheduler_init_result, _, _ = engine
        threading.Thread(target=serve_http, args=(engine, server_args), daemon=True).start()
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                if requests.get(f"{url}/health", timeout=10).status_code == 200:
                    return url, scheduler_init_result.scheduler_actors
            except requests.ConnectionError:
                pass  # not listening yet
            time.sleep(0.2)
        raise TimeoutError(f"{url} was not healthy within {START_S:g} s")


class TrainerActor:
    """Knows SGLang's parameter names from `weight_layout()` and fuses Hugging Face's tensors itself."""

    def sync(self, url: str, actors: list[Any], seed: int) -> int:
        """Returns how many buckets it took."""
        state = new_model(seed).state_dict()
        layouts = ray.get([a.weight_layout.remote() for a in actors])
        ray.get([a.register_weight_for_rdt.remote() for a in actors])
        post(url, "pause_generation", {})
        post(url, "begin_weight_update", {})
        num_buckets = 0
        for actor, layout in zip(actors, layouts, strict=True):
            assert layout.fingerprint
            for bucket in self._buckets(layout.entries, state):
                names, views = zip(*bucket, strict=True)
                ref = ray.put(list(views), _tensor_transport="nixl")
                ray.get([actor.pull_weights.remote([ref], list(names))])
                num_buckets += 1
        post(url, "end_weight_update", {})
        post(url, "continue_generation", {})
        return num_buckets

    def _buckets(self, entries: Any, state: dict[str, Any]) -> Iterator[list[tuple[str, Any]]]:
        """Views of one flat tensor for each five parameters."""
        import torch

        for first in range(0, len(entries), 5):
            group = entries[first : first + 5]
            filled = [fuse(entry.name, state) for entry in group]
            for entry, tensor in zip(group, filled, strict=True):
                assert tuple(entry.shape) == tuple(tensor.shape), entry
                assert entry.dtype == "float32", entry
            flat = torch.cat([tensor.reshape(-1) for tensor in filled])
            sizes = [tensor.numel() for tensor in filled]
            views = [
                part.view(tensor.shape)
                for part, tensor in zip(flat.split(sizes), filled, strict=True)
            ]
            yield [(entry.name, view) for entry, view in zip(group, views, strict=True)]


def fuse(name: str, state: dict[str, Any]) -> Any:
    import torch

    for fused, parts in (
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    ):
        if fused in name:
            return torch.cat([state[name.replace(fused, part)] for part in parts])
    return state[name]


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    response = requests.post(f"{url}/{path}", json=body, timeout=CALL_S)
    response.raise_for_status()
    return response


def generate(url: str) -> tuple[list[int], list[float]]:
    sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    scored = post(url, "generate", body).json()["meta_info"]["output_token_logprobs"]
    return [token for _, token, *_ in scored], [logprob for logprob, *_ in scored]


def assert_serves(url: str, seed: int) -> None:
    tokens, logprobs = generate(url)
    expected = greedy(new_model(seed), PROMPT, LENGTH)
    assert tokens == expected.tokens
    assert max(abs(a - b) for a, b in zip(logprobs, expected.logprobs, strict=True)) < GAP


@pytest.fixture
def placement_group(ray_address: str) -> Iterator[Any]:
    """Bundle 1 has the CPU; bundle 0 can hold no rank."""
    pg = ray.util.placement_group([{"memory": 1}, {"CPU": 1}])
    assert pg.wait(60), "no CPU was free"
    yield pg
    ray.util.remove_placement_group(pg)


def test_an_existing_trainer_launches_pulls_and_gets_the_new_policy(
    placement_group: Any, tiny_model: Path
):
    from sglang.srt.ray import launch_engine, serve_http
    from sglang.srt.ray.http_server import launch_engine as launch
    from sglang.srt.ray.http_server import serve_http as serve

    assert (launch_engine, serve_http) == (launch, serve)
    hosting = ray.remote(num_cpus=0)(HostingActor)
    wrong = hosting.remote("0")
    with pytest.raises(ValueError, match="bundle 0 has no CPU"):
        ray.get(wrong.start.remote(str(tiny_model), placement_group), timeout=START_S)
    ray.kill(wrong)

    host = hosting.remote("1")
    url, actors = ray.get(host.start.remote(str(tiny_model), placement_group), timeout=START_S)
    assert len(actors) == 1
    assert_serves(url, ENGINE_SEED)
    trainer = ray.remote(num_cpus=0, enable_tensor_transport=True)(TrainerActor).remote()
    num_buckets = ray.get(trainer.sync.remote(url, actors, NEW_SEED), timeout=CALL_S)
    assert num_buckets > 1
    assert_serves(url, NEW_SEED)
    ray.get(trainer.sync.remote(url, actors, NEW_SEED + 1), timeout=CALL_S)
    assert_serves(url, NEW_SEED + 1)

    pids = ray.get([a.__ray_call__.remote(lambda _: os.getpid()) for a in actors], timeout=CALL_S)
    ranks = [psutil.Process(pid) for pid in pids]
    ray.kill(host)
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive, "the hosting actor's death leaves its schedulers running"
    ray.kill(trainer)
