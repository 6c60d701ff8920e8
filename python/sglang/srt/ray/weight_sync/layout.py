"""What one rank holds: the names, shapes and dtypes of its parameters, and a fingerprint of them.

The layout is the receiver's half of every plan: a publisher fills exactly these tensors, and a changed fingerprint
(another TP size, a re-created storage type) invalidates what was planned. It says nothing of where bytes come from;
that is `shards.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def repeated(names: Iterable[str]) -> list[str]:
    """Those that occur more than once, sorted."""
    counts = collections.Counter(names)
    return sorted(name for name, count in counts.items() if count > 1)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`: what travels in layouts and manifests."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, shape and dtype of one tensor, without its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch's name without the prefix, such as `bfloat16`."""

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        return cls(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * dtype_of(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorPiece:
    """A parameter, or consecutive elements of one that is too large to travel in one go."""

    name: str
    elements: tuple[int, int] | None = None
    """First and last (exclusive) element of the flat parameter; None for all of it, in its own shape."""

    def __str__(self) -> str:
        return (
            self.name
            if self.elements is None
            else f"{self.name}[{self.elements[0]}:{self.elements[1]}]"
        )

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """This piece of a contiguous parameter, sharing its memory."""
        return parameter if self.elements is None else parameter.view(-1)[slice(*self.elements)]


def fingerprint_of(entries: tuple[TensorSpec, ...]) -> str:
    """SHA-256 (hex) over names, shapes and dtypes in order; equal on every machine for equal entries."""
    text = json.dumps([(e.name, e.shape, e.dtype) for e in entries], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """The parameters of one rank, in the model's own order; tied parameters appear once, under their first name."""

    entries: tuple[TensorSpec, ...]
    fingerprint: str
    device: str
    """Device type of the parameters: `cpu` or `cuda`."""

    @classmethod
    def of_model(cls, model: torch.nn.Module) -> WeightLayout:
        named = dict(model.named_parameters())
        entries = tuple(TensorSpec.of(name, parameter) for name, parameter in named.items())
        devices = sorted({parameter.device.type for parameter in named.values()})
        if len(devices) != 1:
            raise ValueError(
                f"the parameters of one rank must share one device type, found {devices!r}"
            )
        return cls(entries=entries, fingerprint=fingerprint_of(entries), device=devices[0])

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)
