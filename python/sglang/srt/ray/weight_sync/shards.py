"""Which elements of which Hugging Face tensor each parameter of a rank is made of: the plan as data.

`planning.py` makes a plan, `buckets.py` fills registered memory by it. A plan holds strided copies instead of element
numbers, so its size follows the number of tensors, not of elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from sglang.srt.ray.weight_sync.layout import TensorSpec, fingerprint_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """A strided set of elements of a flat tensor; outermost dimension first."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        # as_strided counts from the start of the storage, not of the view.
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.start)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardCopy:
    """Elements that a parameter takes out of one source tensor, unchanged but for their dtype."""

    source: int
    """Index into the manifest."""
    source_region: Region
    target_region: Region

    def apply(self, sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Copy out of flat contiguous sources into a flat target; dtype and device are converted as a loader would."""
        self.target_region.of(target).copy_(self.source_region.of(sources[self.source]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardFill:
    """Elements that the loader sets to a constant (the padding of a vocabulary, say)."""

    value: float
    target_region: Region

    def apply(self, sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Set these elements of a flat target."""
        self.target_region.of(target).fill_(self.value)


ShardPiece = ShardCopy | ShardFill


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How one rank's parameters are filled from one manifest of Hugging Face tensors."""

    manifest: tuple[TensorSpec, ...]
    layout_fingerprint: str
    targets: Mapping[str, tuple[ShardPiece, ...]]
    """Parameter name -> what fills it, in order, for every parameter that is copied whole."""
    unused_sources: tuple[str, ...]
    """Sent tensors that no parameter of this rank takes anything from."""
    missing_targets: tuple[str, ...]
    """Parameters of which nobody sends all elements."""
    partly_sent_targets: tuple[str, ...]
    """Those of them of which somebody sends some."""
    computed_targets: tuple[str, ...]
    """Parameters that the loader computes instead of copying: they can't be filled by copying bytes."""
    stateful_buffers: tuple[str, ...]
    """Buffers that belong to the model's state dict, which no parameter sync reaches."""
    numbered_targets: tuple[str, ...] = ()
    """Parameters whose loader rearranges what it is given, so that their elements had to be numbered."""

    @property
    def manifest_fingerprint(self) -> str:
        return fingerprint_of(self.manifest)
