"""The trainer actor: a float32 transformers policy under AdamW that publishes its own weights.

It refuses to learn from a batch before it has proved, with its own forward, that the engine
sampled it from the weights that the last sync carried.  Its weights come from its own seed, never
from the engine's checkpoint, so even the first sync has something to prove.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from learning import (
    check_arrival,
    group_advantages,
    largest_gap,
    own_logprobs,
    policy_gradient_loss,
)
from records import RolloutBatch, SyncRecord, UpdateRecord
from tiny_model import ModelSize, new_policy

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from sglang.srt.ray.weight_sync import SyncReport


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    size: ModelSize
    seed: int
    device: str
    max_grad_norm: float = 1.0
    num_threads: int = 1
    """A second OpenMP thread spins while waiting: on a busy machine it costs more than it gives."""


class Publisher(Protocol):
    """What the trainer needs of a ``WeightPublisher``."""

    def sync(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, version: str, pause: str
    ) -> SyncReport: ...

    def close(self) -> None: ...


class PolicyTrainer:
    """Runs in its own Ray actor; the driver calls one method at a time and waits for each."""

    def __init__(self, config: TrainerConfig) -> None:
        torch.set_num_threads(config.num_threads)
        self._config = config
        self._model = new_policy(config.size, seed=config.seed).to(config.device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=config.size.learning_rate)
        self._publisher: Publisher | None = None
        self._version: str | None = None

    def connect(self, url: str, scheduler_actors: Sequence[ActorHandle]) -> None:
        """Plan the transfer into the engine's ranks, once."""
        from sglang.srt.ray import HttpEngineControl, WeightPublisher

        control = HttpEngineControl(url, list(scheduler_actors))
        self.attach(WeightPublisher.connect([control]))

    def attach(self, publisher: Publisher) -> None:
        """Send weights by this publisher from now on; ``close`` will close it."""
        self._publisher = publisher

    def sync(self, version: str) -> SyncRecord:
        """Put the current weights into the engine as ``version``; raises when that failed."""
        if self._publisher is None:
            raise RuntimeError(f"cannot sync weight version {version!r}: call connect() first")
        report = self._publisher.sync(
            self._model.state_dict().items(), version=version, pause="retract"
        )
        self._version = report.version
        return SyncRecord(
            version=report.version,
            total_bytes=report.total_bytes,
            total_seconds=report.total_seconds,
            pause_seconds=report.pause_seconds,
            wire_gigabytes_per_second=report.wire_gigabytes_per_second,
            phase_seconds=dict(report.phase_seconds),
        )

    @torch.no_grad()
    def gap(self, batch: RolloutBatch) -> float:
        """The log-probability gap of any batch, without a verdict."""
        return largest_gap(own_logprobs(self._model, batch), batch)

    def verify(self, batch: RolloutBatch) -> float:
        """The gap of a batch; raises unless it was sampled from the last synced weights."""
        gap = self.gap(batch)
        check_arrival(batch, gap=gap, version=self._synced_version())
        return gap

    def learn(self, batch: RolloutBatch, rewards: Sequence[float]) -> UpdateRecord:
        """Verify the batch, then take one policy-gradient step on it."""
        started = time.perf_counter()
        logprobs = own_logprobs(self._model, batch)
        gap = largest_gap(logprobs, batch)
        check_arrival(batch, gap=gap, version=self._synced_version())
        advantages = group_advantages(rewards, samples_per_prompt=batch.samples_per_prompt)
        loss = policy_gradient_loss(logprobs, advantages)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.max_grad_norm)
        self._optimizer.step()
        shift = self._shift(logprobs, batch)
        seconds = time.perf_counter() - started
        return UpdateRecord(loss=loss.item(), gap=gap, shift=shift, seconds=seconds)

    def close(self) -> None:
        """Give back what the publisher pinned; the driver calls it after the last sync."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    @torch.no_grad()
    def _shift(self, before: torch.Tensor, batch: RolloutBatch) -> float:
        return (own_logprobs(self._model, batch) - before).abs().max().item()

    def _synced_version(self) -> str:
        if self._version is None:
            raise RuntimeError("cannot verify a batch before the first sync: call sync() first")
        return self._version
