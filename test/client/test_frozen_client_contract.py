"""FROZEN. What existing trainers call, to the letter: names, shapes and order of calls must keep working unchanged.

An engine of two ranks inside the caller's own actor, on chosen bundles of the caller's group; a trainer in another
process that learns where the ranks stand over HTTP, builds each rank's shard, fills it with the shard's own loader and
has the ranks pull it bucket by bucket, with the default pause mode; the end of all of it with the hosting actor. The
right answers are Hugging Face's. A change of the product that fails here breaks clients: change the product, not this.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import ray
import requests
from support.local_ray import local_ray
from support.models import ENGINE_SEED, VOCAB_SIZE, new_model, qwen2_config, write_model
from support.oracle import GAP, greedy

pytestmark = pytest.mark.timeout(900)

BUNDLES = (2, 0)
"""The bundle of each rank, in rank order; bundle 1 stays the caller's."""
NEW_SEED = 77
PROMPT = [7, 8, 9, 10, 11]
LENGTH = 12
TENSORS_AT_ONCE = 5
START_S = 300.0
CALL_S = 120.0
END_S = 10.0


def qwen3_moe_config() -> Any:
    """Two layers of eight experts, two of them for a token; float32."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        dtype="float32",
        architectures=["Qwen3MoeForCausalLM"],
    )


CONFIGS = {"qwen2": qwen2_config, "qwen3-moe": qwen3_moe_config}


class HostingActor:
    """A trainer's rollout actor: gets the actor handles from `launch_engine`, serves on a thread."""

    def __init__(self) -> None:
        os.environ["SGLANG_RAY_BUNDLE_INDICES"] = ",".join(map(str, BUNDLES))
        self._server_args: Any = None

    def start(self, model_path: str, pg: Any) -> tuple[str, list[Any]]:
        from sglang.srt import ray as package
        from sglang.srt.ray.http_server import launch_engine, serve_http
        from sglang.srt.server_args import ServerArgs

        assert (package.launch_engine, package.serve_http) == (launch_engine, serve_http)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server_args = self._server_args = ServerArgs(
            model_path=model_path,
            device="cpu",
            dtype="float32",
            tp_size=2,
            port=port,
            max_total_tokens=8192,
            log_level="warning",
            sleep_on_idle=True,
            enable_rdt_weight_sync=True,
        )
        engine = launch_engine(server_args, placement_group=pg)
        _, _, _, scheduler_init_result, _, _ = engine
        threading.Thread(target=serve_http, args=(engine, server_args), daemon=True).start()
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: answers_healthy(url), f"health of {url}", START_S)
        return url, scheduler_init_result.scheduler_actors

    def decided_args(self) -> dict[str, Any]:
        return self._server_args.resolved_dict()


class TrainerActor:
    """Holds a replica of each rank's shard; all it knows about the engine came over HTTP, the handles aside."""

    def __init__(self, config: Any) -> None:
        import torch

        torch.set_num_threads(1)
        self._config = config
        self._replicas: list[Any] = []

    def build_replicas(self, url: str, num_ranks: int, decided: dict[str, Any]) -> None:
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        info = get(url, "server_info").json()
        fields = set(ServerArgs.__struct_fields__)
        assert set(info) > fields, "server_info holds the fields and the scheduler's state"
        received = {name: value for name, value in info.items() if name in fields}
        server_args = ServerArgs(**received)
        started_with = ServerArgs(**decided)
        differing = {n for n in fields if getattr(server_args, n) != getattr(started_with, n)}
        assert server_args == started_with, differing
        assert server_args != ServerArgs(**received | {"tp_size": 1})
        set_global_server_args_for_scheduler(server_args)
        for rank in range(num_ranks):
            told = get(url, f"parallelism_config?rank={rank}").json()
            self._replicas.append(replica(server_args, rank, told))

    def sync(self, url: str, actors: list[Any], seed: int, *, register: bool) -> int:
        """Returns how many buckets it took."""
        state = checkpoint(seed, self._config)
        if register:
            ray.get([a.register_weight_for_rdt.remote() for a in actors], timeout=CALL_S)
        post(url, "pause_generation", {})
        post(url, "begin_weight_update", {})
        num_buckets = 0
        for buckets in zip(*(filled_buckets(r, state) for r in self._replicas), strict=True):
            pulls = []
            for actor, bucket in zip(actors, buckets, strict=True):
                refs, names = put(bucket)
                pulls.append(actor.pull_weights.remote(refs, names))
            ray.get(pulls, timeout=CALL_S)
            num_buckets += 1
        post(url, "end_weight_update", {})
        post(url, "continue_generation", {})
        return num_buckets


