"""Engines of several topologies one after the other in one process and cluster: right tokens, and nothing grows."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from leftovers import (
    engine_processes,
    listening_ports,
    local_sockets,
    open_files,
    shared_memory,
    wait_for,
)
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from support.local_ray import local_ray
from tiny_qwen import greedy_by_transformers

PROMPTS = [[5, 17, 300, 22], [8, 9], [100, 101, 102, 103, 104, 105, 7], [44]]
SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(num_cpus=4):
        yield


@pytest.fixture(scope="module")
def expected(tiny_qwen) -> list[list[int]]:
    return greedy_by_transformers(tiny_qwen, PROMPTS, SAMPLING["max_new_tokens"])


def start(model: Any, **topology: Any) -> Any:
    from sglang.srt.ray import RayEngine

    return RayEngine(
        model_path=str(model),
        device="cpu",
        dtype="float32",
        max_total_tokens=4096,
        random_seed=0,
        sleep_on_idle=True,
        **topology,
    )


def live_groups() -> int:
    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


def measured() -> dict[str, Any]:
    """Everything that could grow, once the last engine's end has settled."""
    gc.collect()
    wait_for(lambda: not engine_processes(), "the end of the processes")
    wait_for(lambda: not live_groups(), "the end of the placement groups")
    time.sleep(1)
    return {
        "files": open_files(),
        "threads": sorted(t.name for t in threading.enumerate() if "sglang" in t.name),
        "ports": listening_ports(),
        "actors": ray.util.list_named_actors(all_namespaces=True),
    }


def assert_no_growth(before: dict[str, Any], after: dict[str, Any]) -> None:
    # Ray opens a few files of its own at odd times; one leak a start would be at least a socket pair a start.
    assert after["files"] <= before["files"] + 2, (before, after)
    assert after["ports"] <= before["ports"]
    assert after["threads"] == []
    assert after["actors"] == []


def files_of(engine: Any) -> set[Path]:
    files = shared_memory([psutil.Process(), *engine_processes()]) | local_sockets(engine.port_args)
    return {path for path in files if path.exists()}


def test_a_launch_whose_second_rank_dies_ends_the_first_and_names_it(tiny_qwen):
    from sglang.srt.ray.rank_actors import LaunchError

    def kill_one() -> None:
        wait_for(lambda: len(engine_processes()) == 2, "two ranks that load", 60)
        max(engine_processes(), key=lambda process: process.create_time()).kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    with pytest.raises(LaunchError, match=r"^rank [01] \(dp 0, pp 0, tp [01]\) could not start"):
        start(tiny_qwen, tp_size=2)
    killer.join()
    left = measured()
    assert (left["threads"], left["actors"]) == ([], [])


def test_three_topologies_one_after_the_other(tiny_qwen, expected):
    seen = []
    for topology, theirs in (
        ({"pp_size": 2}, False),
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, True),
        ({}, False),
    ):
        group = placement_group([{"CPU": 1}] * 2) if theirs else None
        engine = start(tiny_qwen, placement_group=group, **topology)
        try:
            answers = engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)
            assert [answer["output_ids"] for answer in answers] == expected, topology
            files = files_of(engine)
            assert files
            assert live_groups() == 1
        finally:
            engine.shutdown()
        wait_for(lambda: not [path for path in files if path.exists()], f"the end of {files}")  # noqa: B023
        if group is not None:
            assert live_groups() == 1, "the caller's group is the caller's to remove"
            remove_placement_group(group)
        seen.append(measured())
    assert_no_growth(seen[0], seen[2])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_starts_leave_as_much_as_one(tiny_qwen):
    seen = []
    for _ in range(20):
        engine = start(tiny_qwen)
        engine.generate(input_ids=PROMPTS[0], sampling_params=SAMPLING)
        engine.shutdown()
        seen.append(measured())
    assert_no_growth(seen[0], seen[-1])
