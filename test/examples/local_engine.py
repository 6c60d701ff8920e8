"""An engine and a publisher of plain transformers, for tests of the demo without Ray or sglang."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from records import RolloutBatch
from rollout import BatchShape
from transformers import PreTrainedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeReport:
    version: str
    total_bytes: int
    phase_seconds: dict[str, float]
    total_seconds: float = 0.03
    pause_seconds: float = 0.02
    wire_gigabytes_per_second: float = 1.5


class LocalEngine:
    """A `Rollout` over its own copy of the model, labelled as an engine would be."""

    def __init__(self, model: PreTrainedModel, shape: BatchShape) -> None:
        self.model = model
        self.version = "default"
        self._shape = shape
        self._generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]]) -> RolloutBatch:
        group = self._shape.samples_per_prompt
        current = torch.tensor(prompts).repeat_interleave(group, dim=0)
        prompts = tuple(map(tuple, current.tolist()))
        cache, tokens, logprobs = None, [], []
        for _ in range(self._shape.new_tokens):
            answer = self.model(current, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            of_vocabulary = answer.logits[:, -1].log_softmax(-1)
            current = torch.multinomial(of_vocabulary.exp(), 1, generator=self._generator)
            tokens.append(current)
            logprobs.append(of_vocabulary.gather(-1, current))
        return RolloutBatch(
            prompts=prompts,
            tokens=tuple(map(tuple, torch.cat(tokens, 1).tolist())),
            logprobs=tuple(map(tuple, torch.cat(logprobs, 1).tolist())),
            weight_versions=(self.version,) * len(prompts),
            samples_per_prompt=group,
            seconds=0.1,
        )


class LocalPublisher:
    """Copies weights into a `LocalEngine`; `lose` names tensors that silently stay behind."""

    def __init__(self, engine: LocalEngine, *, lose: frozenset[str] = frozenset()) -> None:
        self._engine = engine
        self._lose = lose
        self.closed = False

    def sync(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, version: str, pause: str
    ) -> FakeReport:
        sent = dict(named_tensors)
        kept = {name: tensor for name, tensor in sent.items() if name not in self._lose}
        self._engine.model.load_state_dict(kept, strict=False)
        self._engine.version = version
        return FakeReport(
            version=version,
            total_bytes=sum(tensor.nbytes for tensor in sent.values()),
            phase_seconds={"pause": 0.001, "wire": 0.02, "verify": 0.004},
        )

    def close(self) -> None:
        self.closed = True
