"""Plans that are read out of a loader: applied to weights, they give what the loader gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy_model import Fused, weights_of

from sglang.srt.ray.weight_sync import planning
from sglang.srt.ray.weight_sync.errors import UnplannableModelError
from sglang.srt.ray.weight_sync.layout import TensorSpec, WeightLayout
from sglang.srt.ray.weight_sync.number_trace import _rows, copies_of
from sglang.srt.ray.weight_sync.planning import trace_shard_plan
from sglang.srt.ray.weight_sync.regions import coalesced, covered_elements
from sglang.srt.ray.weight_sync.shards import Region, ShardCopy, ShardPiece, ShardPlan

Weights = dict[str, torch.Tensor]


def applied(pieces: Iterable[ShardPiece], sources: list[torch.Tensor], target: torch.Tensor):
    flat = [source.contiguous().view(-1) for source in sources]
    for piece in pieces:
        piece.apply(flat, target.view(-1))
    return target


def _runs(codes: np.ndarray) -> list[ShardCopy]:
    return list(copies_of(list(_rows(codes))))


# Runs: indexing is the oracle


@st.composite
def pieces(draw) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """A flat result made of slices, transposes, steps and repeats of up to three sources."""
    takes = draw(
        st.lists(
            st.tuples(
                st.integers(0, 2),
                st.booleans(),
                st.slices(8),
                st.slices(6),
                st.sampled_from([1, 1, 1, 2]),
            ),
            min_size=1,
            max_size=6,
        ).filter(lambda takes: all((t[2].step or 1) > 0 and (t[3].step or 1) > 0 for t in takes))
    )

    def take(sources: list[torch.Tensor]) -> torch.Tensor:
        parts = []
        for source, transposed, rows, columns, times in takes:
            piece = sources[source][rows, columns]
            piece = piece.T if transposed else piece
            parts += [piece.reshape(-1)] * times
        return torch.cat(parts)

    return take


@given(take=pieces())
@settings(max_examples=100, deadline=None)
def test_runs_applied_to_values_equal_the_indexing_that_made_the_numbers(take):
    numbers = [torch.arange(48).view(8, 6) + (i << 40) for i in range(3)]
    values = [torch.randn(8, 6) for _ in range(3)]
    runs = _runs(take(numbers).numpy())
    expected = take(values)
    assert torch.equal(applied(runs, values, torch.full_like(expected, -7.0)), expected)


@given(order=st.permutations(range(24)))
def test_any_permutation_of_elements_can_be_planned(order: list[int]):
    values = torch.randn(24)
    runs = _runs(np.array(order, dtype=np.int64))
    assert torch.equal(applied(runs, [values], torch.empty(24)), values[list(order)])


def test_runs_are_few_where_the_pattern_is_regular():
    numbers = torch.arange(1 << 12).view(64, 64)
    assert len(_runs(numbers.reshape(-1).numpy())) == 1
    assert len(_runs(numbers[:, :32].reshape(-1).numpy())) == 1
    assert len(_runs(numbers.T.reshape(-1).numpy())) == 64
    assert (_runs(np.empty(0, dtype=np.int64))) == []


def test_a_run_converts_dtype_and_honours_where_a_view_starts():
    run = ShardCopy(
        source=0,
        source_region=Region(start=1, shape=(3,), strides=(1,)),
        target_region=Region(start=2, shape=(3,), strides=(1,)),
    )
    source, target = torch.arange(10.0)[4:], torch.zeros(10, dtype=torch.bfloat16)[3:]
    run.apply([source], target)
    assert target.tolist() == [0, 0, 5, 6, 7, 0, 0]


# Plans: the loader itself is the oracle


def plan_of(model: torch.nn.Module, weights: Weights) -> ShardPlan:
    manifest = [TensorSpec.of(name, tensor) for name, tensor in weights.items()]
    return trace_shard_plan(model, manifest, WeightLayout.of_model(model).fingerprint)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_a_plan_gives_every_parameter_what_the_loader_gives(rank: int, ranks: int):
    model = Fused(rank, ranks)
    weights = weights_of(model)
    plan = plan_of(model, weights)
    assert (plan.missing_targets, plan.unused_sources, plan.computed_targets) == ((), (), ())
    model.load_weights(weights.items())
    for name, parameter in model.named_parameters():
        made = applied(plan.targets[name], list(weights.values()), torch.zeros_like(parameter.data))
        assert torch.equal(made, parameter.data), name
    assert set(plan.targets) == {name for name, _ in model.named_parameters()}
    assert "head.weight" not in plan.targets
    assert len(plan.targets["qkv_proj.weight"]) == 3


def test_planning_leaves_the_model_as_it_is():
    model = Fused()
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    plan_of(model, weights_of(model))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.data_ptr() == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_a_tensor_that_no_parameter_takes_is_named():
    model = Fused()
    weights = weights_of(model) | {"rotary.inv_freq": torch.randn(4)}
    assert plan_of(model, weights).unused_sources == ("rotary.inv_freq",)


def test_a_parameter_that_nobody_sends_is_named_even_when_only_a_part_is_missing():
    model = Fused()
    weights = weights_of(model)
    del weights["norm.weight"], weights["k_proj.bias"]
    plan = plan_of(model, weights)
    assert plan.missing_targets == ("qkv_proj.bias", "norm.weight")
    assert not set(plan.missing_targets) & set(plan.targets)


def test_a_tensor_that_is_loaded_twice_counts_by_what_stands_at_the_end():
    model = Fused()
    weights = weights_of(model) | {"head.weight": torch.randn(6, 8)}
    plan = plan_of(model, weights)
    # The tied head is no parameter of its own, so its tensor goes nowhere.
    assert plan.unused_sources == ("head.weight",)


def computing(change: Callable[[torch.Tensor], torch.Tensor], *, half: bool) -> type[Fused]:
    class Computing(Fused):
        def load_norm(self, parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
            changed = change(loaded)
            parameter.data[: 4 if half else 8].copy_(changed[: 4 if half else 8])
            if half:
                parameter.data[4:].copy_(loaded[4:])

    return Computing


@pytest.mark.parametrize("half", [False, True], ids=["whole", "first half only"])
@pytest.mark.parametrize(
    "change",
    [lambda w: w + 1, lambda w: w - 1, lambda w: -w, lambda w: w * 2, lambda w: w * 0 + 3],
    ids=["plus one", "minus one", "negated", "doubled", "constant"],
)
def test_a_loader_that_computes_is_found_out(change, half: bool):
    # Half: where a rank takes the first half of a tensor, "plus one" names an element that exists.
    model = computing(change, half=half)()
    plan = plan_of(model, weights_of(model))
    assert plan.computed_targets == ("norm.weight",)
    assert "norm.weight" not in plan.targets


class Casting(torch.nn.Module):
    """Its loader casts what it is given to `dtypes`, one after the other."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.dtypes = dtypes
        self.table = torch.nn.Parameter(torch.empty(301, dtype=dtypes[-1]))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, loaded in weights:
            for dtype in self.dtypes:
                loaded = loaded.to(dtype)
            self.table.data[:200].copy_(loaded[:200])
            self.table.data[200:].copy_(loaded[200:])


