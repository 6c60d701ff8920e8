"""A fleet of two engines: both move to a version or none serves it; what they hold is what a load from disk gives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support.engine import RunningEngine, running_engine
from support.models import new_model, write_model
from support.oracle import assert_serves
from support.trainer import start_trainer

from sglang.srt.ray.weight_sync import DigestMismatchError, WeightSyncError

PROMPT = list(range(5, 17))
DISK_SEED = 7
WAIT_S = 120.0
_versions = itertools.count()


@pytest.fixture(scope="module")
def from_disk(
    ray_address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEngine]:
    """An engine that loaded the weights of `DISK_SEED` from disk."""
    folder: Path = write_model(tmp_path_factory.mktemp("seed7"), seed=DISK_SEED)
    with running_engine(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def trainer(ray_address: str) -> Iterator[Any]:
    actor = start_trainer()
    yield actor
    ray.kill(actor)


def connect(trainer: Any, *engines: RunningEngine) -> None:
    controls = [(engine.url, engine.actors, f"e{i}") for i, engine in enumerate(engines)]
    ray.get(trainer.connect.remote(controls), timeout=WAIT_S)


def sync(trainer: Any, seed: int) -> Any:
    return ray.get(
        trainer.sync.remote(seed, f"fleet-{next(_versions)}", force=True), timeout=WAIT_S
    )


def checksums(engine: RunningEngine) -> dict[str, str]:
    response = engine.post("weights_checker", {"action": "checksum"})
    response.raise_for_status()
    return response.json()["ranks"][0]["checksums"]


def state(engine: RunningEngine) -> tuple[str, str]:
    status = engine.get("weight_sync").json()
    return status["state"], status["version"]


def test_a_synced_engine_is_the_same_as_a_fresh_one_that_loaded_from_disk(
    shared_engine, from_disk, trainer
):
    connect(trainer, shared_engine)
    sync(trainer, DISK_SEED)
    assert checksums(shared_engine) == checksums(from_disk)
    answers = [engine.generate(PROMPT, 12) for engine in (shared_engine, from_disk)]
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].logprobs == pytest.approx(answers[1].logprobs, abs=1e-6)


def test_both_engines_move_together(shared_engine, from_disk, trainer):
    connect(trainer, shared_engine, from_disk)
    report = sync(trainer, 3)
    assert (list(report.ranks), report.verified) == (["e0", "e1"], True)
    assert state(shared_engine) == state(from_disk) == ("SERVING", report.version)
    assert checksums(shared_engine) == checksums(from_disk)
    for engine in (shared_engine, from_disk):
        assert_serves(new_model(3), PROMPT, engine.generate(PROMPT, 6))


def test_a_flipped_bit_in_one_engine_keeps_the_new_version_from_all(
    shared_engine, from_disk, trainer
):
    connect(trainer, shared_engine, from_disk)
    before = sync(trainer, 3).version

    def flip(actor: Any) -> None:
        receiver = actor._weight_receiver()
        original = receiver._finish

        def finish(read: Any, names: Any, targets: Any, deadline: float) -> None:
            import torch

            del receiver._finish
            original(read, names, targets, deadline)
            targets[0].view(-1).view(torch.uint8)[0] ^= 4

        receiver._finish = finish

    call = from_disk.actors[0].__ray_call__.options(concurrency_group="control")
    ray.get(call.remote(flip), timeout=30)
    with pytest.raises(DigestMismatchError) as caught:
        sync(trainer, 4)
    assert (caught.value.engine, caught.value.rank) == ("e1", 0)
    assert caught.value.tensor
    for engine in (shared_engine, from_disk):
        assert state(engine) == ("TORN", before)
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        assert engine.post("generate", body).status_code == 503
    sync(trainer, 5)
    for engine in (shared_engine, from_disk):
        assert_serves(new_model(5), PROMPT, engine.generate(PROMPT, 6))


def test_an_engine_that_refuses_to_begin_leaves_all_at_the_old_version(
    shared_engine, from_disk, trainer
):
    connect(trainer, shared_engine, from_disk)
    before = sync(trainer, 3).version

    def refuse(host: Any) -> None:
        manager = host._engine.tokenizer_manager

        async def broken() -> None:
            del manager.begin_session
            raise RuntimeError("no")

        manager.begin_session = broken

    ray.get(from_disk.host.__ray_call__.remote(refuse), timeout=30)
    with pytest.raises(WeightSyncError) as caught:
        sync(trainer, 4)
    assert (caught.value.engine, caught.value.phase) == ("e1", "begin")
    for engine in (shared_engine, from_disk):
        assert state(engine) == ("SERVING", before)
        assert_serves(new_model(3), PROMPT, engine.generate(PROMPT, 6))
