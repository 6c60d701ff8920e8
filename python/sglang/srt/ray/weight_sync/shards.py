"""Which elements of which Hugging Face tensor each parameter of a rank is made of.

The plan is read out of the engine's own loader: a copy of the model's module tree whose parameters hold element
numbers is loaded with tensors that hold element numbers too, and what then stands in each parameter names the source
of each of its elements. So fused projections, tensor-parallel shards, experts and tied weights need no table per
model, nothing that nobody sends goes unnoticed, and a loader that computes instead of copying is found out.
`layout.py` says what a rank holds; this file says where it comes from.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sglang.srt.ray.weight_sync.errors import UnplannableModelError
from sglang.srt.ray.weight_sync.layout import TensorSpec, fingerprint_of

_SOURCE_SHIFT = 40  # element numbers below 2^40 (1.1e12), sources below 2^23
_NOBODY = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardRun:
    """`count` rows of `length` consecutive elements, evenly spaced in the source and in the target."""

    source: int
    """Index into the manifest."""
    source_start: int
    target_start: int
    length: int
    count: int = 1
    source_stride: int = 0
    target_stride: int = 0

    def copy_elements(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy this run from a flat source into a flat target; dtype and device are converted as the loader would."""
        size = (self.count, self.length)
        target.as_strided(
            size, (self.target_stride, 1), self._offset(target, self.target_start)
        ).copy_(
            source.as_strided(
                size, (self.source_stride, 1), self._offset(source, self.source_start)
            )
        )

    @staticmethod
    def _offset(tensor: torch.Tensor, start: int) -> int:
        # as_strided counts from the start of the storage, not of the view.
        return tensor.storage_offset() + start


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How one rank's parameters are filled from one manifest of Hugging Face tensors."""

    manifest: tuple[TensorSpec, ...]
    layout_fingerprint: str
    targets: Mapping[str, tuple[ShardRun, ...]]
    """Parameter name -> its runs, for every parameter that is copied whole."""
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

    @property
    def manifest_fingerprint(self) -> str:
        return fingerprint_of(self.manifest)


def trace_shard_plan(
    model: torch.nn.Module, manifest: Sequence[TensorSpec], layout_fingerprint: str
) -> ShardPlan:
    """Plan one rank's parameters by loading element numbers through `model.load_weights`.

    It is loaded twice, with two different numberings: what a loader copies follows the second as it did the first, what
    it computes (adds, scales, rounds) does not. The model itself is not touched, so generation may go on. Runs on the
    CPU; needs 16 bytes per element of the rank.

    Raises:
        ValueError: a tensor of the manifest has too many elements for the encoding.
        UnplannableModelError: the loader computes with the weights in a way that numbers do not survive.
    """
    traced = _load_numbers(model, _numbered(manifest))
    again = _load_numbers(
        model, ((name, _relabelled(codes)) for name, codes in _numbered(manifest))
    )
    sizes = np.array([spec.num_elements for spec in manifest] or [0], dtype=np.int64)
    targets: dict[str, tuple[ShardRun, ...]] = {}
    missing, partly, computed, used = [], [], [], set()
    for name, parameter in model.named_parameters():
        codes = _codes_of(traced.get(name), parameter)
        follows = codes is not None and _follow(codes, _codes_of(again.get(name), parameter))
        if codes is None or not follows or not _are_copies(codes, sizes):
            computed.append(name)
        elif (codes == _NOBODY).any():
            missing.append(name)
            if (codes != _NOBODY).any():
                partly.append(name)
        else:
            targets[name] = tuple(_runs(codes))
        if codes is not None:
            sources = codes >> _SOURCE_SHIFT
            used.update(np.unique(sources[(sources >= 0) & (sources < len(manifest))]).tolist())
    return ShardPlan(
        manifest=tuple(manifest),
        layout_fingerprint=layout_fingerprint,
        targets=targets,
        unused_sources=tuple(spec.name for i, spec in enumerate(manifest) if i not in used),
        missing_targets=tuple(missing),
        partly_sent_targets=tuple(partly),
        computed_targets=tuple(computed),
        stateful_buffers=tuple(_stateful_buffers(model)),
    )


