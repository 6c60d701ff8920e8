"""Whole or nothing over two ranks (F6): rank 1 fails where rank 0 succeeds, and nobody serves the mix."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support.engine import RunningEngine, running_engine
from support.models import new_model
from support.oracle import assert_serves
from support.trainer import start_trainer

from sglang.srt.ray.weight_sync import DeadlineExceededError, DigestMismatchError, TransferError

PROMPT = list(range(5, 17))
_versions = itertools.count(1)


@pytest.fixture(scope="module")
def engine(ray_address: str, tiny_model: Path) -> Iterator[RunningEngine]:
    with running_engine(tiny_model, tp_size=2) as two_ranks:
        yield two_ranks


@pytest.fixture(scope="module")
def trainer(engine: RunningEngine) -> Iterator[Any]:
    actor = start_trainer()
    yield actor
    ray.kill(actor)


@pytest.fixture(autouse=True)
def a_whole_start(engine: RunningEngine, trainer: Any) -> None:
    """Whatever the last test broke, both ranks hold seed 1 and every receiver is as the product has it."""

    def undo(actor: Any) -> None:
        receiver = actor._weight_receiver()
        for name in ("_finish", "_start", "pull"):
            receiver.__dict__.pop(name, None)

    for rank in (0, 1):
        _in_rank(engine, rank, undo)
    _connect(engine, trainer)
    _sync(trainer, 1, force=True)


def _in_rank(engine: RunningEngine, rank: int, function: Any, *arguments: Any) -> Any:
    call = engine.actors[rank].__ray_call__.options(concurrency_group="control")
    return ray.get(call.remote(function, *arguments), timeout=60)


def _connect(engine: RunningEngine, trainer: Any, **options: Any) -> None:
    options = {"deadline_s": 30.0} | options
    ray.get(
        trainer.connect.remote([(engine.url, engine.actors, "two ranks")], **options), timeout=120
    )


def _sync(trainer: Any, seed: int, **options: Any) -> Any:
    return ray.get(trainer.sync.remote(seed, str(next(_versions)), **options), timeout=120)


def _status(engine: RunningEngine) -> dict[str, Any]:
    answer: dict[str, Any] = engine.get("weight_sync").json()
    return answer


def _damage(engine: RunningEngine, rank: int, method: str, wrap: Any) -> None:
    def install(actor: Any, name: str, make: Any) -> None:
        receiver = actor._weight_receiver()
        setattr(receiver, name, make(getattr(receiver, name)))

    _in_rank(engine, rank, install, method, wrap)


def _flip_a_bit(original: Any) -> Any:
    def finish(read: Any, names: Any, targets: Any, deadline: float) -> None:
        original(read, names, targets, deadline)
        import torch

        targets[0].view(-1).view(torch.uint8)[0] ^= 4

    return finish


def _break_the_third_bucket(original: Any) -> Any:
    started: list[Any] = []

    def start(ref: Any, names: Any, targets: Any) -> Any:
        started.append(ref)
        if len(started) == 3:
            raise TransferError("the lane broke", tensor=names[0], phase="wire")
        return original(ref, names, targets)

    return start


def _sleep_once(original: Any) -> Any:
    called: list[Any] = []

    def pull(*arguments: Any, **options: Any) -> Any:
        import time

        called.append(arguments)
        if len(called) == 1:
            time.sleep(12)
        return original(*arguments, **options)

    return pull


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 28])
def test_both_ranks_get_their_shards_and_serve_what_hugging_face_computes(
    engine, trainer, bucket_bytes
):
    _connect(engine, trainer, bucket_bytes=bucket_bytes)
    report = _sync(trainer, 2)
    assert [each.rank for each in report.ranks["two ranks"]] == [0, 1]
    assert_serves(new_model(2), PROMPT, engine.generate(PROMPT, 6))


@pytest.mark.parametrize(
    ("method", "wrap", "error", "text"),
    [
        ("_finish", _flip_a_bit, DigestMismatchError, "does not hold what was sent"),
        ("_start", _break_the_third_bucket, TransferError, "the lane broke"),
    ],
)
def test_a_failure_of_rank_1_is_named_and_neither_rank_serves(
    engine, trainer, method, wrap, error, text
):
    before = _status(engine)["version"]
    _connect(engine, trainer, bucket_bytes=100_000)
    _damage(engine, 1, method, wrap)
    with pytest.raises(error, match=text) as caught:
        _sync(trainer, 3)
    assert (caught.value.engine, caught.value.rank) == ("two ranks", 1)
    assert caught.value.tensor
    status = _status(engine)
    assert (status["state"], status["version"]) == ("TORN", before)
    refused = engine.post(
        "generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    )
    assert (refused.status_code, "TORN" in refused.text) == (503, True)


def test_a_rank_that_does_not_answer_is_named_within_the_deadline(engine, trainer):
    _connect(engine, trainer, deadline_s=4.0)
    _damage(engine, 1, "pull", _sleep_once)
    with pytest.raises(DeadlineExceededError, match="commit_weights was not answered") as caught:
        _sync(trainer, 3)
    assert caught.value.rank == 1
    assert _status(engine)["state"] == "TORN"
    # The late call wakes up while the next version's commit waits behind it; it must not write into that version.
    assert _sync(trainer, 4).verified
    assert_serves(new_model(4), PROMPT, engine.generate(PROMPT, 6))


def test_torn_ranks_are_whole_again_after_one_complete_sync(engine, trainer):
    _damage(engine, 1, "_finish", _flip_a_bit)
    with pytest.raises(DigestMismatchError):
        _sync(trainer, 3)

    def undo(actor: Any) -> None:
        actor._weight_receiver().__dict__.pop("_finish", None)

    _in_rank(engine, 1, undo)
    assert _sync(trainer, 4).verified
    assert_serves(new_model(4), PROMPT, engine.generate(PROMPT, 6))
