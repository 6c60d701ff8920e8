"""The whole grid of topologies and groups, 4 ranks included: same tokens as transformers for each.

`make test-slow ARGS=test/topology/test_topology_grid.py` runs the whole of it. On every push runs a part in which each
topology of two ranks occurs, on groups of several origins, spread over this folder and the client's:

| topology | group | caller |
|---|---|---|
| TP=2 | keyword, chosen bundles | actor, served over HTTP (`test/client`) |
| TP=2 | keyword, a bundle a node | driver, two raylets (`test_two_raylets.py`) |
| PP=2 | own | driver, two raylets (`test_two_raylets.py`) |
| PP=2 | own | driver (`test_starts_in_a_row.py`) |
| DP attention | keyword | driver (`test_starts_in_a_row.py`) |
| DP=2 | own | driver, threads and coroutines (`test_dp2_in_the_driver.py`) |
| TP=1, twice | keyword and context, one group | driver (`test_engines_in_a_driver.py`) |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from leftovers import engine_processes, free_port, wait_for
from ray.util.placement_group import placement_group, remove_placement_group
from support.local_ray import local_ray
from tiny_qwen import greedy_by_transformers

from sglang.srt.ray.placement import use_placement_group

pytestmark = pytest.mark.timeout(1200)

PROMPTS = [[5, 17, 300, 22], [8, 9], [100, 101, 102, 103, 104, 105, 7], [44]]
SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "dp2": {"dp_size": 2},
    "dp2-attention": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "tp2-pp2": {"tp_size": 2, "pp_size": 2},
    "tp2-dp2": {"tp_size": 2, "dp_size": 2},
    "dp2-pp2": {"dp_size": 2, "pp_size": 2},
    "tp4-dp2-attention": {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True},
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(num_cpus=5):
        yield


@pytest.fixture(scope="module")
def expected(tiny_qwen) -> list[list[int]]:
    return greedy_by_transformers(tiny_qwen, PROMPTS, SAMPLING["max_new_tokens"])


def ranks_of(topology: dict[str, Any]) -> int:
    replicas = 1 if topology.get("enable_dp_attention") else topology.get("dp_size", 1)
    return topology.get("tp_size", 1) * topology.get("pp_size", 1) * replicas


def arguments(model: Any, topology: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_path": str(model),
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 4096,
        "random_seed": 0,
        "sleep_on_idle": True,
    } | topology


def tokens_of(engine: Any) -> list[list[int]]:
    answers = engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)
    return [answer["output_ids"] for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_on_a_group_of_its_own(tiny_qwen, expected, name):
    from sglang.srt.ray import RayEngine

    engine = RayEngine(**arguments(tiny_qwen, TOPOLOGIES[name]))
    try:
        assert tokens_of(engine) == expected
    finally:
        engine.shutdown()
    wait_for(lambda: not engine_processes(), "the end of the ranks")


@pytest.mark.slow
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_on_a_group_from_the_context(tiny_qwen, expected, name):
    from sglang.srt.ray import RayEngine

    topology = TOPOLOGIES[name]
    group = placement_group([{"CPU": 1}] * ranks_of(topology))
    try:
        with use_placement_group(group):
            engine = RayEngine(**arguments(tiny_qwen, topology))
        try:
            assert tokens_of(engine) == expected
            places = engine._scheduler_init_result.places
            assert sorted(place.bundle for place in places) == list(range(ranks_of(topology)))
        finally:
            engine.shutdown()
    finally:
        remove_placement_group(group)


@ray.remote(num_cpus=1)
class AsyncHost:
    """An async actor: its methods run on an event loop, so nothing in them may start one."""

    async def run(self, arguments: dict[str, Any], prompts: Any, sampling: Any) -> Any:
        from sglang.srt.ray import RayEngine

        engine = RayEngine(**arguments)
        try:
            synchronous = engine.generate(input_ids=prompts, sampling_params=sampling)
            awaited = await engine.async_generate(input_ids=prompts, sampling_params=sampling)
            verbs = [engine.flush_cache().success, engine.begin_weight_update()[0]]
            verbs.append(engine.end_weight_update()[0])
            verbs.append(len(engine.get_server_info()["internal_states"]) > 0)
            source = engine._scheduler_init_result.chosen_group.source
        finally:
            engine.shutdown()
        return [[one["output_ids"] for one in way] for way in (synchronous, awaited)], verbs, source

    async def serve(self, arguments: dict[str, Any], prompts: Any, sampling: Any) -> Any:
        import asyncio
        import threading

        import requests

        from sglang.srt.ray import launch_engine, serve_http
        from sglang.srt.server_args import ServerArgs

        server_args = ServerArgs(**arguments)
        engine = launch_engine(server_args)
        up = asyncio.Event()
        loop = asyncio.get_running_loop()
        ready = {"on_ready": lambda: loop.call_soon_threadsafe(up.set)}
        server = threading.Thread(target=serve_http, args=(engine, server_args), kwargs=ready)
        server.start()
        try:
            await asyncio.wait_for(up.wait(), 120)
            body = {"input_ids": prompts, "sampling_params": sampling}
            url = f"http://127.0.0.1:{server_args.port}/generate"
            answer = await asyncio.to_thread(requests.post, url, json=body, timeout=120)
        finally:
            engine.shutdown()
            server.join(30)
        return [one["output_ids"] for one in answer.json()], server.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2", "tp2-dp2"])
def test_in_an_async_actor_on_its_own_node_sized_group(tiny_qwen, expected, name):
    topology = TOPOLOGIES[name]
    group = placement_group([{"CPU": 1 + ranks_of(topology)}])
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=0
    )
    host = AsyncHost.options(scheduling_strategy=strategy).remote()
    try:
        call = host.run.remote(arguments(tiny_qwen, topology), PROMPTS, SAMPLING)
        tokens, verbs, source = ray.get(call, timeout=600)
        assert tokens == [expected, expected]
        assert verbs == [True] * 4
        assert source == "current"
    finally:
        ray.kill(host)
        remove_placement_group(group)


@pytest.mark.slow
def test_an_async_actor_launches_and_serves(tiny_qwen, expected):
    host = AsyncHost.options(num_cpus=0).remote()
    try:
        call = host.serve.remote(arguments(tiny_qwen, {"port": free_port()}), PROMPTS, SAMPLING)
        tokens, still_serving = ray.get(call, timeout=300)
        assert tokens == expected
        assert not still_serving
    finally:
        ray.kill(host)


@pytest.mark.slow
def test_two_engines_share_one_group_and_one_node_sized_bundle(tiny_qwen, expected):
    """Two actors, each with an engine, in the one bundle of a group: no name and no place is taken twice."""
    group = placement_group([{"CPU": 4}])
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=0
    )
    hosts = [AsyncHost.options(scheduling_strategy=strategy).remote() for _ in range(2)]
    try:
        calls = [
            host.run.remote(arguments(tiny_qwen, {"port": 31000 + 100 * i}), PROMPTS, SAMPLING)
            for i, host in enumerate(hosts)
        ]
        for tokens, _, _ in ray.get(calls, timeout=600):
            assert tokens == [expected, expected]
    finally:
        for host in hosts:
            ray.kill(host)
        remove_placement_group(group)
