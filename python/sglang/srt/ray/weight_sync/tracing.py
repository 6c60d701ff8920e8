"""A copy of a model's module tree into which a loader may load anything without touching the model.

The copy shares everything with the model except its tensors: parameters are replaced by int64 ones of the caller's
choice (memory-less `meta` tensors, or real ones that hold element numbers), and tensors derived from weights have no
memory, so that a loader can't write into the live ones. `view_trace` and `number_trace` load into such copies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang.srt.ray.weight_sync.errors import UnplannableModelError

MakeNumbers = Callable[[str, torch.nn.Parameter], torch.Tensor]


def without_memory(shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def tracing_copy(model: torch.nn.Module, make: MakeNumbers, *, real_buffers: bool = False) -> Any:
    """The module tree of `model` with parameters that `make` gives (name, parameter -> int64 tensor of its shape).

    Args:
        real_buffers: keep the values of buffers (a loader may look at them) instead of giving up their memory.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters: dict[int, torch.nn.Parameter] = {}
    modules: dict[int, torch.nn.Module] = {}

    def copied_parameter(parameter: torch.nn.Parameter | None) -> torch.nn.Parameter | None:
        if parameter is None:
            return None
        if id(parameter) not in parameters:
            numbers = torch.nn.Parameter(make(names[id(parameter)], parameter), requires_grad=False)
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
            buffers = copy.deepcopy if real_buffers else _untouchable
            clone._buffers = {k: buffers(b) for k, b in module._buffers.items()}
            clone._modules = {k: copied_module(m) for k, m in module._modules.items()}
        return modules[id(module)]

    tracer: Any = copied_module(model)
    # What is derived from the weights is no concern of a plan, and MLA's would be copied into the live model.
    tracer.post_load_weights = lambda *_, **__: None
    return tracer


def load_into(tracer: Any, numbers: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Run the model's own loader over the named numbers.

    Raises:
        UnplannableModelError: the loader fails with them, naming the tensor.
    """
    given: list[str] = []

    def remembered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in numbers:
            given.append(name)
            yield name, tensor

    try:
        tracer.load_weights(remembered())
    except Exception as error:  # of any model's own code
        does = "does not know a name" if isinstance(error, KeyError) else "computes with the weights"
        raise UnplannableModelError(
            f"the loader of {type(tracer).__name__} {does} it is given ({type(error).__name__}: {error}), so what it "
            f"makes of them can't be planned; it failed at or before {given[-1:]!r}",
            tensor=given[-1] if given else None,
            phase="plan",
        ) from error


def _untouchable(attribute: Any) -> Any:
    return attribute.to("meta") if isinstance(attribute, torch.Tensor) else attribute
