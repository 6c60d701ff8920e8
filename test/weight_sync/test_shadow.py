"""`staging="shadow"` into a live engine: it serves while weights come in, and a failed transfer touches nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from support.engine import RunningEngine
from support.models import new_model
from support.oracle import assert_serves
from support.trainer import start_trainer

from sglang.srt.ray.weight_sync import (
    DigestMismatchError,
    StaleTransactionError,
    TransferError,
)

PROMPT = [5, 6, 7, 8, 9, 10]
WAIT_S = 120.0
BUCKET_BYTES = 1 << 20
_versions = itertools.count(1)


@pytest.fixture(scope="module")
def trainer(session_engine: RunningEngine) -> Iterator[Any]:
    """Connected with buckets of 1 MB, so that a sync has several."""
    actor = start_trainer()
    controls = [(session_engine.url, session_engine.actors, "e0")]
    ray.get(actor.connect.remote(controls, bucket_bytes=BUCKET_BYTES), timeout=WAIT_S)
    yield actor
    ray.get(actor.close.remote(), timeout=WAIT_S)
    ray.kill(actor)


@pytest.fixture(autouse=True)
def a_whole_receiver(shared_engine: RunningEngine) -> Iterator[None]:
    """Whatever a test did to the receiver is undone."""
    yield
    _in_rank(shared_engine, _undo)


def _undo(actor: Any) -> None:
    for name in ("_start", "_finish", "_copy_staged"):
        actor._weight_receiver().__dict__.pop(name, None)


def _in_rank(engine: RunningEngine, function: Any, *arguments: Any) -> Any:
    call = engine.actors[0].__ray_call__.options(concurrency_group="control")
    return ray.get(call.remote(function, *arguments), timeout=60)


def _damage(engine: RunningEngine, method: str, wrap: Any) -> None:
    def install(actor: Any, name: str, make: Any) -> None:
        receiver = actor._weight_receiver()
        setattr(receiver, name, make(getattr(receiver, name)))

    _in_rank(engine, install, method, wrap)


def _sync(trainer: Any, seed: int, **options: Any) -> Any:
    """A sync of `seed` under the version `shadow-N`."""
    options = {"staging": "shadow"} | options
    call = trainer.sync.remote(seed, f"shadow-{next(_versions)}", **options)
    return ray.get(call, timeout=WAIT_S)


def _assert_still_serves(engine: RunningEngine, seed: int, version: str) -> None:
    status = engine.get("weight_sync").json()
    assert (status["state"], status["version"]) == ("SERVING", version)
    answer = engine.generate(PROMPT, 8, timeout_s=30)
    assert_serves(new_model(seed), PROMPT, answer)
    assert answer.version == version


def _flip_a_bit(original: Any) -> Any:
    def finish(read: Any, names: Any, targets: Any, deadline: float) -> None:
        original(read, names, targets, deadline)
        import torch

        targets[0].view(-1).view(torch.uint8)[0] ^= 4

    return finish


def _break_the_third_bucket(original: Any) -> Any:
    started: list[Any] = []

    def start(ref: Any, names: Any, targets: Any) -> Any:
        from sglang.srt.ray.weight_sync import TransferError

        started.append(ref)
        if len(started) == 3:
            raise TransferError("the lane broke", tensor=names[0], phase="wire")
        return original(ref, names, targets)

    return start


def _slow(original: Any) -> Any:
    def finish(*arguments: Any) -> None:
        import time

        time.sleep(0.3)
        original(*arguments)

    return finish


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_what_came_through_the_shadow_is_what_hugging_face_computes(
    shared_engine: RunningEngine, trainer: Any, pause: str
):
    for seed in (71, 72):
        report = _sync(trainer, seed, pause=pause)
        _assert_still_serves(shared_engine, seed, report.version)
        assert report.verified
        assert report.staging == "shadow"
        assert report.total_bytes == shared_engine.ask("weight_layout").num_bytes
        assert report.phase_seconds["copy"] > 0
        assert report.phase_seconds["wire"] == report.phase_seconds["verify"] == 0
        assert report.pause_seconds < report.total_seconds - report.phase_seconds["prefetch"]


def test_a_direct_sync_and_a_shadow_one_may_follow_each_other(
    shared_engine: RunningEngine, trainer: Any
):
    for seed, staging in ((73, "shadow"), (74, "direct"), (75, "shadow")):
        report = _sync(trainer, seed, staging=staging)
        _assert_still_serves(shared_engine, seed, report.version)


def test_tokens_keep_flowing_from_the_old_weights_during_the_transfer(
    shared_engine: RunningEngine, trainer: Any
):
    old = _sync(trainer, 76)
    _damage(shared_engine, "_finish", _slow)
    call = trainer.sync.remote(77, "shadow-slow", staging="shadow")
    answers = []
    while shared_engine.get("weight_sync").json()["version"] == old.version:
        answers.append(shared_engine.generate(PROMPT, 4, timeout_s=30))
    report = ray.get(call, timeout=WAIT_S)
    assert report.phase_seconds["prefetch"] > 1.0
    during = [answer for answer in answers if answer.version == old.version]
    assert len(during) > 3
    assert_serves(new_model(76), PROMPT, during[-1])
    assert report.pause_seconds < report.phase_seconds["prefetch"] / 2
    _assert_still_serves(shared_engine, 77, "shadow-slow")


@pytest.mark.parametrize(
    ("method", "damage", "error"),
    [
        ("_finish", _flip_a_bit, DigestMismatchError),
        ("_start", _break_the_third_bucket, TransferError),
    ],
    ids=["a flipped bit", "a broken lane"],
)
def test_a_transfer_that_fails_leaves_the_old_version_serving(
    shared_engine: RunningEngine, trainer: Any, method: str, damage: Any, error: Any
):
    old = _sync(trainer, 81)
    _damage(shared_engine, method, damage)
    with pytest.raises(error) as failed:
        _sync(trainer, 82)
    assert (failed.value.engine, failed.value.rank) == ("e0", 0)
    _assert_still_serves(shared_engine, 81, old.version)
    _in_rank(shared_engine, _undo)
    new = _sync(trainer, 83)
    _assert_still_serves(shared_engine, 83, new.version)


def test_a_failed_copy_leaves_the_engine_torn_and_another_shadow_sync_mends_it(
    shared_engine: RunningEngine, trainer: Any
):
    def fail(original: Any) -> Any:
        def copy(staged: Any, targets: Any) -> Any:
            from sglang.srt.ray.weight_sync import TransferError

            original(staged, targets)
            raise TransferError("the copy failed", phase="copy")

        return copy

    _sync(trainer, 84)
    _damage(shared_engine, "_copy_staged", fail)
    with pytest.raises(TransferError, match="the copy failed"):
        _sync(trainer, 85)
    assert shared_engine.get("weight_sync").json()["state"] == "TORN"
    assert shared_engine.post("generate", {"input_ids": PROMPT}).status_code == 503
    _in_rank(shared_engine, _undo)
    new = _sync(trainer, 86)
    _assert_still_serves(shared_engine, 86, new.version)


def test_a_bound_on_the_shadow_memory_is_kept_and_the_rest_is_pulled_in_the_pause(
    shared_engine: RunningEngine, trainer: Any
):
    ray.get(trainer.__ray_call__.remote(lambda t: t._publisher.release_shadow()), timeout=WAIT_S)
    report = _sync(trainer, 87, shadow_bytes=2 * BUCKET_BYTES)
    _assert_still_serves(shared_engine, 87, report.version)
    assert report.verified
    assert report.phase_seconds["wire"] > 0
    assert report.total_bytes == shared_engine.ask("weight_layout").num_bytes
    held = ray.get(
        trainer.__ray_call__.remote(lambda t: t._publisher.release_shadow()), timeout=WAIT_S
    )
    assert 0 < held <= 2 * BUCKET_BYTES
    with pytest.raises(ValueError, match="first bucket"):
        _sync(trainer, 88, shadow_bytes=1000)
    with pytest.raises(ValueError, match="with 'shadow' only"):
        _sync(trainer, 88, staging="direct", shadow_bytes=2 * BUCKET_BYTES)
    _assert_still_serves(shared_engine, 87, report.version)


def test_a_buffer_that_another_owner_took_is_never_copied_from(
    shared_engine: RunningEngine, trainer: Any
):
    _sync(trainer, 91)
    other = start_trainer()
    try:
        controls = [(shared_engine.url, shared_engine.actors, "e0")]
        ray.get(other.connect.remote(controls, bucket_bytes=BUCKET_BYTES), timeout=WAIT_S)
        _hold_before_opening(trainer, seconds=6.0)
        first = trainer.sync.remote(92, "shadow-first", staging="shadow")
        time.sleep(1.0)
        ray.get(
            other.sync.remote(93, "shadow-second", staging="shadow", force=True), timeout=WAIT_S
        )
        with pytest.raises(StaleTransactionError):
            ray.get(first, timeout=WAIT_S)
        _assert_still_serves(shared_engine, 93, "shadow-second")
    finally:
        ray.get(trainer.__ray_call__.remote(lambda t: t._publisher.__dict__.pop("_stage", None)))
        ray.kill(other)


def _hold_before_opening(trainer: Any, *, seconds: float) -> None:
    def install(actor: Any, pause: float) -> None:
        once = actor._publisher._stage

        def stage_and_wait(*arguments: Any) -> None:
            import time

            once(*arguments)
            time.sleep(pause)

        actor._publisher._stage = stage_and_wait

    ray.get(trainer.__ray_call__.remote(install, seconds), timeout=30)