def replica(server_args: Any, rank: int, told: dict[str, int]) -> Any:
    """One rank's shard, built in this process without process groups, its derived weights left alone."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import ParallelismContext, RankParallelismConfig
    from sglang.srt.model_loader import get_model, loader

    config = RankParallelismConfig.from_dict(told)
    assert config.to_dict() == told
    assert (config.tp_size, config.tp_rank) == (2, rank)
    assert (config.pp_size, config.world_size, config.global_rank) == (1, 2, rank)
    assert not config.has_dp_attention
    assert not config.has_expert_parallelism
    with (
        mock.patch.object(loader, "post_load_weights") as replaced,
        ParallelismContext(config),
    ):
        model = get_model(
            model_config=ModelConfig.from_server_args(server_args),
            load_config=LoadConfig(load_format="dummy"),
            device_config=DeviceConfig("cpu"),
        )
    assert replaced.called
    return model


def checkpoint(seed: int, config: Any) -> dict[str, Any]:
    """The new weights under the names that a Hugging Face checkpoint has (in memory, experts are fused there)."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        new_model(seed, config).save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def filled_buckets(model: Any, state: dict[str, Any]) -> Iterator[list[tuple[str, Any]]]:
    """Load a few tensors at a time; yield the parameters that this completed. Fused ones span several loads."""
    from sglang.srt.model_loader.parameter_mapper import ParameterMapper

    mapper = ParameterMapper.from_model(model)
    parameters = dict(model.named_parameters())
    missing: dict[str, int] = {}
    hf_names = list(state)
    for first in range(0, len(hf_names), TENSORS_AT_ONCE):
        loaded = hf_names[first : first + TENSORS_AT_ONCE]
        model.load_weights([(name, state[name]) for name in loaded])
        complete = []
        for hf_name in loaded:
            mapped = mapper.map(hf_name)
            name = mapped.sglang_name
            missing[name] = missing.get(name, mapped.num_shards * mapped.num_local_experts) - 1
            if missing[name] == 0:
                complete.append((name, parameters[name]))
        yield complete
    assert missing == dict.fromkeys(parameters, 0)


def put(bucket: list[tuple[str, Any]]) -> tuple[list[Any], list[str]]:
    """Refs to views of one flat tensor, in two parts where there is enough, and the names over both."""
    import torch

    if not bucket:
        return [], []
    flat = torch.cat([parameter.detach().reshape(-1) for _, parameter in bucket])
    parts = flat.split([parameter.numel() for _, parameter in bucket])
    views = [part.view(p.shape) for part, (_, p) in zip(parts, bucket, strict=True)]
    half = len(views) // 2
    halves = [half_of for half_of in (views[:half], views[half:]) if half_of]
    refs = [ray.put(half_of, _tensor_transport="nixl") for half_of in halves]
    return refs, [name for name, _ in bucket]


def get(url: str, path: str) -> requests.Response:
    response = requests.get(f"{url}/{path}", timeout=CALL_S)
    response.raise_for_status()
    return response


def post(url: str, path: str, body: dict[str, Any]) -> requests.Response:
    response = requests.post(f"{url}/{path}", json=body, timeout=CALL_S)
    response.raise_for_status()
    return response


