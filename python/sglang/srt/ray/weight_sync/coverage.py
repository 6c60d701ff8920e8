"""Whether a sync sends all that is needed and loses nothing of it: decided from the plans, before any byte moves.

Three lists make the verdict: tensors that map to nothing, parameters that nobody sends, buffers that carry state. A
declared partial sync names the tensors that it means to send, and is then held to them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Hashable, Mapping, Sequence

import torch

from sglang.srt.ray.weight_sync.errors import WeightNameError
from sglang.srt.ray.weight_sync.shards import ShardPlan


def check_declared(names: Sequence[str], partial: Sequence[str] | None) -> None:
    """Raises:
    WeightNameError: a partial sync was declared for other tensors than those that were given.
    """
    if partial is None:
        return
    outside = [
        name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in partial)
    ]
    idle = [
        pattern
        for pattern in partial
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names)
    ]
    if outside or idle:
        raise WeightNameError(
            f"the partial sync is declared as {list(partial)!r}; given but not declared: {outside!r}; declared but not "
            f"given: {idle!r}",
            phase="plan",
        )


def check_coverage(
    plans: Mapping[str, Sequence[ShardPlan]],
    sources: Mapping[str, torch.Tensor] | Mapping[str, str],
    *,
    partial: bool,
    through_loader: bool = False,
) -> None:
    """Hold the plans of all ranks (engine name -> its ranks' plans) against what was given.

    Args:
        sources: name -> tensor, or its digest where the tensor is elsewhere.
        through_loader: the engine's loader will run, so that what it computes is no obstacle.

    Raises:
        WeightNameError: with the three lists.
    """
    every = [plan for ranks in plans.values() for plan in ranks]
    lost = _lost_sources(every, sources)
    missing = {
        f"{engine} rank {rank}": list(plan.missing_targets)
        for engine, ranks in plans.items()
        for rank, plan in enumerate(ranks)
        if plan.missing_targets and not partial
    }
    torn = {
        f"{engine} rank {rank}": list(plan.partly_sent_targets)
        for engine, ranks in plans.items()
        for rank, plan in enumerate(ranks)
        if plan.partly_sent_targets and partial
    }
    computed = sorted(
        {name for plan in every for name in plan.computed_targets if not through_loader}
    )
    stateful = (
        sorted({name for plan in every for name in plan.stateful_buffers}) if not partial else []
    )
    problems = {
        "tensors that no rank takes anything from": lost,
        "parameters that nobody sends (all of)": missing or torn,
        "buffers that carry state and are not sent": stateful,
        "parameters that the loader computes or pads instead of copying, so bytes can't be sent for them (are the "
        "shapes right?)": computed,
    }
    if any(problems.values()):
        text = "; ".join(f"{what}: {which!r}" for what, which in problems.items() if which)
        raise WeightNameError(
            f"{text}. A subset must be declared with partial=[patterns]",
            engine=next(iter(plans)) if len(plans) == 1 else None,
            phase="plan",
        )


def _lost_sources(
    plans: Sequence[ShardPlan], sources: Mapping[str, torch.Tensor] | Mapping[str, str]
) -> list[str]:
    unused = set(sources)
    for plan in plans:
        unused &= set(plan.unused_sources)
    # A tied pair is one tensor under two names: it arrives under whichever name the engine's loader takes.
    used = {_identity(source) for name, source in sources.items() if name not in unused}
    return sorted(name for name in unused if _identity(sources[name]) not in used)


def _identity(source: torch.Tensor | str) -> Hashable:
    return source if isinstance(source, str) else (source.data_ptr(), source.shape)