def test_a_loader_that_goes_through_a_narrow_dtype_is_found_out():
    # Above 256 a bfloat16 holds every other integer only: the numbers come back as those of a neighbour.
    for dtypes in ((torch.bfloat16,), (torch.float32, torch.bfloat16, torch.float32)):
        model = Casting(*dtypes)
        manifest = [TensorSpec(name="table", shape=(301,), dtype="float32")]
        assert trace_shard_plan(model, manifest, "").computed_targets == ("table",), dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cast_to_the_dtype_that_was_sent_is_none(dtype: torch.dtype):
    model, sent = Casting(dtype, dtype), torch.randn(301).to(dtype)
    plan = plan_of(model, {"table": sent})
    assert plan.computed_targets == ()
    made = applied(plan.targets["table"], [sent], torch.zeros_like(model.table.data))
    assert torch.equal(made, sent)


def test_an_empty_manifest_sends_nothing_to_anybody():
    model = Fused()
    plan = plan_of(model, {})
    assert set(plan.missing_targets) == {name for name, _ in model.named_parameters()}


def test_a_tensor_too_large_for_the_numbers_is_refused_by_name():
    manifest = [TensorSpec(name="huge", shape=(1 << 20, 1 << 20), dtype="int8")]
    with pytest.raises(ValueError, match="'huge' has 1099511627776 elements"):
        trace_shard_plan(Fused(), manifest, "")


def test_a_loader_that_rejects_a_shape_says_so():
    model = Fused()
    weights = weights_of(model) | {"norm.weight": torch.randn(9)}
    with pytest.raises(RuntimeError, match=r"9"):
        plan_of(model, weights)


class DerivesAfterLoading(torch.nn.Module):
    """Like MLA: a plain tensor that is derived from a weight, written in place by the loader."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.derived = torch.full((4,), 7.0)

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)
            self.derived.copy_(tensor)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        raise AssertionError("a plan derives nothing")


def test_tensors_that_a_loader_derives_stay_as_they_are_in_the_live_model():
    model = DerivesAfterLoading()
    manifest = [TensorSpec(name="weight", shape=(4,), dtype="float32")]
    plan = trace_shard_plan(model, manifest, "layout")
    assert list(plan.targets) == ["weight"]
    assert model.derived.tolist() == [7.0] * 4
    assert model.weight.tolist() == [1.0] * 4


class AddsInPlace(torch.nn.Module):
    """Like Gemma 1: adds a float to what it is given, which whole numbers do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            tensor += 1.5
            self.norm.data.copy_(tensor)


