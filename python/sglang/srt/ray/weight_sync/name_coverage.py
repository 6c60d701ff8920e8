"""Coverage of a rank whose loader computes with weights: by names, because elements can't be followed through it.

`planning.py` follows elements where it can; this is what is left for a loader that adds to, quantises or otherwise
changes what it is given. It knows tensors that map to nothing and parameters that get too few tensors, no more.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.model_loader.parameter_mapper import ParameterMapper, UnmappableNameError
from sglang.srt.ray.weight_sync.errors import UnplannableModelError
from sglang.srt.ray.weight_sync.layout import TensorSpec
from sglang.srt.ray.weight_sync.planning import stateful_buffers
from sglang.srt.ray.weight_sync.shards import ShardPlan

if TYPE_CHECKING:
    import torch


def plan_by_names(
    model: torch.nn.Module, manifest: Sequence[TensorSpec], layout_fingerprint: str
) -> ShardPlan:
    """A plan that fills nothing: every parameter that gets a tensor is `computed`.

    Raises:
        UnplannableModelError: the loader can't be followed by names either.
    """
    mapper = ParameterMapper.from_model(model)
    parameters = dict(model.named_parameters())
    counts: collections.Counter[str] = collections.Counter()
    needed: dict[str, int] = {}
    unused = []
    for spec in manifest:
        try:
            mapped = mapper.map(spec.name)
        except UnmappableNameError as error:
            if isinstance(error.__cause__, KeyError):  # a loader looks its parameters up by name
                unused.append(spec.name)
                continue
            raise UnplannableModelError(str(error), tensor=spec.name, phase="plan") from error
        if mapped.sglang_name not in parameters:
            unused.append(spec.name)
            continue
        counts[mapped.sglang_name] += 1
        needed[mapped.sglang_name] = mapped.num_shards * mapped.num_local_experts
    missing = [n for n in parameters if n not in counts or counts[n] < needed[n]]
    return ShardPlan(
        manifest=tuple(manifest),
        layout_fingerprint=layout_fingerprint,
        targets={},
        unused_sources=tuple(unused),
        missing_targets=tuple(missing),
        partly_sent_targets=tuple(name for name in missing if name in counts),
        computed_targets=tuple(name for name in parameters if name in counts),
        stateful_buffers=tuple(stateful_buffers(model)),
    )
