"""What crosses a boundary of the demo: batches, syncs, updates and steps, as frozen records.

Every record is plain Python (numbers, strings, tuples), so the driver unpickles one without
importing torch or sglang, and ``summary.json`` is these records as they are.  The classes hold
no logic beyond their own checks.
"""

from __future__ import annotations

from dataclasses import dataclass

GAP_TOLERANCE = 1e-4
"""Two right float32 forwards of these models differ by about 1e-6; one update shifts over 1e-2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """One answer of the engine: ``samples_per_prompt`` sequences in a row for each prompt."""

    prompts: tuple[tuple[int, ...], ...]
    """The prompt of each sequence, all of one length."""

    tokens: tuple[tuple[int, ...], ...]
    """The sampled tokens of each sequence, all of one length."""

    logprobs: tuple[tuple[float, ...], ...]
    """The engine's log-probability of each sampled token, in the same places as ``tokens``."""

    weight_versions: tuple[str, ...]
    """The weight version that the engine reports for each sequence."""

    samples_per_prompt: int
    seconds: float
    """From the request to its answer."""

    def __post_init__(self) -> None:
        lengths = [len(self.prompts), len(self.tokens)]
        lengths += [len(self.logprobs), len(self.weight_versions)]
        if len(set(lengths)) != 1 or lengths[0] % self.samples_per_prompt:
            raise ValueError(
                f"a batch needs prompt, tokens, log-probabilities and version of each sequence, in "
                f"groups of {self.samples_per_prompt!r}; it has {lengths!r} of them"
            )
        shapes = {(len(t), len(p)) for t, p in zip(self.tokens, self.logprobs, strict=True)}
        if len(shapes) != 1 or any(tokens != logprobs for tokens, logprobs in shapes):
            raise ValueError(
                f"every sequence needs as many tokens as log-probabilities, and all the same; got "
                f"the pairs {sorted(shapes)!r}; did the engine stop early (ignore_eos unset)?"
            )

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncRecord:
    """What one weight sync cost, taken from the publisher's report."""

    version: str
    total_bytes: int
    total_seconds: float
    pause_seconds: float
    """How long generation stood still."""

    wire_gigabytes_per_second: float
    phase_seconds: dict[str, float]
    """Seconds by phase, in the order in which they ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRecord:
    """What one verified policy-gradient update found and did."""

    loss: float
    gap: float
    """Largest |engine's log-prob - trainer's own| over the sampled tokens, before the update."""

    shift: float
    """Largest change of these log-probs by the update: the next gap if the sync did nothing."""

    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step: sync the weights as ``sync.version``, sample from them, verify, learn."""

    step: int
    reward: float
    tokens_per_second: float
    sync: SyncRecord
    update: UpdateRecord
    engine_version: str
    """The weight version that the engine reported with the samples."""

    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The final policy, synced once more and sampled without an update."""

    reward: float
    gap: float
    engine_version: str
    sync: SyncRecord
