"""The demo's arithmetic and order, with fakes: reward, update, proof of arrival, the model."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest
import torch
from learning import (
    WeightsNotArrivedError,
    check_arrival,
    group_advantages,
    policy_gradient_loss,
)
from local_engine import LocalEngine, LocalPublisher
from loop import TrainingLoop
from records import GAP_TOLERANCE, RolloutBatch
from report import LiveReport
from rich.console import Console
from rollout import BatchShape, TokenClass, parse_answers, random_prompts
from tiny_model import MODEL_SIZES, VOCAB_SIZE, ModelSize, new_policy, write_model
from trainer import PolicyTrainer, TrainerConfig

SHAPE = BatchShape(num_prompts=2, samples_per_prompt=4, prompt_tokens=3, new_tokens=4)
SMALLEST = ModelSize(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, learning_rate=1e-2)


def make_batch(**changes: object) -> RolloutBatch:
    fields = {
        "prompts": ((3, 4), (3, 4)),
        "tokens": ((5, 13, 6), (5, 8, 9)),
        "logprobs": ((-1.0, -2.0, -3.0), (-1.0, -2.0, -3.0)),
        "weight_versions": ("7", "7"),
        "samples_per_prompt": 2,
        "seconds": 0.5,
    }
    return RolloutBatch(**(fields | changes))


# Reward and batches


def test_reward_is_the_share_of_tokens_in_the_class():
    assert TokenClass(modulus=8, remainder=5).rewards(make_batch()) == (2 / 3, 1 / 3)


def test_chance_is_one_in_eight_and_no_special_token_is_rewarded():
    assert TokenClass().chance(vocab_size=VOCAB_SIZE) == 1 / 8
    assert not any(special in TokenClass() for special in range(3))


def test_prompts_are_different_ordinary_and_repeatable():
    draws = [
        random_prompts(random.Random(1), SHAPE, vocab_size=VOCAB_SIZE, num_special=3)
        for _ in range(2)
    ]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) == SHAPE.num_prompts
    assert all(3 <= token < VOCAB_SIZE for prompt in draws[0] for token in prompt)


def test_answers_become_a_batch_in_order():
    answers = [
        {"meta_info": {"output_token_logprobs": [[-0.5, 5, None]], "weight_version": "1"}},
        {"meta_info": {"output_token_logprobs": [[-0.25, 6, None]], "weight_version": "2"}},
    ]
    batch = parse_answers([[3], [4]], answers, 1, seconds=2.0)
    assert batch.tokens == ((5,), (6,))
    assert batch.logprobs == ((-0.5,), (-0.25,))
    assert batch.weight_versions == ("1", "2")
    assert batch.tokens_per_second == 1.0


def test_a_batch_with_a_sequence_cut_short_is_refused():
    with pytest.raises(ValueError, match="did the engine stop early"):
        make_batch(tokens=((5, 13, 6), (5, 8)), logprobs=((-1.0, -2.0, -3.0), (-1.0, -2.0)))


def test_a_batch_that_lacks_a_version_is_refused():
    with pytest.raises(ValueError, match=r"\[2, 2, 2, 1\]"):
        make_batch(weight_versions=("7",))


# Learning


def test_loss_gradient_raises_better_than_average_sequences():
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    advantages = group_advantages([1.0, 0.0], samples_per_prompt=2)
    policy_gradient_loss(logprobs, advantages).backward()
    descent = -logprobs.grad
    assert (descent[0] > 0).all()
    assert (descent[1] < 0).all()


def test_advantages_compare_samples_of_one_prompt_only():
    advantages = group_advantages([0.0, 0.2, 0.8, 1.0], samples_per_prompt=2)
    assert advantages[1] > 0 > advantages[2]


def test_equal_rewards_teach_nothing():
    assert (group_advantages([1.0] * 4, samples_per_prompt=2) == 0).all()


# Proof of arrival


def test_a_gap_within_tolerance_of_the_right_version_passes():
    check_arrival(make_batch(), gap=GAP_TOLERANCE / 2, version="7")


@pytest.mark.parametrize("gap", [2 * GAP_TOLERANCE, math.inf, math.nan])
def test_a_gap_beyond_tolerance_raises(gap: float):
    with pytest.raises(WeightsNotArrivedError, match="does not hold the trainer's weights"):
        check_arrival(make_batch(), gap=gap, version="7")


def test_samples_of_another_version_raise_with_both_names():
    with pytest.raises(WeightsNotArrivedError, match=r"version '8', .* samples of \['7'\]"):
        check_arrival(make_batch(), gap=0.0, version="8")


def make_loop(
    *, lose: frozenset[str] = frozenset(), engine_seed: int = 1, size: ModelSize = SMALLEST
) -> tuple[TrainingLoop, LocalPublisher]:
    engine = LocalEngine(new_policy(size, seed=engine_seed), SHAPE)
    publisher = LocalPublisher(engine, lose=lose)
    trainer = PolicyTrainer(TrainerConfig(size=size, seed=0, device="cpu", num_threads=1))
    trainer.attach(publisher)
    loop = TrainingLoop(
        rollout=engine,
        trainer=trainer,
        listener=LiveReport(Console(quiet=True), num_steps=3),
        shape=SHAPE,
        rewarded=TokenClass(),
        seed=0,
    )
    return loop, publisher


def test_the_loop_proves_every_sync_and_ends_with_an_evaluation():
    loop, _ = make_loop()
    loop.run(3)
    progress = loop.progress
    assert progress.control_gap > 100 * GAP_TOLERANCE
    assert [step.sync.version for step in progress.steps] == ["1", "2", "3"]
    assert all(step.update.gap < GAP_TOLERANCE < step.update.shift for step in progress.steps)
    assert progress.evaluation.engine_version == "4"
    assert progress.evaluation.gap < GAP_TOLERANCE


def test_one_tensor_that_stays_behind_stops_the_loop_before_it_learns():
    loop, _ = make_loop(lose=frozenset({"model.layers.0.mlp.down_proj.weight"}))
    with pytest.raises(WeightsNotArrivedError, match="version '1'"):
        loop.run(3)
    assert loop.progress.steps == []


def test_a_control_without_a_gap_is_an_error():
    loop, _ = make_loop(engine_seed=0)
    with pytest.raises(RuntimeError, match="the control failed"):
        loop.run(1)


def test_a_trainer_that_never_synced_refuses_to_verify():
    trainer = PolicyTrainer(TrainerConfig(size=SMALLEST, seed=0, device="cpu", num_threads=1))
    with pytest.raises(RuntimeError, match=r"call sync\(\) first"):
        trainer.verify(make_batch())
    with pytest.raises(RuntimeError, match=r"call connect\(\) first"):
        trainer.sync("1")


# Model


def test_the_written_model_loads_and_differs_from_the_policy_of_another_seed(tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_model(tmp_path, size=SMALLEST, seed=1)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == VOCAB_SIZE
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    same, other = (new_policy(SMALLEST, seed=seed).state_dict() for seed in (1, 2))
    assert all(torch.equal(loaded[name], same[name]) for name in same)
    assert not torch.equal(loaded["lm_head.weight"], other["lm_head.weight"])


def test_a_size_whose_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="must divide"):
        dataclasses.replace(MODEL_SIZES["tiny"], num_heads=3)
