"""Make one rank's plan out of the engine's own loader: by views where that tells all, by numbers for the rest.

So fused projections, tensor-parallel shards, experts and tied weights need no table per model, nothing that nobody
sends goes unnoticed, and a loader that computes instead of copying is found out. `layout.py` says what a rank holds;
this file says where it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psutil
import torch

from sglang.srt.ray.weight_sync.errors import UnplannableModelError
from sglang.srt.ray.weight_sync.layout import TensorSpec
from sglang.srt.ray.weight_sync.number_trace import SOURCE_SHIFT, Numbered, trace_numbers
from sglang.srt.ray.weight_sync.shards import ShardPiece, ShardPlan
from sglang.srt.ray.weight_sync.view_trace import ViewTrace, trace_views

NUMBERED_ELEMENTS_AT_ONCE = 1 << 26
"""Parameter elements that are numbered together: 1 GiB of numbers, and as much for their sources."""
_BYTES_PER_NUMBERED_ELEMENT = 32  # two numberings of a parameter, one source at a time, temporaries


def trace_shard_plan(
    model: torch.nn.Module, manifest: Sequence[TensorSpec], layout_fingerprint: str
) -> ShardPlan:
    """Plan one rank's parameters. The model itself is not touched, so generation may go on. Runs on the CPU.

    Raises:
        ValueError: a tensor of the manifest has too many elements for the encoding.
        UnplannableModelError: the loader computes with the weights in a way that can't be followed, or following it
            needs more memory than there is.
    """
    _check_sizes(manifest)
    try:
        trace = trace_views(model, manifest)
    except UnplannableModelError:
        return _plan(model, manifest, layout_fingerprint, None, _number_all(model, manifest))
    numbered: dict[str, Numbered] = {}
    for names, sources in _groups(trace):
        numbered |= trace_numbers(model, manifest, names=names, sources=sources)
    return _plan(model, manifest, layout_fingerprint, trace, numbered)


def _check_sizes(manifest: Sequence[TensorSpec]) -> None:
    for spec in manifest:
        if spec.num_elements >= 1 << SOURCE_SHIFT:
            raise ValueError(
                f"{spec.name!r} has {spec.num_elements} elements, at most 2^{SOURCE_SHIFT} can be planned"
            )


def _number_all(model: torch.nn.Module, manifest: Sequence[TensorSpec]) -> dict[str, Numbered]:
    """For a loader that looks at what it is given, so that it can't be run without memory."""
    elements = sum(parameter.numel() for parameter in model.parameters())
    needed, free = elements * _BYTES_PER_NUMBERED_ELEMENT, psutil.virtual_memory().available
    if needed > free:
        raise UnplannableModelError(
            f"the loader of {type(model).__name__} looks at the values of weights, so all {elements} elements of this "
            f"rank have to be numbered at once: {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
            phase="plan",
        )
    return trace_numbers(model, manifest)


def _groups(trace: ViewTrace) -> Iterator[tuple[set[str], set[int]]]:
    """Parameters to number together, with all sources that have to do with them."""
    names: set[str] = set()
    sources: set[int] = set()
    elements = 0
    for name, seen in trace.targets.items():
        if not seen.needs_numbers():
            continue
        if names and elements + seen.size > NUMBERED_ELEMENTS_AT_ONCE:
            yield names, _with_companions(sources, trace.mixed_sources)
            names, sources, elements = set(), set(), 0
        names.add(name)
        sources |= seen.sources
        elements += seen.size
    if names:
        yield names, _with_companions(sources, trace.mixed_sources)


def _with_companions(sources: set[int], mixed: Sequence[set[int]]) -> set[int]:
    """Numbers and tensors without memory can't meet in one operation, so these sources go together."""
    grown = True
    while grown:
        size = len(sources)
        for group in mixed:
            if group & sources:
                sources |= group
        grown = len(sources) > size
    return sources


def _plan(
    model: torch.nn.Module,
    manifest: Sequence[TensorSpec],
    layout_fingerprint: str,
    trace: ViewTrace | None,
    numbered: dict[str, Numbered],
) -> ShardPlan:
    targets: dict[str, tuple[ShardPiece, ...]] = {}
    missing, partly, computed, used = [], [], [], set[int]()
    for name, parameter in model.named_parameters():
        if (numbers := numbered.get(name)) is None and trace is not None:
            numbers, targets[name] = None, tuple(trace.targets[name].pieces)
            seen = trace.targets[name]
            used |= {piece.source for piece in seen.copies}
            is_missing = seen.written_elements() < parameter.numel() or not seen.copies
            is_partly = bool(seen.copies)
        else:
            assert numbers is not None
            used |= numbers.sources
            is_missing, is_partly = numbers.missing, numbers.partly_sent
            targets[name] = numbers.copies
            if numbers.computed:
                computed.append(name)
        if is_missing:
            missing.append(name)
            partly += [name] if is_partly else []
        if is_missing or name in computed:
            del targets[name]
    return ShardPlan(
        manifest=tuple(manifest),
        layout_fingerprint=layout_fingerprint,
        targets=targets,
        unused_sources=tuple(spec.name for i, spec in enumerate(manifest) if i not in used),
        missing_targets=tuple(missing),
        partly_sent_targets=tuple(partly),
        computed_targets=tuple(computed),
        stateful_buffers=tuple(stateful_buffers(model)),
        numbered_targets=tuple(numbered),
    )


def stateful_buffers(model: torch.nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name
