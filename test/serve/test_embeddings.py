"""Embeddings through the application: those of Hugging Face's last hidden state, over a weight sync too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from support.local_ray import local_ray
from support.models import ENGINE_SEED, new_model
from support.serve_app import MODEL, ServedApp, llm_config, running_app
from support.trainer import start_serve_trainer

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7, 8], [100, 101, 102]]


@pytest.fixture(scope="module")
def app(tiny_model: Path) -> Iterator[ServedApp]:
    config = llm_config(tiny_model, replicas=1, engine={"is_embedding": True})
    with local_ray(num_cpus=3), running_app(config) as running:
        running.wait_for_replicas(1)
        yield running


def assert_embeds(app: ServedApp, seed: int) -> None:
    answer = app.openai().embeddings.create(model=MODEL, input=PROMPTS, encoding_format="float")
    model = new_model(seed).model
    for prompt, given in zip(PROMPTS, answer.data, strict=True):
        with torch.no_grad():
            last = model(torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(last, dim=0)
        assert torch.allclose(torch.tensor(given.embedding), expected, atol=1e-5)


def test_embeddings_are_the_models_before_and_after_a_sync(app: ServedApp) -> None:
    assert_embeds(app, ENGINE_SEED)
    trainer: Any = start_serve_trainer()
    ray.get(trainer.connect_serve.remote(app.name, MODEL), timeout=120)
    ray.get(trainer.sync.remote(3, "3"), timeout=120)
    assert_embeds(app, 3)
    ray.kill(trainer)
