"""Plan a model by watching which views its loader copies where, without any memory for weights.

Parameters and weights are `meta` tensors: they have shapes, strides and storages but no elements, so a loader runs in
milliseconds whatever the size of the model, and every copy from a view of a weight into a view of a parameter is a
piece of the plan. What a loader rearranges or computes on the way is only noted here; `number_trace.py` follows that
element by element.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.srt.ray.weight_sync.layout import TensorSpec
from sglang.srt.ray.weight_sync.regions import (
    coalesced,
    covered_elements,
    merged,
    named_elements,
    region_of,
)
from sglang.srt.ray.weight_sync.shards import ShardCopy, ShardFill, ShardPiece
from sglang.srt.ray.weight_sync.tracing import load_into, tracing_copy, without_memory

_FILLS = ("aten::fill_", "aten::zero_")


@dataclasses.dataclass(kw_only=True)
class ViewsOf:
    """What was seen to flow into one parameter."""

    size: int
    pieces: list[ShardPiece] = dataclasses.field(default_factory=list)
    sources: set[int] = dataclasses.field(default_factory=set)
    """Every source (index into the manifest) that has to do with it."""
    rearranged: bool = False
    """Whether something else than a copy of a view, or a constant, was written."""

    @property
    def copies(self) -> list[ShardCopy]:
        return [piece for piece in self.pieces if isinstance(piece, ShardCopy)]

    def written_elements(self) -> int:
        return covered_elements([piece.target_region for piece in self.pieces], self.size)

    def needs_numbers(self) -> bool:
        """Whether these pieces do not tell what stands in the parameter at the end: where they overlap, say."""
        named = named_elements([piece.target_region for piece in self.pieces])
        return self.rearranged or self.written_elements() != named


@dataclasses.dataclass(kw_only=True)
class ViewTrace:
    """What one run of the loader showed."""

    targets: dict[str, ViewsOf]
    mixed_sources: list[set[int]]
    """Sources that one operation took together: whoever numbers one of a set needs all of it."""


def trace_views(model: torch.nn.Module, manifest: Sequence[TensorSpec]) -> ViewTrace:
    """Run `model`'s loader on tensors without memory. The model itself is not touched.

    Raises:
        UnplannableModelError: the loader looks at values, or refuses a shape.
    """
    tracer = tracing_copy(model, lambda _, parameter: without_memory(parameter.shape))
    watch = _Watch(dict(tracer.named_parameters()))
    with watch:
        load_into(tracer, watch.given(manifest))
    for name, parameter in tracer.named_parameters():
        watch.check_kept(name, parameter)
    return ViewTrace(targets=watch.targets, mixed_sources=watch.mixed)


class _Watch(TorchDispatchMode):
    """Follows storages through every operation of a loader."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        super().__init__()
        self.targets = {name: ViewsOf(size=p.numel()) for name, p in parameters.items()}
        self.mixed: list[set[int]] = []
        self._kept: dict[int, torch.UntypedStorage] = {}  # or an address could be met again
        self._target_of = {self._id(parameter): name for name, parameter in parameters.items()}
        self._source_of: dict[int, int] = {}
        self._dtypes: list[str] = []
        self._casts: set[int] = set()
        """Storages of whole sources after a cast to the dtype that they are sent in, which changes nothing."""
        self._derived: dict[int, set[int]] = {}

    def given(self, manifest: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        for index, spec in enumerate(manifest):
            tensor = without_memory(spec.shape)
            self._source_of[self._id(tensor)] = index
            self._dtypes.append(spec.dtype)
            yield spec.name, tensor

    def check_kept(self, name: str, parameter: torch.nn.Parameter) -> None:
        """A loader that puts another tensor in a parameter's place wrote past us."""
        if self._target_of.get(self._id(parameter)) != name or (
            parameter.numel() != self.targets[name].size
        ):
            self.targets[name].rearranged = True
            self.targets[name].sources |= self._origin(parameter)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = list(_tensors([*args, *kwargs.values()]))
        sources = set().union(*(self._origin(tensor) for tensor in given))
        if len(sources) > 1 and self._id(given[0]) not in self._target_of:
            self.mixed.append(sources)
        for tensor in _written(func._schema, args, kwargs):
            self._write(func._schema.name, tensor, args, sources)
        if func._schema.name == "aten::_to_copy":
            self._note_cast(args[0], result)
        for tensor in _tensors([result]):
            key = self._id(tensor)
            if key not in self._target_of and key not in self._source_of:
                self._derived.setdefault(key, set()).update(sources)
        return result

    def _write(self, operation: str, target: torch.Tensor, args: Any, sources: set[int]) -> None:
        if not target.numel():
            return
        key = self._id(target)
        if (name := self._target_of.get(key)) is not None:
            self._write_target(self.targets[name], operation, target, args, sources)
        elif (index := self._source_of.pop(key, None)) is not None:
            self._derived[key] = {index, *sources}  # no source any more: the loader changed it
        else:
            self._derived.setdefault(key, set()).update(sources)

    def _write_target(
        self, seen: ViewsOf, operation: str, target: torch.Tensor, args: Any, sources: set[int]
    ) -> None:
        seen.sources |= sources
        if target.dtype == torch.int64:
            if operation == "aten::copy_" and self._is_source_view(args[1]):
                source_region, target_region = coalesced(
                    region_of(args[1].expand(target.shape)), region_of(target)
                )
                seen.pieces.append(
                    ShardCopy(
                        source=self._source_of[self._id(args[1])],
                        source_region=source_region,
                        target_region=target_region,
                    )
                )
                return
            if operation in _FILLS and not any(isinstance(each, torch.Tensor) for each in args[1:]):
                value = float(args[1]) if operation == "aten::fill_" else 0.0
                seen.pieces.append(ShardFill(value=value, target_region=merged(region_of(target))))
                return
        seen.rearranged = True

    def _is_source_view(self, tensor: torch.Tensor) -> bool:
        key = self._id(tensor)
        return key in self._source_of and (tensor.dtype == torch.int64 or key in self._casts)

    def _note_cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Loaders cast small tensors (a router's bias) to what their parameter needs, needed or not."""
        if not self._is_source_view(source):
            return
        index = self._source_of[self._id(source)]
        whole = source.numel() * source.element_size() == source.untyped_storage().nbytes()
        if not whole or not source.is_contiguous() or not result.is_contiguous():
            return
        if str(result.dtype).removeprefix("torch.") == self._dtypes[index]:
            self._source_of[self._id(result)] = index
            self._casts.add(self._id(result))

    def _origin(self, tensor: torch.Tensor) -> set[int]:
        key = self._id(tensor)
        if key in self._source_of:
            return {self._source_of[key]}
        return self._derived.get(key, set())

    def _id(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._kept.setdefault(storage._cdata, storage)
        return int(storage._cdata)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _written(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments that an operation writes to, by its schema."""
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from _tensors([value])
