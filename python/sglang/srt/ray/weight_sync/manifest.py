"""What somebody is going to send: names, shapes and dtypes of Hugging Face tensors, and each one's digest.

Made where the tensors live, it lets engines refuse a sync before any of them is paused, and prove what arrived. A
publisher plans by the same specs and needs no manifest; `loading.py` takes one along with refs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.ray.weight_sync.errors import WeightNameError
from sglang.srt.ray.weight_sync.layout import TensorSpec, repeated

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightManifest:
    """Tensors in the order in which they are sent."""

    tensors: tuple[TensorSpec, ...]
    digests: Mapping[str, str]
    """Tensor name -> digest of its contiguous bytes (`algorithm:hex`), for every tensor."""

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.tensors]
        if twice := repeated(names):
            raise WeightNameError(f"tensor name(s) given more than once: {twice!r}", phase="plan")
        if set(names) != set(self.digests):
            odd = sorted(set(names) ^ set(self.digests))
            raise WeightNameError(f"tensors and digests differ in {odd!r}", phase="plan")

    @classmethod
    def of(
        cls, named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> WeightManifest:
        """Describe tensors of this process. Reads every byte once."""
        from sglang.srt.ray.weight_sync.digest import algorithm_for, settle, tensor_digest

        pairs = named(named_tensors)
        settle(tensor for _, tensor in pairs)
        return cls(
            tensors=tuple(TensorSpec.of(name, tensor) for name, tensor in pairs),
            digests={
                name: tensor_digest(
                    tensor.detach().contiguous(), algorithm_for([tensor.device.type])
                )
                for name, tensor in pairs
            },
        )

    @classmethod
    def joined(cls, parts: Sequence[WeightManifest]) -> WeightManifest:
        """One manifest of several that follow each other.

        Raises:
            WeightNameError: two of them hold the same name.
        """
        tensors = tuple(spec for part in parts for spec in part.tensors)
        digests = {name: digest for part in parts for name, digest in part.digests.items()}
        return cls(tensors=tensors, digests=digests)


def named(value: Any) -> list[tuple[str, torch.Tensor]]:
    """The pairs of a dictionary of tensors, or of an iterable of (name, tensor).

    Raises:
        WeightNameError: it is something else, or a name occurs twice.
    """
    import torch

    pairs = list(value.items() if isinstance(value, Mapping) else _listed(value))
    for pair in pairs:
        if not (
            isinstance(pair, tuple | list)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], torch.Tensor)
        ):
            raise WeightNameError(
                f"weights must be {{name: tensor}} or pairs (name, tensor), found {type(pair)!r}"
            )
    if twice := repeated(name for name, _ in pairs):
        raise WeightNameError(f"tensor name(s) given more than once: {twice!r}")
    return [(name, tensor) for name, tensor in pairs]


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise WeightNameError(
            f"weights must be {{name: tensor}} or pairs (name, tensor), got {type(value)!r}"
        )
    return list(value)
