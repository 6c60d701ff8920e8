"""Plan parameters by loading element numbers: what then stands in each element names its source.

A loader may rearrange weights in any way (interleave, transpose, concatenate) and is still followed; it is run twice
with two different numberings, and what it copies follows the second as it did the first, what it computes (adds,
scales, rounds) does not. It costs 16 bytes an element, so `planning.py` numbers only what `view_trace` could not tell,
a group at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from sglang.srt.ray.weight_sync.layout import TensorSpec
from sglang.srt.ray.weight_sync.shards import Region, ShardCopy
from sglang.srt.ray.weight_sync.tracing import load_into, tracing_copy, without_memory

SOURCE_SHIFT = 40  # element numbers below 2^40 (1.1e12), sources below 2^23
_NOBODY = -1
_RELABEL_XOR = 0x2545F4914F6CDD1D
_RELABEL_FACTOR = -7046029254386353131  # 0x9E3779B97F4A7C15 (SplitMix64), as a signed 64-bit number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbered:
    """What stands in one parameter: `copies` when all of it is sent, else why not."""

    copies: tuple[ShardCopy, ...] = ()
    computed: bool = False
    missing: bool = False
    partly_sent: bool = False
    sources: frozenset[int] = frozenset()


def trace_numbers(
    model: torch.nn.Module,
    manifest: Sequence[TensorSpec],
    *,
    names: Collection[str] | None = None,
    sources: Collection[int] | None = None,
) -> dict[str, Numbered]:
    """Number these parameters' elements (all when None) with what these sources (all when None) give them.

    Raises:
        UnplannableModelError: the loader computes with the weights in a way that numbers do not survive.
    """
    first = _load(model, manifest, names, sources, relabel=False)
    second = _load(model, manifest, names, sources, relabel=True)
    sizes = np.array([spec.num_elements for spec in manifest] or [0], dtype=np.int64)
    return {
        name: _numbered(_codes(first.get(name), p), _codes(second.get(name), p), sizes)
        for name, p in model.named_parameters()
        if names is None or name in names
    }


def _load(
    model: torch.nn.Module,
    manifest: Sequence[TensorSpec],
    names: Collection[str] | None,
    sources: Collection[int] | None,
    *,
    relabel: bool,
) -> dict[str, torch.Tensor]:
    def make(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        if names is None or name in names:
            return torch.full(parameter.shape, _NOBODY, dtype=torch.int64)
        return without_memory(parameter.shape)

    def numbers() -> Iterator[tuple[str, torch.Tensor]]:
        for index, spec in enumerate(manifest):
            if sources is not None and index not in sources:
                yield spec.name, without_memory(spec.shape)
                continue
            codes = torch.arange(spec.num_elements, dtype=torch.int64) + (index << SOURCE_SHIFT)
            yield spec.name, (_relabelled(codes) if relabel else codes).view(spec.shape)

    tracer = tracing_copy(model, make, real_buffers=names is None)
    load_into(tracer, numbers())
    return dict(tracer.named_parameters())


def _relabelled(codes: Any) -> Any:
    """The second numbering: a bijection of 64-bit numbers that no arithmetic of a loader commutes with."""
    return (codes ^ _RELABEL_XOR) * _RELABEL_FACTOR


def _codes(traced: torch.Tensor | None, parameter: torch.Tensor) -> np.ndarray | None:
    """The element numbers that stand in a traced parameter, None when the loader put something else there."""
    if traced is None or traced.dtype != torch.int64 or traced.shape != parameter.shape:
        return None
    return traced.detach().contiguous().view(-1).numpy()


def _numbered(codes: np.ndarray | None, again: np.ndarray | None, sizes: np.ndarray) -> Numbered:
    if codes is None or again is None:
        return Numbered(computed=True)
    nobody = codes == _NOBODY
    if not np.where(nobody, again == _NOBODY, again == _relabelled(codes)).all():
        return Numbered(computed=True)
    sent = codes[~nobody] if nobody.any() else codes
    rows = list(_rows(sent))
    if not all(_exists(row, sizes) for row in rows):
        return Numbered(computed=True)
    used = frozenset(source for source, *_ in rows)
    if len(sent) < len(codes):
        return Numbered(missing=True, partly_sent=len(sent) > 0, sources=used)
    return Numbered(copies=tuple(copies_of(rows)), sources=used)


def _exists(row: list[int], sizes: np.ndarray) -> bool:
    source, length, _, start = row
    return 0 <= source < len(sizes) and start + length <= int(sizes[source])


def _rows(codes: np.ndarray) -> Iterator[list[int]]:
    """Maximal consecutive runs: [source, length, start in the target, start in the source]."""
    if not len(codes):
        return
    starts = np.concatenate([[0], np.flatnonzero(np.diff(codes) != 1) + 1])
    lengths = np.diff(np.concatenate([starts, [len(codes)]]))
    firsts = codes[starts]
    table = [firsts >> SOURCE_SHIFT, lengths, starts, firsts & ((1 << SOURCE_SHIFT) - 1)]
    yield from np.stack(table, axis=1).tolist()


def copies_of(rows: list[list[int]]) -> Iterator[ShardCopy]:
    """Evenly spaced rows become one copy each time; in target order."""
    first = 0
    while first < len(rows):
        end, target_stride, source_stride = _evenly_spaced(rows, first)
        source, length, target_start, source_start = rows[first]
        shape = (end - first, length)
        yield ShardCopy(
            source=source,
            source_region=Region(start=source_start, shape=shape, strides=(source_stride, 1)),
            target_region=Region(start=target_start, shape=shape, strides=(target_stride, 1)),
        )
        first = end


def _evenly_spaced(rows: list[list[int]], first: int) -> tuple[int, int, int]:
    """End (exclusive) of the evenly spaced rows that start at `first`, and their strides (0, 0 for one row)."""
    source, length, target_start, source_start = rows[first]
    end, target_stride, source_stride = first + 1, 0, 0
    while end < len(rows) and rows[end][:2] == [source, length]:
        steps = end - first
        if steps == 1:
            target_stride = rows[end][2] - target_start
            source_stride = rows[end][3] - source_start
            if source_stride < 0:
                return end, 0, 0
        elif rows[end][2:] != [
            target_start + steps * target_stride,
            source_start + steps * source_stride,
        ]:
            break
        end += 1
    return end, target_stride, source_stride
