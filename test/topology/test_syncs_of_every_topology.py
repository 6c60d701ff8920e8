"""A publisher's sync and a load through the engine's loader, into every topology.

Afterwards each replica serves what Hugging Face computes with those weights. The grid of `test_topology_grid.py` serves
only what was on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support.engine import RunningEngine, running_engine
from support.local_ray import local_ray
from support.models import new_model, write_model
from support.oracle import assert_serves
from support.trainer import start_trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [[5, 17, 300, 22], [100, 101, 102, 103, 104, 105, 7]]
WAIT_S = 180.0
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "pp2": {"pp_size": 2},
    "dp2": {"dp_size": 2},
    "dp2-attention": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "tp2-pp2": {"tp_size": 2, "pp_size": 2},
    "tp2-dp2": {"tp_size": 2, "dp_size": 2},
    "dp2-pp2": {"dp_size": 2, "pp_size": 2},
    "tp4-dp2-attention": {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True},
    "moe-ep2": {"tp_size": 2, "ep_size": 2},
    "moe-tp2-dp2": {"tp_size": 2, "dp_size": 2},
}
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def dense_config() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**SMALL, architectures=["Qwen3ForCausalLM"])


def moe_config() -> Any:
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeConfig(
        **SMALL,
        **experts,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    )


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(num_cpus=5):
        yield


def assert_every_replica_serves(
    engine: RunningEngine, model: Any, version: str, replicas: int
) -> None:
    for replica in range(replicas):
        where = {"routed_dp_rank": replica} if replicas > 1 else {}
        for prompt in PROMPTS:
            answer = engine.generate(prompt, 8, **where)
            assert answer.version == version
            assert_serves(model, prompt, answer)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_sync_and_a_load_reach_every_rank(tmp_path: Path, name: str) -> None:
    topology = TOPOLOGIES[name]
    config = moe_config() if name.startswith("moe") else dense_config()
    write_model(tmp_path, config=config)
    replicas = topology.get("dp_size", 1)
    trainer = start_trainer(config)
    with running_engine(tmp_path, **topology) as engine:
        controls = [(engine.url, engine.actors, name)]
        ray.get(trainer.connect.remote(controls), timeout=WAIT_S)
        report = ray.get(trainer.sync.remote(1, "1"), timeout=WAIT_S)
        assert report.verified
        assert len(report.ranks[name]) == len(engine.actors)
        assert_every_replica_serves(engine, new_model(1, config), "1", replicas)
        loaded = ray.get(trainer.load_through_loaders.remote(controls, 2, "2"), timeout=WAIT_S)
        assert loaded.verified
        assert_every_replica_serves(engine, new_model(2, config), "2", replicas)
    ray.kill(trainer)


def test_engines_of_different_tensor_parallel_sizes_are_one_fleet(tmp_path: Path) -> None:
    config = dense_config()
    write_model(tmp_path, config=config)
    trainer = start_trainer(config)
    with running_engine(tmp_path) as one, running_engine(tmp_path, tp_size=2) as two:
        controls = [(one.url, one.actors, "one"), (two.url, two.actors, "two")]
        ray.get(trainer.connect.remote(controls), timeout=WAIT_S)
        for staging in ("direct", "shadow"):
            seed = 1 + (staging == "shadow")
            call = trainer.sync.remote(seed, str(seed), staging=staging)
            report = ray.get(call, timeout=WAIT_S)
            assert {engine: len(ranks) for engine, ranks in report.ranks.items()} == {
                "one": 1,
                "two": 2,
            }
            for engine in (one, two):
                assert_every_replica_serves(engine, new_model(seed, config), str(seed), 1)
    ray.kill(trainer)
