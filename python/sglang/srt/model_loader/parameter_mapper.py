"""Which parameter of a model a Hugging Face tensor goes into, and how many such tensors fill it.

Read out of the model's own `load_weights`: a copy of the module tree, whose parameters note who calls their loader and
hold no data, is fed one name at a time. No shape is needed and no table per model. `weight_sync/shards.py` traces
elements and needs every tensor's shape; this answers only names and counts, which is what a client that stages tensors
until a parameter is complete asks for.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import torch

# A gated expert's first matrix is made of two checkpoint matrices; these are FusedMoE's names of the three.
_GATED_EXPERT_SHARDS = {"w1": 2, "w3": 2, "w2": 1}


class UnmappableNameError(RuntimeError):
    """The model's loader can't be followed for this name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MappedParameter:
    """Where one Hugging Face tensor goes. `num_shards * num_local_experts` such tensors fill the parameter."""

    sglang_name: str
    """The parameter's name. For a name that this rank's loader skips (a tied head, another pipeline stage's layer) the
    name itself, which is then no parameter of the model: check before use, as a loader does."""
    num_shards: int = 1
    """Checkpoint tensors that are fused into the parameter (3 for q, k and v), for each expert if there are experts."""
    num_local_experts: int = 1
    """Experts of this rank that share the parameter; 1 without experts. Tensors of experts that live on other ranks map
    to the same parameter and are not counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LoaderCall:
    """One call of a parameter's weight loader."""

    parameter: str
    sources: frozenset[str]
    """The fed names that the loaded tensor was made of."""
    shard: Any
    expert: int | None


