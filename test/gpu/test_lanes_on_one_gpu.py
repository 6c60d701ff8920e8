"""Which lane bytes take between two processes on one GPU, and that a slow one is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from one_gpu import DEVICE, WAIT_S

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="the lanes of a CPU are tested in test/weight_sync"),
]
READ = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"


class Rank:
    """Only the lane verbs of a rank on the GPU."""

    def __init__(self) -> None:
        import torch

        from sglang.srt.ray.weight_sync.lane_meter import RankLaneMeter

        self.meter = RankLaneMeter(torch.device("cuda", 0), rank=0)

    def lane_surroundings(self) -> Any:
        return self.meter.surroundings()

    def lane_loopback(self, timeout_s: float, source_device: str) -> Any:
        return self.meter.loopback(timeout_s, source_device)

    def measure_lane(self, refs: Any, timeout_s: float) -> float:
        return self.meter.measure(refs, timeout_s)


class Publisher:
    def lanes(self, actor: Any) -> Any:
        from sglang.srt.ray.weight_sync.fleet import RankAddress
        from sglang.srt.ray.weight_sync.lane_meter import measured_lanes

        address = RankAddress(engine=SimpleNamespace(name="engine"), rank=0, actor=actor)
        return measured_lanes([address], floor=None, timeout_s=60.0)


@pytest.fixture
def actor_of(gpu_ray):
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


def test_an_engines_ranks_read_over_cuda_ipc_without_being_told(trainers):
    lanes = ray.get(
        trainers["now"].__ray_call__.remote(lambda actor: actor._publisher.lanes), timeout=WAIT_S
    )
    (lane,) = lanes
    print(lane)
    assert "zero-copy" in lane.loopback.chosen.lane
    assert "cuda_ipc" in lane.loopback.chosen.lane
    assert lane.warnings == ()
    assert lane.gigabytes_per_second > 50


def test_the_slow_lane_is_refused_by_the_name_of_what_chose_it(actor_of):
    from sglang.srt.ray.weight_sync import SlowLaneError

    (lane,) = ray.get(
        actor_of(Publisher, {}).lanes.remote(actor_of(Rank, {READ: "n"})), timeout=WAIT_S
    )
    print(lane)
    with pytest.raises(SlowLaneError, match=f"{READ}='n'"):
        lane.check()


def test_cpu_memory_into_a_gpu_is_named_as_the_slow_path_that_it_is(actor_of):
    publisher = actor_of(Publisher, {"CUDA_VISIBLE_DEVICES": ""})
    (lane,) = ray.get(publisher.lanes.remote(actor_of(Rank, {READ: "y"})), timeout=WAIT_S)
    print(lane)
    lane.check()
    assert any("nothing better" in text and "cpu memory to cuda" in text for text in lane.warnings)


def test_expandable_segments_are_named_whichever_side_has_them(actor_of):
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", READ: "y"}
    (lane,) = ray.get(
        actor_of(Publisher, environment).lanes.remote(actor_of(Rank, {READ: "y"})), timeout=WAIT_S
    )
    print(lane)
    assert any("trainer's PYTORCH_ALLOC_CONF" in text for text in lane.warnings)


@pytest.mark.parametrize("source_device", ["cpu", "cuda"])
def test_a_loop_back_is_measured_for_the_kind_of_memory_that_the_trainer_has(
    actor_of, source_device
):
    found = ray.get(
        actor_of(Rank, {READ: "y"}).lane_loopback.remote(60.0, source_device), timeout=WAIT_S
    )
    print(source_device, "to cuda:", found.chosen)
    assert found.chosen.gigabytes_per_second > 0.1
