"""Registered memory on the trainer that holds one rank's parameters, ready to be read.

A bucket is one allocation, registered with NIXL once and filled again for every version; the rank's parameters are
views into it. Few large regions cost far less than many small ones (Ray's documentation: 10,000 views took 10 s to
register, one region of 2 GB 10 ms), and views keep each tensor its own target.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sglang.srt.ray.weight_sync import transports
from sglang.srt.ray.weight_sync.digest import algorithm_for, settle, tensor_digests
from sglang.srt.ray.weight_sync.layout import TensorPiece, TensorSpec, WeightLayout, dtype_of
from sglang.srt.ray.weight_sync.shards import ShardCopy, ShardPlan

_SMALLEST_PIECE = 1 << 20
"""No parameter is split into less than this many bytes: each ref costs a round of descriptors."""
_ALIGNMENT = 64  # a cache line; also what every dtype's view needs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """What one rank is told: refs of lists of tensors, what these are in order, and each one's digest."""

    refs: list[Any]
    pieces: list[TensorPiece]
    digests: dict[str, str]
    """By `str(piece)`."""
    counts: list[int]
    """How many pieces each ref holds."""
    sizes: list[int]
    """How many bytes each ref holds."""

    def split(self, limit_bytes: int | None) -> tuple[Published, Published]:
        """The first refs that fit into so many bytes (all of them when None), and the others."""
        taken, used = 0, 0
        for size in self.sizes:
            if limit_bytes is not None and used + size > limit_bytes:
                break
            taken, used = taken + 1, used + size
        return self._part(0, taken), self._part(taken, len(self.refs))

    def _part(self, first: int, end: int) -> Published:
        start = sum(self.counts[:first])
        pieces = self.pieces[start : start + sum(self.counts[first:end])]
        return Published(
            refs=self.refs[first:end],
            pieces=pieces,
            digests={str(piece): self.digests[str(piece)] for piece in pieces},
            counts=self.counts[first:end],
            sizes=self.sizes[first:end],
        )


class RankBuckets:
    """The buckets that feed every rank with this layout and plan."""

    def __init__(
        self,
        *,
        layout: WeightLayout,
        plan: ShardPlan,
        bucket_bytes: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocates and registers the buckets: as many bytes as the planned parameters have.

        Args:
            bucket_bytes: the most that one ref holds; a larger parameter is split over several.
            device: where the buckets live.
        """
        self.layout = layout
        self.plan = plan
        self._algorithm = algorithm_for([layout.device, torch.device(device).type])
        self._memory: list[torch.Tensor] = []
        self._parameters: dict[str, torch.Tensor] = {}
        self._groups: list[list[TensorPiece]] = []
        # A partial sync plans for some of the parameters only.
        planned = [spec for spec in layout.entries if spec.name in plan.targets]
        for specs, size in _grouped(planned, bucket_bytes):
            memory = torch.zeros(size, dtype=torch.uint8, device=device)
            transports.pin(memory)
            self._memory.append(memory)
            self._parameters |= dict(_views(memory, specs))
            self._groups += _pieces(specs, bucket_bytes)
        self._copies: list[tuple[ShardCopy, torch.Tensor]] = []
        for name, parameter in self._parameters.items():
            for piece in plan.targets[name]:
                if isinstance(piece, ShardCopy):
                    self._copies.append((piece, piece.target_region.of(parameter.view(-1))))
                else:
                    piece.apply([], parameter.view(-1))  # a constant: set once, no copy touches it
        self._digests: dict[str, str] = {}
        self._refs: list[Any] = []
        self._refs_made_at = -1
        # A registration that outlives its memory would be taken for that of whatever is allocated there next (Ray
        # keys them by address): the next transfer then fails with NIXL_ERR_NOT_FOUND, or reads beyond the region.
        self._unpin = weakref.finalize(self, _unpin_all, self._memory)

    def serves(self, layout: WeightLayout, plan: ShardPlan) -> bool:
        """Whether a rank with this layout and plan can read these buckets."""
        return self.layout == layout and self.plan.targets == plan.targets

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy the plan's elements out of the manifest's tensors and compute the digests of what then stands here.

        Args:
            sources: in the manifest's order; any dtype and device, contiguous or not.
        """
        settle(sources)
        flat = [source.contiguous().view(-1) for source in sources]
        # Pieces never overlap (planning sees to that), so their order is free, and one kernel may copy many.
        if self._copies:
            torch._foreach_copy_(
                [target for _, target in self._copies],
                [copy.source_region.of(flat[copy.source]) for copy, _ in self._copies],
            )
        parts = [part for group in self._groups for part in group]
        found = tensor_digests([self._view(part) for part in parts], self._algorithm)
        self._digests = dict(zip(map(str, parts), found, strict=True))

    def publish(self) -> Published:
        """Refs to the filled buckets. Their memory must not change until every rank has read it."""
        # Refs name memory, not content: they serve every version until this process takes a registration back, which
        # changes how it describes itself (see `transports.waves`).
        if self._refs_made_at != transports.forgotten():
            self._refs = [
                transports.put([self._view(part) for part in group]) for group in self._groups
            ]
            self._refs_made_at = transports.forgotten()
        return Published(
            refs=list(self._refs),
            pieces=[part for group in self._groups for part in group],
            digests=dict(self._digests),
            counts=[len(group) for group in self._groups],
            sizes=[sum(self._view(part).nbytes for part in group) for group in self._groups],
        )

    def _view(self, part: TensorPiece) -> torch.Tensor:
        return part.of(self._parameters[part.name])

    def release(self) -> None:
        """Take the registrations back; also done when this object is dropped."""
        self._groups.clear()
        self._refs.clear()
        self._parameters.clear()
        self._copies.clear()
        self._unpin()


def bucket_device(devices: Sequence[torch.device]) -> torch.device:
    """Where buckets for tensors on these devices live: with them if they share one device, else on the CPU."""
    first = devices[0]
    return first if all(device == first for device in devices) else torch.device("cpu")


def _unpin_all(memory: list[torch.Tensor]) -> None:
    while memory:
        transports.unpin(memory.pop())


def _grouped(
    specs: Sequence[TensorSpec], bucket_bytes: int
) -> Iterator[tuple[list[TensorSpec], int]]:
    """Consecutive tensors that fit into one bucket, with the bytes that it needs."""
    group: list[TensorSpec] = []
    used = 0
    for spec in specs:
        size = _aligned(spec.num_bytes)
        if group and used + size > bucket_bytes:
            yield group, used
            group, used = [], 0
        group.append(spec)
        used += size
    if group:
        yield group, used


def _pieces(specs: Sequence[TensorSpec], bucket_bytes: int) -> Iterator[list[TensorPiece]]:
    """What each ref of a group holds: all of it, or (a single tensor above the limit) one part each."""
    limit = max(bucket_bytes, _SMALLEST_PIECE)
    if len(specs) > 1 or specs[0].num_bytes <= limit:
        yield [TensorPiece(name=spec.name) for spec in specs]
        return
    size = specs[0].num_elements
    step = limit // dtype_of(specs[0].dtype).itemsize
    for start in range(0, size, step):
        yield [TensorPiece(name=specs[0].name, elements=(start, min(start + step, size)))]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _views(memory: torch.Tensor, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    offset = 0
    for spec in specs:
        yield (
            spec.name,
            memory[offset : offset + spec.num_bytes].view(dtype_of(spec.dtype)).view(spec.shape),
        )
        offset += _aligned(spec.num_bytes)
