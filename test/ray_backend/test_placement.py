"""Which group an engine uses and which bundle each rank gets, without a cluster."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.ray import placement
from sglang.srt.ray.placement import (
    PlacementError,
    actor_resources,
    assign_bundles,
    bundle_indices_from_environment,
    choose_group,
    device_resource,
    use_placement_group,
)

CPU, GPU = {"CPU": 1.0}, {"GPU": 1.0}


def assign(bundles: list[dict[str, float]], ranks: int, **options: Any) -> list[int]:
    defaults = {"resource": "CPU", "one_device_per_bundle": True}
    return assign_bundles(bundles, ranks=ranks, **(defaults | options))


# Shapes of groups


def test_ranks_take_the_first_bundles_that_have_the_resource():
    assert assign([{"memory": 1.0}, CPU, {"CPU": 0.5}, CPU, CPU], 2) == [1, 3]
    assert assign([CPU, GPU, {"CPU": 1.0, "GPU": 1.0}], 2, resource="GPU") == [1, 2]


def test_a_node_sized_bundle_holds_as_many_ranks_as_it_has_devices():
    options = {"resource": "GPU", "one_device_per_bundle": False}
    assert assign([{"CPU": 1.0, "GPU": 4.0}] * 2, 8, **options) == [0] * 4 + [1] * 4
    assert assign([{"GPU": 4.0}], 2, **options) == [0, 0]
    assert assign([{"CPU": 3.0}], 3, one_device_per_bundle=False) == [0, 0, 0]


def test_a_group_of_single_devices_never_gets_two_ranks_in_a_bundle():
    assert assign([{"CPU": 4.0}, {"CPU": 4.0}], 2) == [0, 1]
    with pytest.raises(ValueError, match=r"needed 3 .* found 2 in 2 bundle\(s\)"):
        assign([{"CPU": 4.0}, {"CPU": 4.0}], 3)


def test_chosen_indices_give_rank_order():
    assert assign([CPU] * 4, 2, indices=[3, 1]) == [3, 1]
    assert assign([{"GPU": 8.0}], 8, resource="GPU", one_device_per_bundle=False, indices=[0]) == (
        [0] * 8
    )


def test_bundles_of_the_engines_own_node_come_first():
    nodes = ["n1", "n2", "n1", "n2"]
    assert assign([CPU] * 4, 3, nodes=nodes, engine_node="n2") == [1, 3, 0]
    assert assign([CPU] * 4, 3, nodes=nodes, engine_node="n1") == [0, 2, 1]


# Refusals


@pytest.mark.parametrize(
    ("bundles", "ranks", "options", "text"),
    [
        ([CPU], 2, {}, r"too small: needed 2 .* one CPU each, found 1 in 1 bundle\(s\): \[\{'CPU'"),
        ([], 1, {}, r"needed 1 .* found 0 in 0 bundle\(s\): \[\]"),
        ([CPU], 1, {"resource": "GPU"}, r"needed 1 bundle place\(s\) with one GPU each, found 0"),
        ([CPU] * 2, 2, {"indices": [0]}, r"INDICES=\[0\] gives 1 place\(s\).*needed exactly 2"),
        ([CPU] * 3, 2, {"indices": [0, 1, 2]}, r"gives 3 place\(s\).*needed exactly 2"),
        ([CPU] * 2, 2, {"indices": [1, 1]}, r"has duplicates: \[1, 1\]"),
        ([CPU] * 2, 2, {"indices": [0, 2]}, r"names \[2\], but the group has bundles 0 to 1"),
        ([CPU] * 2, 1, {"indices": [-1]}, r"names \[-1\], but the group has bundles 0 to 1"),
        ([CPU, GPU], 1, {"indices": [1]}, r"bundle 1 has no CPU: \{'GPU': 1.0\}"),
        ([{"GPU": 2.0}], 1, {"resource": "GPU"}, r"bundle 0 has 2 GPUs where one is asked"),
        (
            [CPU] * 2,
            1,
            {"indices": [0], "nodes": ["n1", "n2"], "engine_node": "n2"},
            r"rank 0 would run on node 'n1' \(bundle 0\).*'n2'.*INDICES \(here: \[1\]\)",
        ),
        (
            [CPU],
            1,
            {"nodes": ["n1"], "engine_node": "n2"},
            r"rank 0 would run on node 'n1'.*\(here: \[\]\)",
        ),
    ],
)
def test_a_group_that_cannot_hold_the_engine_is_refused_with_needs_and_finds(
    bundles: list[dict[str, float]], ranks: int, options: dict[str, Any], text: str
):
    with pytest.raises(ValueError, match=text):
        assign(bundles, ranks, **options)


# The environment


@pytest.mark.parametrize(("text", "indices"), [("3,1", [3, 1]), ("0", [0]), (" 2 , 0", [2, 0])])
def test_bundle_indices_are_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, indices: list[int]
):
    monkeypatch.setenv("SGLANG_RAY_BUNDLE_INDICES", text)
    assert bundle_indices_from_environment() == indices


def test_no_bundle_indices_leave_the_choice_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SGLANG_RAY_BUNDLE_INDICES", raising=False)
    assert bundle_indices_from_environment() is None


@pytest.mark.parametrize("text", ["a", "1,", "1;2", "0.5"])
def test_bundle_indices_that_are_no_list_of_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
):
    monkeypatch.setenv("SGLANG_RAY_BUNDLE_INDICES", text)
    with pytest.raises(ValueError, match=f"SGLANG_RAY_BUNDLE_INDICES='{text}'"):
        bundle_indices_from_environment()


def test_a_rank_takes_a_cpu_on_a_cpu_and_a_gpu_anywhere_else():
    assert device_resource("cpu") == "CPU"
    assert actor_resources("cpu") == {"num_cpus": 1, "num_gpus": 0}
    for device in ("cuda", "xpu"):
        assert device_resource(device) == "GPU"
        assert actor_resources(device) == {"num_cpus": 0, "num_gpus": 1}


def test_a_rank_takes_the_share_of_a_gpu_that_the_environment_gives(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("SGLANG_RAY_GPUS_PER_RANK", "0.6")
    assert actor_resources("cuda") == {"num_cpus": 0, "num_gpus": 0.6}
    assert actor_resources("cpu") == {"num_cpus": 1, "num_gpus": 0}


@pytest.mark.parametrize("text", ["0", "-0.5", "1.5", "half", "nan"])
def test_what_is_no_share_of_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("SGLANG_RAY_GPUS_PER_RANK", text)
    with pytest.raises(ValueError, match=f"SGLANG_RAY_GPUS_PER_RANK='{text}'"):
        actor_resources("cuda")


def test_a_rank_with_a_share_fits_beside_a_trainer_and_nowhere_else():
    options = {"resource": "GPU", "share": 0.6}
    assert assign([{"GPU": 0.6}, {"GPU": 0.5}, {"GPU": 1.0 - 0.4}], 2, **options) == [0, 2]
    with pytest.raises(ValueError, match="too small"):
        assign([{"GPU": 0.6}, {"GPU": 0.5}], 2, **options)


def test_ranks_with_a_share_never_meet_on_a_device_of_a_larger_bundle():
    with pytest.raises(ValueError, match="bundles of one GPU each"):
        assign([{"GPU": 8.0}], 8, resource="GPU", share=0.5, one_device_per_bundle=False)


# Which group


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ray's own answers, as the test sets them."""
    answers = SimpleNamespace(group=None, made=[], ready=True)

    def create(bundles: list[dict[str, float]], strategy: str) -> SimpleNamespace:
        group = SimpleNamespace(bundles=bundles, strategy=strategy, removed=False)
        answers.made.append(group)
        return group

    def wait(chosen: placement.ChosenGroup) -> None:
        if not answers.ready:
            raise PlacementError("not ready")

    monkeypatch.setattr(placement.ray.util, "get_current_placement_group", lambda: answers.group)
    monkeypatch.setattr(placement, "create_placement_group", create)
    monkeypatch.setattr(placement, "remove_placement_group", lambda g: setattr(g, "removed", True))
    monkeypatch.setattr(placement, "_wait_ready", wait)
    return answers