class ParameterMapper:
    """Maps names for one model. Made by `from_model`; any thread may call `map`.

    The model is not touched, may be in use, and may have been built in a `ParallelismContext` that has been left.
    """

    @classmethod
    def from_model(cls, model: torch.nn.Module) -> ParameterMapper:
        """Raises ValueError if the model has no `load_weights`."""
        if not callable(getattr(model, "load_weights", None)):
            raise ValueError(
                f"{type(model).__name__} has no load_weights, so nothing says what its names map to"
            )
        return cls(model)

    def __init__(self, model: torch.nn.Module) -> None:
        self._calls: list[_LoaderCall] = []
        self._shadow, self._owners = _shadow_of(model, self._calls)
        self._known: dict[str, MappedParameter] = {}
        self._lock = threading.Lock()

    def map(self, hf_name: str) -> MappedParameter:
        """Where the tensor called `hf_name` in a checkpoint goes.

        Raises:
            UnmappableNameError: the loader failed on the name, or does something with it that can't be followed.
        """
        with self._lock:
            if hf_name not in self._known:
                self._known[hf_name] = self._traced(hf_name)
            return self._known[hf_name]

    def _traced(self, hf_name: str) -> MappedParameter:
        calls = self._feed([hf_name]) or self._feed_with_partner(hf_name)
        if not calls:
            return MappedParameter(sglang_name=hf_name)
        names = {call.parameter for call in calls}
        if len(names) > 1:
            raise UnmappableNameError(
                f"{hf_name!r} goes into several parameters: {sorted(names)!r}"
            )
        name = names.pop()
        owner = self._owners[name]
        experts = {call.expert for call in calls}
        shards = {call.shard for call in calls}
        return MappedParameter(
            sglang_name=name,
            num_shards=max(len(call.sources) for call in calls) * _shards_left(owner, shards),
            num_local_experts=1 if None in experts or len(experts) > 1 else owner.num_local_experts,
        )

    def _feed_with_partner(self, hf_name: str) -> list[_LoaderCall]:
        """Some loaders keep a tensor back until its partner has come (DeepSeek's q_a and kv_a).

        They make the partner's name out of the one they got, so each name made of it is offered together with it.
        """
        for partner in sorted(self._derived_names - {hf_name}):
            try:
                calls = self._feed([hf_name, partner])
            except UnmappableNameError:
                continue  # the loader knows no such checkpoint tensor: a name that it made for another purpose
            if calls := [call for call in calls if hf_name in call.sources]:
                return calls
        return []

    def _feed(self, names: list[str]) -> list[_LoaderCall]:
        self._calls.clear()
        self._derived_names: set[str] = set()
        try:
            self._shadow.load_weights(
                (_WatchedName.watched(name, self._derived_names), _Probe.of(name)) for name in names
            )
        except Exception as error:
            raise UnmappableNameError(
                f"{type(self._shadow).__name__}.load_weights could not be followed for {names!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return list(self._calls)


class _WatchedName(str):
    """A tensor's name that notes the names which a loader makes of it."""

    __slots__ = ("derived",)
    derived: set[str]

    @classmethod
    def watched(cls, name: str, derived: set[str]) -> _WatchedName:
        self = cls(name)
        self.derived = derived
        return self

    def replace(self, *args: Any) -> _WatchedName:
        name = str(self).replace(*args)
        self.derived.add(name)
        return self.watched(name, self.derived)


def _shards_left(owner: torch.nn.Module, shards: set[Any]) -> int:
    """Of how many shards like these a parameter of `owner` consists."""
    shard = next(iter(shards))
    if shard is None:
        return 1
    if hasattr(owner, "num_local_experts"):
        gated = owner.moe_runner_config.is_gated and len(shards) == 1
        return _GATED_EXPERT_SHARDS[shard] if gated else 1
    covered = sum(len(each) if isinstance(each, tuple) else 1 for each in shards)
    return len(owner.output_sizes) // covered


class _Probe(torch.Tensor):
    """A tensor that only knows which names it was made of, through whatever a loader does with it."""

    sources: frozenset[str]

    @classmethod
    def of(cls, *names: str) -> _Probe:
        probe: _Probe = torch.empty(1).as_subclass(cls)
        probe.sources = frozenset(names)
        return probe

    @classmethod
    def __torch_function__(
        cls, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        names = frozenset[str]().union(*(probe.sources for probe in _probes_in([args, kwargs])))
        return _tagged(result, names)


def _probes_in(value: Any) -> Iterator[_Probe]:
    if isinstance(value, _Probe):
        yield value
    elif isinstance(value, dict):
        yield from _probes_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _probes_in(each)


def _tagged(value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, torch.Tensor):
        return _Probe.of(*names) if not isinstance(value, torch.nn.Parameter) else value
    if type(value) in (list, tuple):
        return type(value)(_tagged(each, names) for each in value)
    return value


def _shadow_of(
    model: torch.nn.Module, calls: list[_LoaderCall]
) -> tuple[Any, dict[str, torch.nn.Module]]:
    """The module tree with parameters and buffers that hold nothing and note the calls of their loaders.

    Returns the tree's root and each parameter's owner, by name.
    """
    modules: dict[int, torch.nn.Module] = {}
    tensors: dict[int, torch.Tensor] = {}

    def shadow_tensor(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            empty: torch.Tensor = torch.empty_like(tensor.detach(), device="meta")
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, requires_grad=False)
            tensors[id(tensor)] = empty
        return tensors[id(tensor)]

    def shadow_module(module: torch.nn.Module | None) -> torch.nn.Module | None:
        if module is None:
            return None
        if id(module) not in modules:
            shadow = modules[id(module)] = module.__class__.__new__(module.__class__)
            shadow.__dict__ = dict(module.__dict__)
            shadow._parameters = {k: shadow_tensor(p) for k, p in module._parameters.items()}
            shadow._buffers = {k: shadow_tensor(b) for k, b in module._buffers.items()}
            shadow._modules = {k: shadow_module(m) for k, m in module._modules.items()}
            if hasattr(module, "post_load_weights"):
                # It derives tensors from what was loaded and writes them through references shared with `module`.
                shadow.__dict__["post_load_weights"] = lambda *args, **kwargs: None
        return modules[id(module)]

    root = shadow_module(model)
    assert root is not None
    owners: dict[str, torch.nn.Module] = {}
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        owners[name] = root.get_submodule(name.rpartition(".")[0])
        setattr(tensor, "weight_loader", _noting_loader(name, calls))  # noqa: B010
    return root, owners


def _noting_loader(parameter: str, calls: list[_LoaderCall]) -> Any:
    def note(_: torch.Tensor, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        # `(param, tensor)`, `(param, tensor, shard)` or, for experts, `(param, tensor, name, shard, expert)`.
        expert = kwargs.get("expert_id", args[2] if len(args) > 2 else None)
        named = kwargs.get("shard_id", kwargs.get("loaded_shard_id"))
        shard = named if named is not None or not args else args[0 if expert is None else 1]
        sources = loaded.sources if isinstance(loaded, _Probe) else frozenset[str]()
        calls.append(_LoaderCall(parameter=parameter, sources=sources, shard=shard, expert=expert))

    return note
