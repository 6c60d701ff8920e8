"""A RayEngine and a publisher in one process: synced without HTTP, and ended without a trace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from support.models import ENGINE_SEED, new_model
from support.oracle import Generation, assert_serves, scored_request

from sglang.srt.ray.weight_sync import UnknownTransactionError

PROMPT = [9, 8, 7, 6, 5]
START_S = 300.0
CALL_S = 120.0


class EngineAndTrainer:
    """A colocated job: the engine's Python object and the trainer's weights in one actor."""

    def __init__(self, model_path: str) -> None:
        from sglang.srt.ray import LocalEngineControl, RayEngine, WeightPublisher

        self.engine = RayEngine(
            model_path=model_path,
            device="cpu",
            dtype="float32",
            max_total_tokens=8192,
            enable_rdt_weight_sync=True,
            sleep_on_idle=True,
        )
        self.control = LocalEngineControl(self.engine)
        self.publisher = WeightPublisher.connect([self.control], bucket_bytes=1 << 20)

    def sync(self, seed: int, version: str, pause: str) -> Any:
        return self.publisher.sync(new_model(seed).state_dict(), version=version, pause=pause)

    def seal(self, transaction: str) -> None:
        self.control.seal(transaction, resume=True, timeout_s=60)

    def state(self) -> str:
        return self.control.status(timeout_s=60)["state"]

    def generate(self, prompt: list[int], length: int) -> Generation:
        return Generation.of_answer(self.engine.generate(**scored_request(prompt, length)))

    def rank_pids(self) -> list[int]:
        calls = [a.__ray_call__.remote(lambda _: os.getpid()) for a in self.control.actors]
        return ray.get(calls, timeout=CALL_S)

    def shut_down(self) -> list[str]:
        """Returns what is left of the engine's own child processes."""
        self.engine.shutdown()
        children = psutil.Process().children(recursive=True)
        left = [" ".join(child.cmdline()) for child in psutil.wait_procs(children, timeout=15)[1]]
        # Python's own, for the life of the process.
        return [command for command in left if "multiprocessing.resource_tracker" not in command]


@pytest.fixture(scope="module")
def job(ray_address: str, tiny_model: Path) -> Iterator[Any]:
    actor_class = ray.remote(num_cpus=0, enable_tensor_transport=True)(EngineAndTrainer)
    actor = actor_class.remote(str(tiny_model))
    answer = ray.get(actor.generate.remote(PROMPT, 4), timeout=START_S)
    assert_serves(new_model(ENGINE_SEED), PROMPT, answer)
    yield actor
    ray.kill(actor)


@pytest.mark.parametrize(
    ("seed", "pause"), [(91, "retract"), (92, "abort"), (93, "in_place"), (94, "retract")]
)
def test_a_sync_without_http_reaches_the_engine_in_every_pause_mode(
    job: Any, seed: int, pause: str
):
    report = ray.get(job.sync.remote(seed, f"v{seed}", pause), timeout=CALL_S)
    assert report.verified
    assert list(report.ranks) == ["local"]
    prompt = [seed, *PROMPT]
    answer = ray.get(job.generate.remote(prompt, 6), timeout=CALL_S)
    assert_serves(new_model(seed), prompt, answer)
    assert answer.version == f"v{seed}"


def test_a_refusal_is_raised_with_the_engines_words_and_its_name(job: Any):
    with pytest.raises(UnknownTransactionError, match=r"'nobody'.*is not open here"):
        ray.get(job.seal.remote("nobody"), timeout=CALL_S)
    assert ray.get(job.state.remote(), timeout=CALL_S) == "SERVING"


def test_shutdown_ends_ranks_helpers_and_the_own_group_and_leaves_ray_alone(job: Any):
    ranks = [psutil.Process(pid) for pid in ray.get(job.rank_pids.remote(), timeout=CALL_S)]
    own = [entry["state"] for entry in ray.util.placement_group_table().values()]
    assert "CREATED" in own
    assert ray.get(job.shut_down.remote(), timeout=CALL_S) == []
    assert not psutil.wait_procs(ranks, timeout=30)[1]
    states = [entry["state"] for entry in ray.util.placement_group_table().values()]
    assert states.count("CREATED") == own.count("CREATED") - 1
    assert ray.get(ray.remote(num_cpus=0)(lambda: 7).remote(), timeout=CALL_S) == 7