def choose(explicit: Any = None, **options: Any) -> placement.ChosenGroup:
    return choose_group(explicit, **({"device": "cpu", "ranks": 2, "nodes": 1} | options))


def test_the_keyword_wins_over_the_context_which_wins_over_rays_current_group(
    current: SimpleNamespace,
):
    explicit, ambient, current.group = object(), object(), object()
    with use_placement_group(ambient):
        assert (choose(explicit).group, choose(explicit).source) == (explicit, "keyword")
        assert (choose().group, choose().source) == (ambient, "context")
    chosen = choose()
    assert (chosen.group, chosen.source) == (current.group, "current")
    assert not chosen.one_device_per_bundle
    assert current.made == []


def test_only_a_group_that_the_engine_made_is_removed_by_it(current: SimpleNamespace):
    own = choose()
    assert own.source == "own"
    assert own.owned
    own.remove()
    assert current.made[0].removed
    theirs = SimpleNamespace(removed=False)
    choose(theirs).remove()
    assert not theirs.removed


@pytest.mark.parametrize(
    ("options", "bundles", "strategy"),
    [
        ({"device": "cpu", "ranks": 2, "nodes": 1}, [{"CPU": 2.0}], "STRICT_PACK"),
        ({"device": "cuda", "ranks": 4, "nodes": 1}, [{"CPU": 1.0, "GPU": 4.0}], "STRICT_PACK"),
        (
            {"device": "cuda", "ranks": 16, "nodes": 2},
            [{"CPU": 1.0, "GPU": 8.0}] * 2,
            "STRICT_SPREAD",
        ),
    ],
)
def test_an_own_group_has_one_bundle_a_node_with_a_device_a_rank(
    current: SimpleNamespace, options: dict[str, Any], bundles: Any, strategy: str
):
    made = choose(**options).group
    assert (made.bundles, made.strategy) == (bundles, strategy)


