"""The sampling side: prompts, the engine's HTTP ``/generate``, and the reward.

Sampling is plain (temperature 1, no top-p, no top-k, no penalties), so the log-probability that the
engine returns is the log-softmax of its logits, and the trainer can compare it with its own forward
to the last digits.  The reward is a rule on token ids that chance meets one time in eight; nothing
in the prompts or the sampler helps to meet it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import requests
from records import RolloutBatch

PLAIN_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "ignore_eos": True,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """How much is sampled in a step."""

    num_prompts: int = 8
    samples_per_prompt: int = 8
    prompt_tokens: int = 8
    new_tokens: int = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenClass:
    """The rewarded tokens: those whose id leaves ``remainder`` when divided by ``modulus``."""

    modulus: int = 8
    remainder: int = 5

    def __contains__(self, token: int) -> bool:
        return token % self.modulus == self.remainder

    def chance(self, *, vocab_size: int) -> float:
        """The reward of a policy that samples every token of the vocabulary alike."""
        return sum(token in self for token in range(vocab_size)) / vocab_size

    def rewards(self, batch: RolloutBatch) -> tuple[float, ...]:
        """For each sequence the share of its sampled tokens that are of the class: 0 to 1."""
        return tuple(sum(token in self for token in row) / len(row) for row in batch.tokens)


class Rollout(Protocol):
    """Samples from the current policy; the driver calls it once a step, never concurrently."""

    def generate(self, prompts: Sequence[Sequence[int]]) -> RolloutBatch: ...


def random_prompts(
    draw: random.Random, shape: BatchShape, *, vocab_size: int, num_special: int
) -> tuple[tuple[int, ...], ...]:
    """Different random prompts of ordinary tokens."""
    ordinary = range(num_special, vocab_size)
    return tuple(
        tuple(draw.choices(ordinary, k=shape.prompt_tokens)) for _ in range(shape.num_prompts)
    )


class HttpRollout:
    """A ``Rollout`` over an engine's HTTP ``/generate``: one request a step holds every sequence.

    A context manager that owns its connection.
    """

    def __init__(self, url: str, shape: BatchShape, *, timeout_seconds: float = 120.0) -> None:
        self._url = url
        self._shape = shape
        self._timeout_seconds = timeout_seconds
        self._session = requests.Session()
        self._session.trust_env = False  # the user's HTTP proxy must not see loopback traffic

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._session.close()

    def generate(self, prompts: Sequence[Sequence[int]]) -> RolloutBatch:
        sequences = [list(p) for p in prompts for _ in range(self._shape.samples_per_prompt)]
        body = {
            "input_ids": sequences,
            "sampling_params": {**PLAIN_SAMPLING, "max_new_tokens": self._shape.new_tokens},
            "return_logprob": True,
        }
        started = time.perf_counter()
        answers = self._post(body)
        seconds = time.perf_counter() - started
        return parse_answers(sequences, answers, self._shape.samples_per_prompt, seconds=seconds)

    def _post(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        url = f"{self._url}/generate"
        try:
            response = self._session.post(url, json=body, timeout=self._timeout_seconds)
        except requests.RequestException as e:
            raise RuntimeError(
                f"no rollouts: {url!r} gave no answer within {self._timeout_seconds!r} s ({e!r}); "
                f"see the engine's log"
            ) from e
        if response.status_code != requests.codes.ok:
            raise RuntimeError(
                f"no rollouts: {url!r} answered with status {response.status_code!r} and "
                f"{response.text[:2000]!r}; see the engine's log"
            )
        return response.json()


def parse_answers(
    sequences: Sequence[Sequence[int]],
    answers: Sequence[dict[str, Any]],
    samples_per_prompt: int,
    *,
    seconds: float,
) -> RolloutBatch:
    """Turn ``/generate``'s answers into a batch, which checks that nothing is missing."""
    metas = [answer["meta_info"] for answer in answers]
    rows = [meta["output_token_logprobs"] for meta in metas]
    return RolloutBatch(
        prompts=tuple(tuple(sequence) for sequence in sequences),
        tokens=tuple(tuple(entry[1] for entry in row) for row in rows),
        logprobs=tuple(tuple(entry[0] for entry in row) for row in rows),
        weight_versions=tuple(meta["weight_version"] for meta in metas),
        samples_per_prompt=samples_per_prompt,
        seconds=seconds,
    )
