"""The arithmetic of one update: the policy's own log-probabilities, the gap, the GRPO loss.

One forward serves two ends: it proves that the engine sampled from exactly these weights
(``check_arrival``), and it carries the gradient.  A batch has one update, so the policy that
sampled is the policy that learns, and the loss needs neither an importance ratio nor clipping.
Pure functions; the actor around them is in ``trainer.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from records import GAP_TOLERANCE, RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STD_FLOOR = 1e-2
"""Keeps the advantages of a group finite whose sequences all earned the same."""


class WeightsNotArrivedError(RuntimeError):
    """The engine sampled from other weights than the trainer's; never learn from such a batch."""


def own_logprobs(model: PreTrainedModel, batch: RolloutBatch) -> torch.Tensor:
    """The model's own log-probability of each sampled token [sequence, token], with gradient."""
    prompts = torch.tensor(batch.prompts, device=model.device)
    tokens = torch.tensor(batch.tokens, device=model.device)
    logits = model(torch.cat([prompts, tokens], dim=1)).logits
    of_vocabulary = logits[:, prompts.shape[1] - 1 : -1].float().log_softmax(dim=-1)
    return of_vocabulary.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def largest_gap(own: torch.Tensor, batch: RolloutBatch) -> float:
    """Largest |engine's log-probability - own| over all sampled tokens; NaN if any of them is."""
    engine = torch.tensor(batch.logprobs, dtype=own.dtype, device=own.device)
    return (own.detach() - engine).abs().max().item()


def check_arrival(batch: RolloutBatch, *, gap: float, version: str) -> None:
    """Raise unless all samples carry the published version and the gap is that of equal weights.

    The gap sees what moves the output of these samples; that every single byte arrived is for the
    digests of the sync to say.
    """
    strangers = sorted({reported for reported in batch.weight_versions if reported != version})
    if strangers:
        raise WeightsNotArrivedError(
            f"the trainer published weight version {version!r}, but the engine reports samples of "
            f"{strangers!r}; was the engine given weights by somebody else?"
        )
    if not gap <= GAP_TOLERANCE:  # written so that NaN fails too
        raise WeightsNotArrivedError(
            f"under weight version {version!r} the engine's log-probabilities differ from the "
            f"trainer's own forward by {gap!r}, more than {GAP_TOLERANCE!r}: the engine does not "
            f"hold the trainer's weights; look for a failed or partial sync in the engine's log"
        )


def group_advantages(rewards: Sequence[float], *, samples_per_prompt: int) -> torch.Tensor:
    """Each sequence's reward against the other samples of its prompt, in standard deviations."""
    groups = torch.tensor(rewards, dtype=torch.float32).view(-1, samples_per_prompt)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + STD_FLOOR)).flatten()


def policy_gradient_loss(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Falls when the tokens of better-than-average sequences become more likely."""
    return -(advantages.to(logprobs.device).unsqueeze(-1) * logprobs).mean()
