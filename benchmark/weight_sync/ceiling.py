"""What the machine gives at best: one thread's copy of the same bytes, and their digest."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class Ceiling:
    """Copies between two touched buffers of the model's size; `measure` is called between the syncs of a run."""

    def __init__(self, num_bytes: int, device: str) -> None:
        from sglang.srt.ray.weight_sync import transports

        self._device = device
        self._source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        self._target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        for buffer in (self._source, self._target):
            transports.pin(buffer)

    def measure(self) -> dict[str, float]:
        """Seconds of one copy and of one digest, in this thread."""
        from sglang.srt.ray.weight_sync.digest import algorithm_for, tensor_digest

        algorithm = algorithm_for([self._device])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return {
                "copy": self._seconds(lambda: self._target.copy_(self._source)),
                "digest": self._seconds(lambda: tensor_digest(self._source, algorithm)),
            }
        finally:
            torch.set_num_threads(threads)

    def _seconds(self, call: Callable[[], object]) -> float:
        self._settle()
        started = time.perf_counter()
        call()
        self._settle()
        return time.perf_counter() - started

    def _settle(self) -> None:
        if self._device != "cpu":
            torch.get_device_module(self._device).synchronize()
