"""Which bundle each rank gets, and what is refused: the pure plan, without a cluster."""

from __future__ import annotations

import pytest

from sglang.srt.ray.bundles import assign_bundles as plan_bundles
from sglang.srt.ray.bundles import bundle_indices_from_environment

ONE_GPU = {"CPU": 1.0, "GPU": 1.0}


def request(ranks: int, **more) -> dict:
    return {"ranks": ranks, "resource": "GPU", "one_device_per_bundle": True} | more


def assign_bundles(bundles, asked: dict) -> list[int]:
    return plan_bundles(bundles, **asked)


def test_ranks_take_the_bundles_with_a_device_in_order():
    assert assign_bundles([{"CPU": 2.0}, ONE_GPU, ONE_GPU], request(2)) == [1, 2]


def test_named_bundles_are_taken_in_the_named_order():
    assert assign_bundles([ONE_GPU] * 4, request(2, indices=[3, 1])) == [3, 1]


def test_a_node_sized_bundle_holds_several_ranks():
    node = {"CPU": 8.0, "GPU": 4.0}
    assert assign_bundles([node], request(4, one_device_per_bundle=False)) == [0, 0, 0, 0]


def test_a_named_node_sized_bundle_may_hold_more_than_is_needed():
    node = {"CPU": 8.0, "GPU": 4.0}
    chosen = assign_bundles([node, node], request(2, one_device_per_bundle=False, indices=[1]))
    assert chosen == [1, 1]


def test_the_launching_process_keeps_rank_0_on_its_own_node():
    plan = request(2, nodes=["away", "home"], engine_node="home")
    assert assign_bundles([ONE_GPU, ONE_GPU], plan) == [1, 0]


def test_bundles_of_one_node_stay_together():
    plan = request(4, nodes=["b", "home", "b", "home"], engine_node="home")
    assert assign_bundles([ONE_GPU] * 4, plan) == [1, 3, 0, 2]


def test_every_replica_starts_on_the_launching_node():
    plan = request(4, replicas=2, nodes=["away", "home", "away", "home"], engine_node="home")
    assert assign_bundles([ONE_GPU] * 4, plan) == [1, 0, 3, 2]


def test_a_replica_that_would_start_elsewhere_is_refused():
    plan = request(2, replicas=2, nodes=["home", "away"], engine_node="home")
    with pytest.raises(ValueError, match=r"rank 1 \(rank 0 of replica 1\).*'away'.*'home'"):
        assign_bundles([ONE_GPU] * 2, plan)


def test_named_bundles_that_put_rank_0_elsewhere_are_refused():
    plan = request(2, indices=[0, 1], nodes=["away", "home"], engine_node="home")
    with pytest.raises(ValueError, match=r"rank 0 would run.*here: \[1\]"):
        assign_bundles([ONE_GPU] * 2, plan)


def test_too_few_bundles_say_what_was_needed_and_found():
    with pytest.raises(ValueError, match=r"needed 2 .*found 1 in 2 bundle.*'CPU': 1.0"):
        assign_bundles([ONE_GPU, {"CPU": 1.0}], request(2))


def test_a_bundle_with_two_gpus_is_refused_where_one_is_asked():
    with pytest.raises(ValueError, match=r"bundle 0 has 2 GPUs where one is asked"):
        assign_bundles([{"GPU": 2.0}], request(1))


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([1, 1], r"duplicates: \[1, 1\]"),
        ([0, 7], r"names \[7\], but the group has bundles 0 to 2"),
        ([-1, 0], r"names \[-1\]"),
        ([0], r"gives 1 place.*needed exactly 2"),
        ([0, 1, 2], r"gives 3 place.*needed exactly 2"),
    ],
)
def test_wrong_bundle_numbers_are_refused(indices, text):
    with pytest.raises(ValueError, match=text):
        assign_bundles([ONE_GPU] * 3, request(2, indices=indices))


def test_a_named_bundle_without_a_device_is_refused():
    with pytest.raises(ValueError, match=r"bundle 0 has no GPU: .*'CPU': 1.0"):
        assign_bundles([{"CPU": 1.0}, ONE_GPU], request(1, indices=[0]))


def test_bundle_numbers_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_RAY_BUNDLE_INDICES", "3,1")
    assert bundle_indices_from_environment() == [3, 1]
    monkeypatch.delenv("SGLANG_RAY_BUNDLE_INDICES")
    assert bundle_indices_from_environment() is None
    monkeypatch.setenv("SGLANG_RAY_BUNDLE_INDICES", "3,x")
    with pytest.raises(ValueError, match=r"'3,x' is not a comma-separated list"):
        bundle_indices_from_environment()