def answers_healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=10).status_code == 200
    except requests.RequestException:
        return False  # not listening yet, or busy starting


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.1)


def assert_serves(url: str, seed: int, config: Any) -> None:
    """The tokens and log-probabilities are those of Hugging Face's forward; the version label is nobody's but ours."""
    sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    meta = post(url, "generate", body).json()["meta_info"]
    scored = meta["output_token_logprobs"]
    expected = greedy(new_model(seed, config), PROMPT, LENGTH)
    assert [token for _, token, *_ in scored] == expected.tokens
    gaps = [abs(a - b) for (a, *_), b in zip(scored, expected.logprobs, strict=True)]
    assert max(gaps) < GAP
    assert meta["weight_version"] == "default"


def weight_state(url: str) -> tuple[str, str, bool | None]:
    told = get(url, "weight_sync").json()
    return told["state"], told["version"], told["verified"]


def free_cpus(pg: Any) -> list[float]:
    """Of each bundle."""
    free = ray.available_resources()
    return [free.get(f"CPU_group_{bundle}_{pg.id.hex()}", 0) for bundle in range(3)]


def pid_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=CALL_S)


@pytest.fixture(scope="module")
def placement_group() -> Iterator[Any]:
    """The caller's own group, in a Ray of its own: one CPU in each of three bundles."""
    with local_ray(num_cpus=3):
        pg = ray.util.placement_group([{"CPU": 1}] * 3)
        assert pg.wait(60), "no three CPUs were free"
        yield pg
        ray.util.remove_placement_group(pg)


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> Any:
    return CONFIGS[request.param]()


def test_an_existing_trainer_launches_pulls_and_gets_the_new_policy(
    placement_group: Any, config: Any, tmp_path: Path
):
    from sglang.srt.ray import get_scheduler_actor_name

    model_path = write_model(tmp_path / "model", config=config)
    host = ray.remote(num_cpus=0)(HostingActor).remote()
    trainer_class = ray.remote(num_cpus=0, enable_tensor_transport=True)(TrainerActor)
    trainer = trainer_class.remote(config)
    try:
        url, actors = ray.get(host.start.remote(str(model_path), placement_group), timeout=START_S)
        assert len(actors) == 2
        wait_for(lambda: free_cpus(placement_group) == [0, 1, 0], "the ranks' bundles", CALL_S)
        pids = [pid_of(actor) for actor in actors]
        for tp_rank, bundle in enumerate(BUNDLES):
            name = get_scheduler_actor_name(
                placement_group,
                node_ip=ray.util.get_node_ip_address(),
                dp_rank=0,
                pp_rank=0,
                tp_rank=tp_rank,
                bundle_index=bundle,
            )
            assert pid_of(ray.get_actor(name)) == pids[tp_rank]
        assert_serves(url, ENGINE_SEED, config)
        assert weight_state(url) == ("SERVING", "default", None)

        decided = ray.get(host.decided_args.remote(), timeout=CALL_S)
        ray.get(trainer.build_replicas.remote(url, len(actors), decided), timeout=START_S)
        for seed, register in ((NEW_SEED, True), (NEW_SEED + 1, False)):
            synced = trainer.sync.remote(url, actors, seed, register=register)
            assert ray.get(synced, timeout=START_S) > 3
            assert_serves(url, seed, config)
            assert weight_state(url) == ("SERVING", "default", False)

        ranks = [psutil.Process(pid) for pid in pids]
        killed = time.monotonic()
        ray.kill(host)
        _, alive = psutil.wait_procs(ranks, timeout=END_S)
        assert not alive, "the hosting actor's death leaves its schedulers running"
        left_s = max(killed + END_S - time.monotonic(), 0)
        wait_for(lambda: free_cpus(placement_group) == [1, 1, 1], "the group's CPUs", left_s)
    finally:
        ray.kill(host)
        ray.kill(trainer)
