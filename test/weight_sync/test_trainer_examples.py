"""The trainers of `examples/trainers`, into a live engine: afterwards it computes what Hugging Face computes."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from support.engine import RunningEngine, free_port
from support.models import new_model, qwen2_config
from support.oracle import assert_serves

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "trainers"
sys.path.insert(0, str(EXAMPLES))
PROMPT, TOKENS = [5, 6, 7, 8, 9], [[3, 1, 4, 1, 5, 9, 2, 6]]
WAIT_S = 180
MAX_LINES = 60


@contextlib.contextmanager
def ended(*actors: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for actor in actors:
            ray.kill(actor)


def by_value(actor_class: Any) -> Any:
    """Ray's workers can't import the examples folder, so the class travels whole."""
    module = sys.modules[actor_class.__ray_metadata__.modified_class.__module__]
    ray.cloudpickle.register_pickle_by_value(module)
    return actor_class


def model_of(state: dict[str, torch.Tensor]) -> Any:
    model = new_model(0)
    model.load_state_dict(state)
    return model


def address() -> str:
    return f"tcp://{socket.gethostbyname('localhost')}:{free_port()}"


def test_plain_pytorch(shared_engine: RunningEngine, tiny_model: Path) -> None:
    from plain_pytorch import Trainer

    fleet = [(shared_engine.url, shared_engine.actors)]
    trainer = by_value(Trainer).remote(str(tiny_model), fleet)
    with ended(trainer):
        for version in ("plain-1", "plain-2"):
            report = ray.get(trainer.step.remote(TOKENS, version), timeout=WAIT_S)
            assert (report.version, report.verified) == (version, True)
        trained = model_of(ray.get(trainer.state.remote(), timeout=WAIT_S))
        ray.get(trainer.close.remote(), timeout=WAIT_S)
    answer = shared_engine.generate(PROMPT, 8)
    assert answer.version == "plain-2"
    assert_serves(trained, PROMPT, answer)


def test_fsdp_rows(shared_engine: RunningEngine, tiny_model: Path) -> None:
    """The oracle trains the same two steps unsharded."""
    from fsdp_rows import ShardedTrainer

    fleet, meeting = [(shared_engine.url, shared_engine.actors)], address()
    actor_class = by_value(ShardedTrainer)
    trainers = [actor_class.remote(r, 2, meeting, str(tiny_model), fleet) for r in range(2)]
    with ended(*trainers):
        rows = ray.get([trainer.local_rows.remote() for trainer in trainers], timeout=WAIT_S)
        for version in ("fsdp-1", "fsdp-2"):
            steps = [trainer.step.remote(TOKENS, version) for trainer in trainers]
            report, nothing = ray.get(steps, timeout=WAIT_S)
            assert (report.version, report.verified, nothing) == (version, True, None)
        ray.get([trainer.close.remote() for trainer in trainers], timeout=WAIT_S)

    oracle = new_model(0).train(False)
    optimizer = torch.optim.AdamW(oracle.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        oracle(torch.tensor(TOKENS), labels=torch.tensor(TOKENS)).loss.backward()
        optimizer.step()
    whole = {name: tensor.shape[0] for name, tensor in oracle.state_dict().items()}
    assert {name: rows[0][name] + rows[1][name] for name in whole} == whole, "nothing was sharded"
    answer = shared_engine.generate(PROMPT, 8)
    assert answer.version == "fsdp-2"
    assert_serves(oracle, PROMPT, answer)


# A Hugging Face model as Megatron's ranks hold it, written from the description of the layout, head by head.


def megatron_shards(state: dict[str, torch.Tensor], config: Any, rank: int, size: int) -> Any:
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    dim, per_group = config.hidden_size // heads, heads // groups
    mine = range(rank * groups // size, (rank + 1) * groups // size)

    def cut(tensor: torch.Tensor, along: int) -> torch.Tensor:
        return tensor.chunk(size, along)[rank].contiguous()

    shards = {
        "embedding.word_embeddings.weight": cut(state["model.embed_tokens.weight"], 0),
        "output_layer.weight": cut(state["lm_head.weight"], 0),
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        for kind in ("weight", "bias"):
            q, k, v = (state[f"{theirs}.self_attn.{x}_proj.{kind}"] for x in "qkv")
            pieces = []
            for group in mine:
                for head in range(group * per_group, (group + 1) * per_group):
                    pieces.append(q[head * dim : (head + 1) * dim])
                pieces += [k[group * dim : (group + 1) * dim], v[group * dim : (group + 1) * dim]]
            shards[f"{ours}.self_attention.linear_qkv.{kind}"] = torch.cat(pieces)
        gate, up = (cut(state[f"{theirs}.mlp.{x}_proj.weight"], 0) for x in ("gate", "up"))
        shards[f"{ours}.mlp.linear_fc1.weight"] = torch.cat([gate, up])
        shards[f"{ours}.mlp.linear_fc2.weight"] = cut(state[f"{theirs}.mlp.down_proj.weight"], 1)
        shards[f"{ours}.self_attention.linear_proj.weight"] = cut(
            state[f"{theirs}.self_attn.o_proj.weight"], 1
        )
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shards[f"{ours}.{norm}.weight"] = state[f"{theirs}.{norm}.weight"]
    return shards


def hugging_face_name(name: str, part: str) -> str:
    """The names of this one model; a framework has such a table per family."""
    renamed = {
        "embedding.word_embeddings": "model.embed_tokens",
        "output_layer": "lm_head",
        "decoder.final_layernorm": "model.norm",
        "decoder.layers": "model.layers",
        "self_attention.linear_proj": "self_attn.o_proj",
        "self_attention.linear_qkv": f"self_attn.{part}",
        "mlp.linear_fc1": f"mlp.{part}",
        "mlp.linear_fc2": "mlp.down_proj",
    }
    return re.sub("|".join(map(re.escape, renamed)), lambda found: renamed[found[0]], name)


def test_megatron_tp(shared_engine: RunningEngine) -> None:
    from megatron_tp import TensorParallelTrainer

    config, source = qwen2_config(), new_model(21)
    fleet, meeting = [(shared_engine.url, shared_engine.actors)], address()
    actor_class = by_value(TensorParallelTrainer)
    trainers = [
        actor_class.remote(
            rank, 2, meeting, megatron_shards(source.state_dict(), config, rank, 2), config, fleet
        )
        for rank in range(2)
    ]
    with ended(*trainers):
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        calls = [trainer.publish.remote("tp-1", hugging_face_name) for trainer in trainers]
        report, nothing = ray.get(calls, timeout=WAIT_S)
    assert (report.version, report.verified, nothing) == ("tp-1", True, None)
    answer = shared_engine.generate(PROMPT, 8)
    assert answer.version == "tp-1"
    assert_serves(source, PROMPT, answer)


@pytest.mark.parametrize("name", ["plain_pytorch.py", "fsdp_rows.py", "megatron_tp.py"])
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < MAX_LINES
