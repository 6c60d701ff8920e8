"""A trainer and an engine that share one GPU, for the tests of this folder. `SGLANG_TEST_DEVICE=cpu` rehearses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from one_gpu import DEVICE, DTYPE, RANK_SHARE, TRAINER_SHARE, WAIT_S, connect
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from support.engine import ON_A_GPU, RunningEngine, running_engine
from support.trainer import start_trainer


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    import torch

    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here: torch.cuda.is_available() is False")
    return DEVICE


@pytest.fixture(scope="session")
def gpu_ray(device: str) -> Iterator[str]:
    from support.local_ray import local_ray

    with local_ray(num_cpus=4) as address:
        yield address


@pytest.fixture(scope="session")
def bundle(gpu_ray: str) -> Any:
    """One bundle with one GPU (two CPUs in a rehearsal), which trainer and rank share."""
    resources = {"CPU": 2.0} | ({"GPU": 1.0} if DEVICE == "cuda" else {})
    group = ray.util.placement_group([resources])
    ray.get(group.ready(), timeout=WAIT_S)
    return group


@pytest.fixture(scope="session")
def gpu_engine(bundle: Any, tiny_model: Any) -> Iterator[RunningEngine]:
    arguments: dict[str, Any] = {"device": DEVICE, "dtype": DTYPE}
    if DEVICE == "cuda":
        arguments |= ON_A_GPU | {"cuda_graph_max_bs_decode": 4}
    host_environment = {"SGLANG_RAY_GPUS_PER_RANK": str(RANK_SHARE)}
    with running_engine(
        tiny_model, placement_group=bundle, host_environment=host_environment, **arguments
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def make_trainer(bundle: Any) -> Iterator[Any]:
    """`make_trainer()` starts one more trainer in the rest of the bundle; the one before it has to be dead."""
    made = []

    def make() -> Any:
        options: dict[str, Any] = {"num_gpus": TRAINER_SHARE} if DEVICE == "cuda" else {}
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=bundle, placement_group_bundle_index=0
        )
        made.append(start_trainer(None, DEVICE, DTYPE, **options))
        return made[-1]

    yield make
    for actor in made:
        ray.kill(actor)


@pytest.fixture(scope="session")
def trainers(make_trainer: Any, gpu_engine: RunningEngine) -> dict[str, Any]:
    """The trainer in use, under `now` (a test that kills it puts another one there); `synced`: weights were sent."""
    actor = make_trainer()
    connect(actor, gpu_engine)
    return {"now": actor, "synced": False}
