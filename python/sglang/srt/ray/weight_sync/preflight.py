"""What is checked of a pull before its first byte moves, so that a refusal leaves every parameter as it was.

Pure comparisons of names, targets, digests and what the sources say of themselves; `receiver.py` calls them in order
and then writes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sglang.srt.ray.weight_sync import transports
from sglang.srt.ray.weight_sync.digest import can_run
from sglang.srt.ray.weight_sync.errors import (
    DeadlineExceededError,
    WeightMismatchError,
    WeightNameError,
)
from sglang.srt.ray.weight_sync.layout import dtype_name


def check_contiguous(parameters: Mapping[str, torch.Tensor], *, rank: int) -> None:
    """Raises:
    WeightMismatchError: naming a parameter that bytes can't land in.
    """
    for name, parameter in parameters.items():
        if not parameter.is_contiguous():
            raise WeightMismatchError(
                f"{name!r} is not contiguous (strides {parameter.stride()!r}), so bytes can't land in it",
                rank=rank,
                tensor=name,
            )


def check_digests(
    names: Sequence[str],
    targets: Sequence[torch.Tensor],
    digests: Mapping[str, str],
    *,
    rank: int,
) -> None:
    """Raises:
    WeightNameError: a tensor without a digest.
    WeightMismatchError: a digest that can't be computed where the target lives.
    """
    if missing := [name for name in names if name not in digests]:
        raise WeightNameError(f"no digest was given for {missing!r}", rank=rank)
    for name, target in zip(names, targets, strict=True):
        if not can_run(digests[name].partition(":")[0], target.device.type):
            raise WeightMismatchError(
                f"{name!r}: a digest such as {digests[name]!r} can't be computed on {target.device.type!r}",
                rank=rank,
                tensor=name,
            )


def check_sources(
    refs: Sequence[Any],
    names: Sequence[str],
    targets: Sequence[torch.Tensor],
    *,
    deadline: float,
    rank: int,
) -> list[int]:
    """Compare what the refs hold with the targets; returns how many tensors each ref holds.

    Args:
        deadline: on `time.monotonic`'s clock.

    Raises:
        DeadlineExceededError: a ref's owner did not say in time what it holds.
        WeightNameError: another number of tensors than names.
        WeightMismatchError: naming the tensor, both shapes and both dtypes.
    """
    try:
        sources = [
            transports.described(ref, timeout_s=max(deadline - time.monotonic(), 0.0))
            for ref in refs
        ]
    except TimeoutError as error:
        raise DeadlineExceededError(str(error), rank=rank, phase="stage") from error
    flat = [entry for source in sources for entry in source]
    if len(flat) != len(names):
        raise WeightNameError(
            f"{len(refs)} ref(s) hold {len(flat)} tensor(s), but {len(names)} name(s) were given",
            rank=rank,
        )
    for name, target, (shape, dtype) in zip(names, targets, flat, strict=True):
        if tuple(shape) != tuple(target.shape) or dtype != target.dtype:
            raise WeightMismatchError(
                f"{name!r}: the source has shape {tuple(shape)!r} and dtype {dtype_name(dtype)!r}, the parameter "
                f"{tuple(target.shape)!r} and {dtype_name(target.dtype)!r}",
                rank=rank,
                tensor=name,
            )
    return [len(source) for source in sources]
