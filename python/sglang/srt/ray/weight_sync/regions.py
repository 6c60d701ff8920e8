"""Arithmetic on strided regions: coalesce them, and say whether some of them overlap or cover a tensor.

Regular cases (intervals; the same columns of every row) are decided from their bounds; only what is left is drawn into
a bitmap of one byte per element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from sglang.srt.ray.weight_sync.shards import Region


def region_of(view: torch.Tensor) -> Region:
    """Where a view's elements lie in its storage."""
    return Region(start=view.storage_offset(), shape=tuple(view.shape), strides=view.stride())


def coalesced(source: Region, target: Region) -> tuple[Region, Region]:
    """The same copy in as few dimensions as it has."""
    dims = [
        (size, source_stride, target_stride)
        for size, source_stride, target_stride in zip(
            source.shape, source.strides, target.strides, strict=True
        )
        if size != 1
    ]
    merged: list[tuple[int, int, int]] = []
    for size, source_stride, target_stride in dims:
        if merged:
            outer, outer_source, outer_target = merged[-1]
            if (outer_source, outer_target) == (source_stride * size, target_stride * size):
                merged[-1] = (outer * size, source_stride, target_stride)
                continue
        merged.append((size, source_stride, target_stride))
    merged = merged or [(1, 1, 1)]
    shape = tuple(size for size, _, _ in merged)
    return (
        Region(start=source.start, shape=shape, strides=tuple(stride for _, stride, _ in merged)),
        Region(start=target.start, shape=shape, strides=tuple(stride for _, _, stride in merged)),
    )


def merged(region: Region) -> Region:
    return coalesced(region, region)[0]


def named_elements(regions: Sequence[Region]) -> int:
    """Elements that the regions name, one that is named twice counted twice."""
    return sum(math.prod(region.shape) for region in regions)


def covered_elements(regions: Sequence[Region], size: int) -> int:
    """Distinct elements of a tensor of `size` elements that the regions name."""
    flat = [merged(region) for region in regions if math.prod(region.shape)]
    if all(len(region.shape) == 1 and region.strides[0] == 1 for region in flat):
        return _union([(region.start, region.shape[0]) for region in flat])
    if (rows := _common_rows(flat)) is not None:
        return rows * _union([(region.start, region.shape[1]) for region in flat])
    seen: np.ndarray = np.zeros(size, dtype=np.bool_)
    for region in flat:
        view = seen[region.start :]
        np.lib.stride_tricks.as_strided(view, region.shape, region.strides)[...] = True
    return int(seen.sum())


def _common_rows(regions: Sequence[Region]) -> int | None:
    """The number of rows when every region is a block of columns of the same rows."""
    rows = {(region.shape[0], region.strides[0]) for region in regions}
    blocks = all(len(region.shape) == 2 and region.strides[1] == 1 for region in regions)
    if len(rows) != 1 or not blocks:
        return None
    count, stride = rows.pop()
    inside = all(region.start + region.shape[1] <= stride for region in regions)
    return count if inside else None


def _union(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of intervals (start, length)."""
    total = reached = 0
    for start, length in sorted(intervals):
        total += max(start + length - max(start, reached), 0)
        reached = max(reached, start + length)
    return total
