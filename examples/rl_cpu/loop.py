"""The training loop: sync, sample, verify, learn; then one last sync and an evaluation.

It starts with a control: before the first sync the gap must be large, because the engine still
holds the weights of its own checkpoint, or a small gap later would prove nothing.  The loop knows
neither Ray nor HTTP, only a ``Rollout`` and a ``Trainer``, so its order can be tested with fakes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from records import GAP_TOLERANCE, Evaluation, RolloutBatch, StepRecord, SyncRecord, UpdateRecord
from rollout import BatchShape, Rollout, TokenClass, random_prompts
from tiny_model import SPECIAL_TOKENS, VOCAB_SIZE


class Trainer(Protocol):
    """The trainer as the driver sees it: each call blocks, and raises what the actor raised."""

    def sync(self, version: str) -> SyncRecord: ...

    def gap(self, batch: RolloutBatch) -> float: ...

    def verify(self, batch: RolloutBatch) -> float: ...

    def learn(self, batch: RolloutBatch, rewards: Sequence[float]) -> UpdateRecord: ...


class Listener(Protocol):
    """Told of each finished step, on the driver's main thread."""

    def note(self, text: str) -> None: ...

    def add(self, record: StepRecord) -> None: ...


@dataclass(kw_only=True)
class Progress:
    """What the loop has reached; filled as it goes, so that an interrupted run keeps it."""

    control_gap: float | None = None
    steps: list[StepRecord] = field(default_factory=list)
    evaluation: Evaluation | None = None


class TrainingLoop:
    """One run over a ready engine and a connected trainer."""

    def __init__(
        self,
        *,
        rollout: Rollout,
        trainer: Trainer,
        listener: Listener,
        shape: BatchShape,
        rewarded: TokenClass,
        seed: int,
    ) -> None:
        self._rollout = rollout
        self._trainer = trainer
        self._listener = listener
        self._shape = shape
        self._rewarded = rewarded
        self._draw = random.Random(seed)
        self.progress = Progress()

    def run(self, num_steps: int) -> None:
        self._control()
        for step in range(1, num_steps + 1):
            record = self._step(step)
            self.progress.steps.append(record)
            self._listener.add(record)
        self.progress.evaluation = self._evaluate(version=str(num_steps + 1))

    def _control(self) -> None:
        gap = self._trainer.gap(self._sample())
        if gap <= GAP_TOLERANCE:
            raise RuntimeError(
                f"the control failed: before any sync the gap is {gap!r}, within the tolerance "
                f"{GAP_TOLERANCE!r}, so the engine already holds the trainer's weights and the gap "
                f"would prove nothing; the two must start from different seeds"
            )
        self.progress.control_gap = gap
        self._listener.note(f"control: gap before the first sync {gap:.2f} (large, as it must be)")

    def _step(self, step: int) -> StepRecord:
        started = time.perf_counter()
        sync = self._trainer.sync(str(step))
        batch = self._sample()
        rewards = self._rewarded.rewards(batch)
        update = self._trainer.learn(batch, rewards)
        return StepRecord(
            step=step,
            reward=fmean(rewards),
            tokens_per_second=batch.tokens_per_second,
            sync=sync,
            update=update,
            engine_version=batch.weight_versions[0],
            seconds=time.perf_counter() - started,
        )

    def _evaluate(self, *, version: str) -> Evaluation:
        sync = self._trainer.sync(version)
        batch = self._sample()
        gap = self._trainer.verify(batch)
        return Evaluation(
            reward=fmean(self._rewarded.rewards(batch)),
            gap=gap,
            engine_version=batch.weight_versions[0],
            sync=sync,
        )

    def _sample(self) -> RolloutBatch:
        prompts = random_prompts(
            self._draw, self._shape, vocab_size=VOCAB_SIZE, num_special=len(SPECIAL_TOKENS)
        )
        return self._rollout.generate(prompts)
