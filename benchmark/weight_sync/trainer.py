"""The trainer's process: holds the weights, changes them, and sends them by whichever way it is told."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from .ceiling import Ceiling
from .upstream import UpstreamWays

STAGINGS = {"rdt direct": "direct", "rdt shadow": "shadow"}
UPSTREAM = {
    "upstream tensor": "tensor",
    "upstream distributed": "distributed",
    "upstream disk": "disk",
}
WAYS = (*STAGINGS, *UPSTREAM)


class Trainer:
    """A Ray actor. Every sync's version is the next number."""

    def __init__(self, model_path: str, device: str) -> None:
        from safetensors.torch import load_file

        torch.set_num_threads(1)
        # File descriptors are handed over only between processes that multiprocessing itself has forked.
        torch.multiprocessing.set_sharing_strategy("file_system")
        loaded = load_file(f"{model_path}/model.safetensors")
        self._weights = {name: tensor.clone().to(device) for name, tensor in loaded.items()}
        self._model_path = model_path
        self._version = 0
        self._ceiling = Ceiling(sum(t.nbytes for t in loaded.values()), device)

    def connect(self, engines: Sequence[tuple[str, list[Any]]], tp_size: int) -> float:
        """`engines`: URL and actor handles of each; returns the seconds that the publisher took."""
        from sglang.srt.ray import HttpEngineControl, WeightPublisher

        urls = [url for url, _ in engines]
        self._upstream = UpstreamWays(urls, self._weights, tp_size)
        self._upstream.prepare_disk(self._model_path)
        started = time.perf_counter()
        self._publisher = WeightPublisher.connect(
            [HttpEngineControl(url, actors) for url, actors in engines]
        )
        return time.perf_counter() - started

    def step(self) -> None:
        """Other values in the same memory, as an optimizer leaves them."""
        for tensor in self._weights.values():
            tensor.neg_()

    def sync(self, way: str) -> dict[str, Any]:
        """Send by `way`; seconds by phase, the whole, and when it was (`time.monotonic`)."""
        self._version += 1
        version = str(self._version)
        began, started = time.monotonic(), time.perf_counter()
        if way in STAGINGS:
            report = self._publisher.sync(
                self._weights, version=version, staging=STAGINGS[way], pause="retract"
            )
            whole = time.perf_counter() - started
            fields = json.loads(report.to_json())
            phases, verified = fields["phase_seconds"], fields["verified"]
            paused = fields["pause_seconds"]
        else:
            phases = getattr(self._upstream, UPSTREAM[way])(version)
            whole, verified = time.perf_counter() - started, False
            paused = sum(seconds for name, seconds in phases.items() if name != "save")
        return {
            "whole": whole,
            "pause": paused,
            "phases": phases,
            "verified": verified,
            "span": (began, time.monotonic()),
        }

    def ceiling(self) -> dict[str, float]:
        return self._ceiling.measure()

    def probe(self) -> dict[str, str]:
        """What upstream's weight checker must say of two tensors."""
        return {
            name: hashlib.sha256(self._bytes_of(name)).hexdigest()[:16]
            for name in ("model.norm.weight", "lm_head.weight")
        }

    def _bytes_of(self, name: str) -> bytes:
        return self._weights[name].cpu().contiguous().view(torch.uint8).numpy().tobytes()

    def close(self) -> None:
        self._publisher.close()
        self._upstream.close()
