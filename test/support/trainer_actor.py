"""A trainer for fault tests: an actor that holds a Hugging Face model, publishes it, and can be told to misbehave."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class PublishingTrainer:
    """Holds a float32 model; `perturb` gives it new weights, `sync` publishes them."""

    def __init__(self, model_path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self.publisher: Any = None

    def connect(self, engines: list[tuple[str, list[Any]]], **options: Any) -> str:
        from sglang.srt.ray import HttpEngineControl, WeightPublisher

        controls = [HttpEngineControl(url, actors) for url, actors in engines]
        self.publisher = WeightPublisher.connect(controls, **options)
        return str(self.publisher.owner)

    def perturb(self, seed: int, scale: float = 0.02) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)

    def sync(self, version: str, **options: Any) -> Any:
        return self.publisher.sync(self.model.state_dict(), version=version, **options)

    def sync_some(self, version: str, names: list[str], **options: Any) -> Any:
        state = self.model.state_dict()
        return self.publisher.sync(
            {name: state[name] for name in names}, version=version, **options
        )

    def greedy(self, prompt: list[int], length: int) -> list[int]:
        """What Hugging Face's own greedy generation gives: the oracle."""
        import torch

        with torch.no_grad():
            out = self.model.generate(
                torch.tensor([prompt]),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
            )
        return out[0, len(prompt) :].tolist()

    def logprobs(self, prompt: list[int], tokens: list[int]) -> list[float]:
        import torch

        with torch.no_grad():
            scores = self.model(torch.tensor([prompt + tokens])).logits.log_softmax(-1)[0]
        return [scores[len(prompt) - 1 + i, token].item() for i, token in enumerate(tokens)]

    def save(self, path: Path) -> None:
        self.model.save_pretrained(path)

    def run(self, function: Any, *arguments: Any) -> Any:
        """Call `function(self, *arguments)` here."""
        return function(self, *arguments)

    def pid(self) -> int:
        return os.getpid()