def test_an_own_group_that_does_not_get_ready_is_removed(current: SimpleNamespace):
    current.ready = False
    with pytest.raises(PlacementError):
        choose()
    assert current.made[0].removed


def test_the_context_belongs_to_the_thread_that_set_it(current: SimpleNamespace):
    seen: dict[str, Any] = {}
    both_inside = threading.Barrier(2)

    def launch(name: str) -> None:
        with use_placement_group(name):  # any object stands for a group here
            both_inside.wait(10)
            seen[name] = choose().group
            both_inside.wait(10)

    def outside() -> None:
        seen["outside"] = choose().source

    with use_placement_group("main"):
        threads = [threading.Thread(target=launch, args=(name,)) for name in ("a", "b")]
        threads.append(threading.Thread(target=outside))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert choose().group == "main"
    assert seen == {"a": "a", "b": "b", "outside": "own"}
    assert choose().source == "own"


def test_the_context_belongs_to_the_async_task_that_set_it(current: SimpleNamespace):
    async def launch(name: str) -> str:
        with use_placement_group(name):
            await asyncio.sleep(0.01)
            return choose().group

    async def child() -> str:
        return choose().group

    async def main() -> tuple[Any, ...]:
        both = await asyncio.gather(launch("a"), launch("b"))
        with use_placement_group("outer"):
            return *both, await asyncio.create_task(child()), choose().group

    assert asyncio.run(main()) == ("a", "b", "outer", "outer")


def test_nested_contexts_end_in_order_also_after_an_error(current: SimpleNamespace):
    with use_placement_group("outer") as outer:
        assert outer == "outer"
        with pytest.raises(PlacementError):
            fail_inside("inner", current)
        current.ready = True
        assert choose().group == "outer"


def fail_inside(name: str, current: SimpleNamespace) -> None:
    with use_placement_group(name):
        assert choose().group == "inner"
        current.ready = False
        choose()
