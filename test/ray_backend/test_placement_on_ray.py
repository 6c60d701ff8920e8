"""The same rule on a real Ray: groups that are ready, removed, or never ready."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from sglang.srt.ray.placement import PlacementError, bundle_nodes, choose_group


@pytest.fixture
def group(ray_address: str) -> Iterator[Any]:
    made = ray.util.placement_group([{"memory": 1}])
    yield made
    ray.util.remove_placement_group(made)


def test_a_group_handed_over_is_used_as_it_is(group: Any):
    before = set(ray.util.placement_group_table())
    chosen = choose_group(group, device="cpu", ranks=1, nodes=1)
    assert (chosen.group, chosen.source) == (group, "keyword")
    assert set(ray.util.placement_group_table()) == before, "a second group was made"


def test_bundles_are_located_by_node_id(group: Any):
    choose_group(group, device="cpu", ranks=1, nodes=1)
    assert bundle_nodes(group) == [ray.get_runtime_context().get_node_id()]


def test_a_removed_group_is_refused_by_its_id(group: Any):
    ray.util.remove_placement_group(group)
    with pytest.raises(PlacementError, match=f"{group.id.hex()}.*was removed"):
        choose_group(group, device="cpu", ranks=1, nodes=1)


def test_a_group_that_never_gets_ready_says_what_is_needed_and_what_there_is(
    ray_address: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SGLANG_RAY_PLACEMENT_TIMEOUT_S", "2")
    started = time.monotonic()
    with pytest.raises(PlacementError) as refused:
        choose_group(None, device="cpu", ranks=1000, nodes=1)
    assert time.monotonic() - started < 30
    text = str(refused.value)
    assert "not ready within 2 s" in text
    assert "needed:    [{'CPU': 1000.0}]" in text
    assert "cluster:   {'CPU': 2.0}" in text
    states = [entry["state"] for entry in ray.util.placement_group_table().values()]
    assert "PENDING" not in states, "the group that was made for this engine is left"
