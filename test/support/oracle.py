"""What an engine must answer, computed by Hugging Face's own forward.

The engine's float32 log-probabilities agree with these to about 1e-6, so a gap of 1e-5 already means that some weight
is not the one that was sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

GAP = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What one request got: the new tokens, their log-probabilities, and who answered."""

    tokens: list[int]
    logprobs: list[float]
    version: str = ""
    finish: str = ""
    cached: int = 0
    """Prompt tokens that came from the prefix cache."""
    replica: str = ""
    """Which replica of a Serve application answered."""
    spans: tuple[str, ...] = ()
    """The versions that made its tokens, in order."""

    @classmethod
    def of_answer(cls, answer: Mapping[str, Any]) -> Generation:
        """What the engine answered to a `scored_request`, over HTTP or in the process."""
        meta = answer["meta_info"]
        scored = meta["output_token_logprobs"]
        return cls(
            tokens=[int(token) for _, token, *_ in scored],
            logprobs=[float(logprob) for logprob, *_ in scored],
            version=meta["weight_version"],
            finish=meta["finish_reason"]["type"],
            cached=meta["cached_tokens"],
            spans=tuple(span["version"] for span in meta.get("weight_versions") or ()),
        )


def scored_request(
    prompt: Sequence[int], length: int, *, temperature: float = 0.0
) -> dict[str, Any]:
    """A request for exactly `length` tokens (unless it is aborted) with their log-probabilities."""
    sampling = {"max_new_tokens": length, "temperature": temperature, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}


def greedy(model: Any, prompt: Sequence[int], length: int) -> Generation:
    """The most likely next tokens, one after the other, each from a full forward without a cache."""
    import torch

    ids, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(length):
            scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            token = int(scores.argmax())
            ids.append(token)
            logprobs.append(float(scores[token]))
    return Generation(tokens=ids[len(prompt) :], logprobs=logprobs)


def logprobs_of(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Log-probability of each of the tokens that follow the prompt."""
    import torch

    with torch.no_grad():
        scores = model(torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)
    return [float(scores[len(prompt) + i - 1, token]) for i, token in enumerate(tokens)]


def gap(model: Any, prompt: Sequence[int], answer: Generation) -> float:
    """The largest difference between the engine's log-probabilities and the model's, on the engine's tokens."""
    expected = logprobs_of(model, prompt, answer.tokens)
    return max(abs(a - b) for a, b in zip(expected, answer.logprobs, strict=True))


def assert_serves(model: Any, prompt: Sequence[int], answer: Generation) -> None:
    """The engine's greedy answer is what these weights give: same tokens, same log-probabilities."""
    expected = greedy(model, prompt, len(answer.tokens))
    assert answer.tokens == expected.tokens, (answer, expected)
    assert gap(model, prompt, answer) < GAP, (answer, expected)
