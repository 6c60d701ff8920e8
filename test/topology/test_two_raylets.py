"""Two raylets on one machine: ranks are placed by node id, since the address can't tell the two apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from tiny_qwen import greedy_by_transformers

from sglang.srt.ray.placement import choose_group, place_ranks

PROMPTS = [[5, 17, 300, 22], [8, 9]]
SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def spread_group(two_nodes) -> Iterator[Any]:
    group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    assert group.wait(60)
    yield group
    remove_placement_group(group)


def home_bundle(group: Any) -> int:
    from sglang.srt.ray.placement import bundle_nodes

    return bundle_nodes(group).index(ray.get_runtime_context().get_node_id())


def test_both_nodes_have_one_address(two_nodes):
    assert len({node["NodeManagerAddress"] for node in ray.nodes()}) == 1
    assert len({node["NodeID"] for node in ray.nodes()}) == 2


def test_rank_0_is_placed_beside_the_launching_process(spread_group):
    chosen = choose_group(spread_group, device="cpu", ranks=2, nodes=2)
    first, second = place_ranks(chosen, device="cpu", ranks=2, replicas=1)
    assert first.node == ray.get_runtime_context().get_node_id()
    assert second.node != first.node


def test_bundles_that_put_rank_0_on_the_other_node_are_refused(spread_group, monkeypatch):
    home = home_bundle(spread_group)
    monkeypatch.setenv("SGLANG_RAY_BUNDLE_INDICES", f"{1 - home},{home}")
    chosen = choose_group(spread_group, device="cpu", ranks=2, nodes=2)
    with pytest.raises(ValueError, match=rf"rank 0 would run on node.*here: \[{home}\]"):
        place_ranks(chosen, device="cpu", ranks=2, replicas=1)


def both_nodes(topology: dict[str, int], whose: str, *marks: Any) -> Any:
    return pytest.param(topology, whose, id=f"{next(iter(topology))}-{whose}", marks=marks)


@pytest.mark.parametrize(
    ("topology", "whose"),
    [
        both_nodes({"tp_size": 2}, "theirs"),
        both_nodes({"pp_size": 2}, "own"),
        both_nodes({"tp_size": 2}, "own", pytest.mark.slow),
        both_nodes({"pp_size": 2}, "theirs", pytest.mark.slow),
    ],
)
def test_an_engine_over_two_nodes_gives_the_same_tokens(two_nodes, tiny_qwen, topology, whose):
    from sglang.srt.ray import RayEngine

    group = None
    if whose == "theirs":
        group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    engine = RayEngine(
        model_path=str(tiny_qwen),
        device="cpu",
        dtype="float32",
        max_total_tokens=4096,
        random_seed=0,
        sleep_on_idle=True,
        placement_group=group,
        nnodes=2,
        **topology,
    )
    try:
        assert len({place.node for place in engine._scheduler_init_result.places}) == 2
        answers = engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)
        tokens = [answer["output_ids"] for answer in answers]
        assert tokens == greedy_by_transformers(tiny_qwen, PROMPTS, SAMPLING["max_new_tokens"])
    finally:
        engine.shutdown()
        if group is not None:
            remove_placement_group(group)
