"""Lanes: the real ones of this machine, with and without what degrades them (F21), and the judgement over them."""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from sglang.srt.ray.weight_sync.errors import DeadlineExceededError, SlowLaneError, TransferError
from sglang.srt.ray.weight_sync.fleet import RankAddress
from sglang.srt.ray.weight_sync.lane_meter import RankLaneMeter, measured_lanes
from sglang.srt.ray.weight_sync.lane_probe import Loopback, lane_in, probe_loopback
from sglang.srt.ray.weight_sync.lanes import (
    HostLoopback,
    Surroundings,
    chosen_environment,
    environment_warnings,
    judged,
    untouched_environment,
)

SMALL = 4 << 20
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}


# What UCX really does


def test_a_loop_back_names_its_lane_and_its_speed():
    found = probe_loopback(environment=PLAIN, num_bytes=SMALL)
    assert found.lane == "zero-copy cma/memory"
    assert found.gigabytes_per_second > 0.1


def test_a_loop_back_over_tcp_says_so():
    found = probe_loopback(environment=PLAIN | {"UCX_TLS": "tcp,self"}, num_bytes=SMALL)
    assert "tcp" in found.lane


def test_a_loop_back_without_a_lane_fails_with_what_the_process_said():
    with pytest.raises(TransferError, match="exit status"):
        probe_loopback(environment=PLAIN | {"UCX_TLS": "nonsense"}, num_bytes=SMALL)


def test_a_loop_back_that_does_not_end_is_given_up():
    with pytest.raises(DeadlineExceededError, match=r"within 0\.01 s"):
        probe_loopback(environment=PLAIN, num_bytes=SMALL, timeout_s=0.01)


class Rank:
    """Only the lane verbs of a rank."""

    def __init__(self) -> None:
        self.meter = RankLaneMeter(torch.device("cpu"), rank=0)

    def lane_surroundings(self) -> Any:
        return self.meter.surroundings()

    def lane_loopback(self, timeout_s: float, source_device: str) -> Any:
        return self.meter.loopback(timeout_s, source_device)

    def measure_lane(self, refs: Any, timeout_s: float) -> float:
        return self.meter.measure(refs, timeout_s)


class Trainer:
    def lanes(self, actors: list[Any], floor: float | None) -> Any:
        engine = SimpleNamespace(name="engine")
        addresses = [
            RankAddress(engine=engine, rank=rank, actor=actor) for rank, actor in enumerate(actors)
        ]
        return measured_lanes(addresses, floor=floor, timeout_s=60.0)


@pytest.fixture
def actor_of(ray_address):
    made = []

    def make(kind: type, environment: dict[str, str]) -> Any:
        remote = ray.remote(
            num_cpus=0,
            enable_tensor_transport=True,
            max_concurrency=2,
            runtime_env={"env_vars": environment},
        )(kind)
        made.append(remote.remote())
        return made[-1]

    yield make
    for actor in made:
        ray.kill(actor)


def test_a_degraded_lane_is_reported_by_name_and_a_floor_fails_it(actor_of):
    trainer = actor_of(Trainer, {"UCX_TLS": "tcp,self"})
    ranks = [actor_of(Rank, {"UCX_TLS": "tcp,self"})]
    (lane,) = ray.get(trainer.lanes.remote(ranks, None), timeout=120)
    text = " ".join(lane.warnings)
    assert "UCX_TLS='tcp,self'" in text
    assert "tcp" in lane.loopback.chosen.lane
    assert lane.loopback.untouched.lane == "zero-copy cma/memory"
    assert "'zero-copy cma/memory'" in text
    assert lane.gigabytes_per_second > 0
    above = dataclasses.replace(lane, floor_gigabytes_per_second=2 * lane.gigabytes_per_second)
    with pytest.raises(SlowLaneError, match=r"tcp.*UCX_TLS='tcp,self'") as refused:
        above.check()
    assert (refused.value.engine, refused.value.rank) == ("engine", 0)


def test_a_lane_as_it_should_be_has_no_warnings(actor_of):
    trainer = actor_of(Trainer, {})
    lanes = ray.get(trainer.lanes.remote([actor_of(Rank, {}) for _ in range(2)], None), timeout=120)
    for rank, lane in enumerate(lanes):
        assert (lane.rank, lane.same_host, lane.warnings) == (rank, True, ())
        assert lane.loopback.chosen == lane.loopback.untouched
        lane.check()


# The judgement

FAST = Loopback(lane="zero-copy cuda_ipc/cuda", gigabytes_per_second=1000.0)
SLOW = Loopback(lane="software emulation tcp/lo", gigabytes_per_second=0.5)
HERE = Surroundings(
    host="a", boot="1", pid_namespace="p", device="cuda", lane_variables={}, warnings=()
)


def lane_of(*, there: Surroundings = HERE, chosen=FAST, speed: float, floor: float | None = None):
    return judged(
        engine="e",
        rank=3,
        here=HERE,
        there=there,
        loopback=HostLoopback(chosen=chosen, untouched=FAST),
        gigabytes_per_second=speed,
        floor=floor,
    )


def test_a_path_at_a_hundredth_of_what_the_host_gives_fails_by_default():
    lane_of(speed=600.0).check()
    with pytest.raises(SlowLaneError, match=r"0\.500 GB/s, its floor is 10\.000"):
        lane_of(speed=0.5, chosen=SLOW).check()


@pytest.mark.parametrize("change", [{"boot": "2", "host": "b"}, {"device": "cpu", "host": "b"}])
def test_between_hosts_and_between_cpus_only_a_given_floor_fails(change):
    there = dataclasses.replace(HERE, **change)
    lane_of(there=there, speed=0.5).check()
    with pytest.raises(SlowLaneError, match="on b gives"):
        lane_of(there=there, speed=0.5, floor=10.0).check()


def test_other_pid_namespaces_on_one_host_are_named():
    lane = lane_of(there=dataclasses.replace(HERE, pid_namespace="q"), speed=600.0)
    assert "PID namespaces" in lane.warnings[0]


def test_what_is_needed_is_set_and_what_the_user_set_wins():
    assert chosen_environment("cuda", {}) == {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}
    assert chosen_environment("cuda", {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n"}) == {}
    assert chosen_environment("cpu", {}) == {}


def test_the_untouched_environment_has_ours_and_not_the_users():
    mine = {"PATH": "p", "UCX_TLS": "tcp", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n"}
    expected = {"PATH": "p", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}
    assert untouched_environment(mine, "cuda") == expected


@pytest.mark.parametrize(
    ("environment", "device", "expected"),
    [
        ({}, "cuda", None),
        ({"UCX_TLS": "all"}, "cpu", None),
        ({"UCX_TLS": "cma,tcp"}, "cpu", "UCX_TLS='cma,tcp'"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "cuda", "expandable"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "cuda", "expandable"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "cpu", None),
        ({"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n"}, "cuda", "read over TCP"),
    ],
)
def test_what_is_known_to_degrade_is_named(environment, device, expected):
    found = environment_warnings(environment, device)
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]


def test_a_lane_that_ucx_does_not_print_is_unknown():
    assert lane_in("nothing of the kind") == "unknown"