def _stateful_buffers(model: torch.nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name


def _numbered(manifest: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, spec in enumerate(manifest):
        if spec.num_elements >= 1 << _SOURCE_SHIFT:
            raise ValueError(
                f"{spec.name!r} has {spec.num_elements} elements, at most 2^{_SOURCE_SHIFT} can be planned"
            )
        numbers = torch.arange(spec.num_elements, dtype=torch.int64) + (index << _SOURCE_SHIFT)
        yield spec.name, numbers.view(spec.shape)


def _load_numbers(
    model: torch.nn.Module, numbers: Iterator[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """What stands in the parameters of a tracing copy once it has loaded these numbers."""
    tracer = _tracing_copy(model)
    # What is derived from the weights is no concern of a plan, and MLA's would be copied into the live model.
    tracer.post_load_weights = lambda *_, **__: None
    given: list[str] = []

    def remembered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, codes in numbers:
            given.append(name)
            yield name, codes

    try:
        tracer.load_weights(remembered())
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UnplannableModelError(
            f"the loader of {type(model).__name__} computes with the weights it is given ({error}), so what it "
            f"makes of them can't be planned; it failed at or before {given[-1:]!r}",
            tensor=given[-1] if given else None,
            phase="plan",
        ) from error
    return dict(tracer.named_parameters())


def _untouchable(attribute: Any) -> Any:
    """A plain tensor of a module (derived from its weights) without its memory, so that a loader can't write there."""
    return attribute.to("meta") if isinstance(attribute, torch.Tensor) else attribute


_RELABEL_XOR = 0x2545F4914F6CDD1D
_RELABEL_FACTOR = -7046029254386353131  # 0x9E3779B97F4A7C15 (SplitMix64), as a signed 64-bit number


def _relabelled(codes: Any) -> Any:
    """The second numbering: a bijection of 64-bit numbers that no arithmetic of a loader commutes with."""
    return (codes ^ _RELABEL_XOR) * _RELABEL_FACTOR


def _follow(codes: np.ndarray, again: np.ndarray | None) -> bool:
    """Whether what was loaded under the second numbering is the same elements as under the first."""
    if again is None:
        return False
    return bool(np.where(codes == _NOBODY, again == _NOBODY, again == _relabelled(codes)).all())


def _tracing_copy(model: torch.nn.Module) -> Any:
    """The same module tree with int64 parameters of -1 on the CPU, sharing everything else with `model`."""
    parameters: dict[int, torch.nn.Parameter] = {}
    modules: dict[int, torch.nn.Module] = {}

    def copied_parameter(parameter: torch.nn.Parameter | None) -> torch.nn.Parameter | None:
        if parameter is None:
            return None
        if id(parameter) not in parameters:
            numbers = torch.nn.Parameter(
                torch.full(parameter.shape, _NOBODY, dtype=torch.int64), requires_grad=False
            )
            # Loaders hang on the parameter (weight_loader, output_dim, ...), some on its class.
            numbers.__class__ = type(parameter)
            numbers.__dict__.update(parameter.__dict__)
            parameters[id(parameter)] = numbers
        return parameters[id(parameter)]

    def copied_module(module: torch.nn.Module | None) -> torch.nn.Module | None:
        if module is None:
            return None
        if id(module) not in modules:
            clone = module.__class__.__new__(module.__class__)
            modules[id(module)] = clone
            clone.__dict__ = {k: _untouchable(v) for k, v in module.__dict__.items()}
            clone._parameters = {k: copied_parameter(p) for k, p in module._parameters.items()}
            clone._buffers = {k: copy.deepcopy(b) for k, b in module._buffers.items()}
            clone._modules = {k: copied_module(m) for k, m in module._modules.items()}
        return modules[id(module)]

    return copied_module(model)


def _codes_of(traced: torch.Tensor | None, parameter: torch.Tensor) -> np.ndarray | None:
    """The element numbers that stand in a traced parameter, None when the loader put something else there."""
    if traced is None or traced.dtype != torch.int64 or traced.shape != parameter.shape:
        return None
    return traced.detach().contiguous().view(-1).numpy()


def _are_copies(codes: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether every code names an element that exists (or nobody)."""
    sources = codes >> _SOURCE_SHIFT
    sent = codes != _NOBODY
    if ((sources < 0) | (sources >= len(sizes)))[sent].any():
        return False
    return bool(((codes & ((1 << _SOURCE_SHIFT) - 1))[sent] < sizes[sources[sent]]).all())


def _runs(codes: np.ndarray) -> Iterator[ShardRun]:
    """Maximal evenly spaced runs, in target order."""
    if not len(codes):
        return
    starts = np.concatenate([[0], np.flatnonzero(np.diff(codes) != 1) + 1])
    lengths = np.diff(np.concatenate([starts, [len(codes)]]))
    sources = codes[starts] >> _SOURCE_SHIFT
    source_starts = codes[starts] & ((1 << _SOURCE_SHIFT) - 1)
    rows = np.stack([sources, lengths, starts, source_starts], axis=1).tolist()
    first = 0
    while first < len(rows):
        end, target_stride, source_stride = _evenly_spaced(rows, first)
        source, length, target_start, source_start = rows[first]
        yield ShardRun(
            source=source,
            source_start=source_start,
            target_start=target_start,
            length=length,
            count=end - first,
            source_stride=source_stride,
            target_stride=target_stride,
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