def test_a_loader_that_numbers_do_not_survive_is_refused_by_name():
    manifest = [TensorSpec(name="norm", shape=(4,), dtype="float32")]
    with pytest.raises(UnplannableModelError, match="AddsInPlace computes") as refused:
        trace_shard_plan(AddsInPlace(), manifest, "layout")
    assert refused.value.tensor == "norm"


class Rearranging(torch.nn.Module):
    """Pads a vocabulary as upstream's embeddings do, interleaves two tensors, and copies a third as it is."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("embed", (8, 4)), ("pairs", (6, 4)), ("plain", (4, 4))):
            setattr(self, name, torch.nn.Parameter(torch.full(shape, 9.0), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        if "embed" in given:
            self.embed.data[:5].copy_(given["embed"])
            self.embed.data[5:].fill_(0)
        self.pairs.data.copy_(torch.stack([given["even"], given["odd"]], dim=1).reshape(6, 4))
        self.plain.data.copy_(given["plain"].t())


def rearranging_weights() -> Weights:
    shapes = {"embed": (5, 4), "even": (3, 4), "odd": (3, 4), "plain": (4, 4)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_padding_is_planned_and_only_what_is_rearranged_gets_numbered():
    model, weights = Rearranging(), rearranging_weights()
    plan = plan_of(model, weights)
    assert (plan.numbered_targets, plan.computed_targets) == (("pairs",), ())
    model.load_weights(weights.items())
    for name, parameter in model.named_parameters():
        made = applied(plan.targets[name], list(weights.values()), torch.full_like(parameter, -7.0))
        assert torch.equal(made, parameter.data), name


def test_numbering_in_groups_gives_what_numbering_at_once_gives(monkeypatch):
    whole = plan_of(Rearranging(), rearranging_weights())
    monkeypatch.setattr(planning, "NUMBERED_ELEMENTS_AT_ONCE", 1)
    assert plan_of(Rearranging(), rearranging_weights()) == whole


def test_a_parameter_that_is_only_padded_is_named_as_missing():
    class OnlyPads(Rearranging):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            self.embed.data.fill_(0)

    weights = rearranging_weights()
    del weights["embed"]
    assert plan_of(OnlyPads(), weights).missing_targets == ("embed",)


def test_a_constant_on_top_of_what_was_sent_is_found_out():
    class Wipes(Rearranging):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            self.embed.data[4:].fill_(0)

    assert plan_of(Wipes(), rearranging_weights()).computed_targets == ("embed",)


def test_a_loader_that_looks_at_values_is_still_planned():
    class Looks(Rearranging):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            given = {name: tensor for name, tensor in weights if tensor.max() > 0}
            super().load_weights(given.items())

    model, weights = Looks(), rearranging_weights()
    plan = plan_of(model, weights)
    assert set(plan.numbered_targets) == {"embed", "pairs", "plain"}
    assert set(plan.targets) == {
        "pairs",
        "plain",
    }  # padding can't be told from a computed value by numbers


def test_a_loader_that_looks_at_values_of_too_many_elements_is_refused():
    class Looks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.empty(1 << 20, 1 << 18, device="meta"))

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            raise ValueError([tensor.sum().item() for _, tensor in weights])

    manifest = [TensorSpec(name="table", shape=(1 << 20, 1 << 18), dtype="float32")]
    with pytest.raises(UnplannableModelError, match=r"274877906944 elements .* GB are free"):
        trace_shard_plan(Looks(), manifest, "")


def test_a_plan_of_274_billion_elements_needs_no_memory_for_them():
    class Huge(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shape = (1 << 20, 1 << 18)
            self.table = torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for (_, tensor), half in zip(weights, self.table.data.chunk(2, dim=1), strict=True):
                half.copy_(tensor.t())

    manifest = [TensorSpec(name=name, shape=(1 << 17, 1 << 20), dtype="bfloat16") for name in "ab"]
    plan = trace_shard_plan(Huge(), manifest, "")
    assert [len(pieces) for pieces in plan.targets.values()] == [2]
    assert (plan.missing_targets, plan.numbered_targets) == ((), ())


# Regions: a bitmap is the oracle


@st.composite
def regions(draw) -> list[Region]:
    def region() -> Region:
        shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        strides = [draw(st.sampled_from([1, 2, 4, 8, 16])) for _ in shape]
        return Region(start=draw(st.integers(0, 20)), shape=tuple(shape), strides=tuple(strides))

    return [region() for _ in range(draw(st.integers(0, 4)))]


@given(given=regions())
@settings(deadline=None)
def test_covered_elements_are_those_that_a_bitmap_has(given: list[Region]):
    seen = torch.zeros(256, dtype=torch.bool)
    for region in given:
        region.of(seen)[...] = True
    assert covered_elements(given, 256) == int(seen.sum())
    for region in given:
        source, target = coalesced(region, region)
        alone, again = torch.zeros(256), torch.zeros(256)
        region.of(alone)[...] = 1
        target.of(again)[...] = 1
        assert source == target
        assert torch.equal(alone, again)
