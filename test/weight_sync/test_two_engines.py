"""A fleet of two engines: both move to a version or none serves it; what they hold is what a load from disk gives."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support.engine import RunningEngine, running_engine
from support.models import new_model, write_model
from support.oracle import assert_serves
from support.trainer import start_trainer

from sglang.srt.ray.weight_sync import (
    DigestMismatchError,
    StaleTransactionError,
    WeightSyncError,
    takeover,
)
from sglang.srt.ray.weight_sync.control import OpenRequest
from sglang.srt.ray.weight_sync.takeover import take_over

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


def test_a_newcomer_takes_over_what_its_peer_serves_while_that_one_generates(
    shared_engine, from_disk, trainer
):
    connect(trainer, shared_engine, from_disk)
    sync(trainer, 3)
    connect(trainer, shared_engine)
    published = sync(trainer, 8).version
    newcomer, peer = from_disk.control("newcomer"), shared_engine.control("peer")
    answers: list[Any] = []
    running = threading.Thread(target=lambda: answers.append(shared_engine.generate(PROMPT, 400)))
    running.start()
    report = take_over(newcomer, peer)
    running.join(WAIT_S)
    assert (report.version, report.verified, list(report.ranks)) == (published, True, ["newcomer"])
    assert (answers[0].finish, answers[0].version) == ("length", published)
    assert state(from_disk) == ("SERVING", published)
    assert checksums(from_disk) == checksums(shared_engine)
    assert_serves(new_model(8), PROMPT, from_disk.generate(PROMPT, 6))
    # Whoever connects now reaches both.
    connect(trainer, shared_engine, from_disk)
    assert len(sync(trainer, 3).ranks) == 2


def test_a_peer_that_is_being_synced_lends_nothing(shared_engine, from_disk, trainer):
    connect(trainer, shared_engine, from_disk)
    before = sync(trainer, 3).version
    newcomer, peer = from_disk.control("newcomer"), shared_engine.control("peer")
    request = OpenRequest(
        transaction="somebody's",
        sequence=peer.status(timeout_s=30)["last_sequence"] + 1,
        owner="somebody",
        version="next",
        pause="retract",
        ttl_s=60,
    )
    peer.open(request, timeout_s=30)
    try:
        with pytest.raises(StaleTransactionError, match="peer can't lend its weights now"):
            take_over(newcomer, peer)
    finally:
        peer.abort("somebody's", "the test is over", timeout_s=30)
    assert state(from_disk) == state(shared_engine) == ("SERVING", before)
    assert_serves(new_model(3), PROMPT, from_disk.generate(PROMPT, 6))


def test_a_peer_that_moves_on_meanwhile_leaves_the_newcomer_torn_and_a_repeat_mends_it(
    shared_engine, from_disk, trainer, monkeypatch
):
    connect(trainer, shared_engine, from_disk)
    sync(trainer, 3)
    connect(trainer, shared_engine)
    newcomer, peer = from_disk.control("newcomer"), shared_engine.control("peer")
    receive = takeover._receive

    def receive_and_sync(*arguments: Any) -> Any:
        reports = receive(*arguments)
        sync(trainer, 8)
        return reports

    monkeypatch.setattr(takeover, "_receive", receive_and_sync)
    with pytest.raises(StaleTransactionError, match="moved on"):
        take_over(newcomer, peer)
    assert state(from_disk)[0] == "TORN"
    monkeypatch.undo()
    take_over(newcomer, peer)
    assert state(from_disk) == state(shared_engine)
    assert_serves(new_model(8), PROMPT, from_disk.generate(PROMPT, 6))
