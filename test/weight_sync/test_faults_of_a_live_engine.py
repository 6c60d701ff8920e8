"""Faults F4 to F11, F17, F22 and F23 on a real engine: what the caller is told, what is served, how it recovers.

Damage is done inside the ranks and the trainer by functions that run there (`__ray_call__`), never by a switch in the
product. What an engine must serve comes from Hugging Face's own forward (`support.oracle`).
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray
from support.engine import RunningEngine
from support.models import new_model
from support.oracle import assert_serves
from support.trainer import start_trainer

from sglang.srt.ray.weight_sync import (
    DeadlineExceededError,
    DigestMismatchError,
    EngineTornError,
    StaleTransactionError,
    TransactionBusyError,
    TransferError,
    WeightNameError,
    WeightSyncError,
)

PROMPT = list(range(5, 17))
TIMEOUT_S = 90.0


@pytest.fixture(scope="module")
def trainer() -> Iterator[Any]:
    actor = start_trainer()
    yield actor
    ray.kill(actor)


@pytest.fixture
def engine(shared_engine: RunningEngine, trainer: Any) -> Iterator[RunningEngine]:
    """The shared engine, whole and serving, with the trainer connected; mended afterwards whatever a test did."""
    _connect(trainer, shared_engine)
    _sync(trainer, 1, _next_version())
    yield shared_engine
    _undo_damage(shared_engine)
    _connect(trainer, shared_engine)
    _sync(trainer, 1, _next_version(), force=True)


_versions = iter(range(1000, 10**9))


def _next_version() -> str:
    return str(next(_versions))


def _connect(trainer: Any, engine: RunningEngine, **options: Any) -> None:
    options = {"deadline_s": 20.0} | options
    ray.get(
        trainer.connect.remote([(engine.url, engine.actors, "the engine")], **options),
        timeout=TIMEOUT_S,
    )


def _sync(trainer: Any, seed: int, version: str, **options: Any) -> Any:
    return ray.get(trainer.sync.remote(seed, version, **options), timeout=TIMEOUT_S)


def _state(engine: RunningEngine) -> dict[str, Any]:
    answer: dict[str, Any] = engine.get("weight_sync").json()
    return answer


def _serves(engine: RunningEngine, seed: int) -> None:
    assert_serves(new_model(seed), PROMPT, engine.generate(PROMPT, 6))


def _in_rank(engine: RunningEngine, function: Any, *arguments: Any) -> Any:
    """Run `function(actor_instance, *arguments)` in rank 0's process, beside its event loop."""
    call = engine.actors[0].__ray_call__.options(concurrency_group="control")
    return ray.get(call.remote(function, *arguments), timeout=30)


def _undo_damage(engine: RunningEngine) -> None:
    def undo(actor: Any) -> None:
        receiver = actor._weight_receiver()
        for name in ("_finish", "_start", "_check_layout"):
            receiver.__dict__.pop(name, None)

    _in_rank(engine, undo)


def _damage(engine: RunningEngine, method: str, wrap: Any) -> None:
    """Replace one method of the rank's receiver: `wrap(original)` gives the new one."""

    def install(actor: Any, name: str, make: Any) -> None:
        receiver = actor._weight_receiver()
        setattr(receiver, name, make(getattr(receiver, name)))

    _in_rank(engine, install, method, wrap)


def _flip_a_bit_after_arrival(original: Any) -> Any:
    def finish(read: Any, names: Any, targets: Any, deadline: float) -> None:
        original(read, names, targets, deadline)
        import torch

        targets[-1].view(-1).view(torch.uint8)[-1] ^= 1

    return finish


def _break_the_second_bucket(original: Any) -> Any:
    started = []

    def start(ref: Any, names: Any, targets: Any) -> Any:
        started.append(ref)
        if len(started) == 2:
            raise TransferError("the lane broke", tensor=names[0], phase="wire")
        return original(ref, names, targets)

    return start


def _refused(engine: RunningEngine) -> None:
    """Torn: requests, streams and chats get 503 with the state, resume is refused, the label stays."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    for path, request in (
        ("generate", body),
        ("generate", body | {"stream": True}),
        ("v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 2}),
        (
            "v1/chat/completions",
            {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True},
        ),
    ):
        answer = engine.post(path, request)
        assert (answer.status_code, "TORN" in answer.text) == (503, True), (path, answer.text)
    resumed = engine.post("continue_generation", {})
    assert (resumed.status_code, "EngineTornError" in resumed.text) == (503, True)
    assert engine.get("health_generate").status_code == 503


# Guarantee 1: proved arrival


def test_one_flipped_bit_is_found_named_and_never_served(engine, trainer):
    before = _state(engine)["version"]
    _damage(engine, "_finish", _flip_a_bit_after_arrival)
    with pytest.raises(DigestMismatchError, match=r"source xxh3:.*here xxh3:") as caught:
        _sync(trainer, 2, _next_version())
    assert (caught.value.engine, caught.value.rank, caught.value.phase) == (
        "the engine",
        0,
        "verify",
    )
    assert caught.value.tensor
    assert (_state(engine)["state"], _state(engine)["version"]) == ("TORN", before)
    _refused(engine)
    _undo_damage(engine)
    report = _sync(trainer, 2, _next_version())
    assert report.verified
    _serves(engine, 2)


# Guarantee 2 and 3: whole or nothing, fenced when torn (F6)


def test_a_lane_that_breaks_between_buckets_tears_the_engine_and_a_full_sync_mends_it(
    engine, trainer
):
    _connect(trainer, engine, bucket_bytes=1)
    _damage(engine, "_start", _break_the_second_bucket)
    with pytest.raises(TransferError, match="the lane broke"):
        _sync(trainer, 3, _next_version())
    _refused(engine)
    _undo_damage(engine)
    _sync(trainer, 3, _next_version())
    _serves(engine, 3)


def test_a_torn_engine_is_also_mended_by_a_reload_from_disk(engine, trainer, tmp_path):
    new_model(7).save_pretrained(tmp_path)
    _damage(engine, "_finish", _flip_a_bit_after_arrival)
    with pytest.raises(DigestMismatchError):
        _sync(trainer, 2, _next_version())
    answer = engine.post("update_weights_from_disk", {"model_path": str(tmp_path)})
    assert answer.status_code == 200, answer.text
    assert engine.post("continue_generation", {}).status_code == 200
    assert _state(engine)["state"] == "SERVING"
    _serves(engine, 7)


def test_open_requests_of_a_torn_engine_end_at_once_with_503(engine, trainer):
    _damage(engine, "_finish", _flip_a_bit_after_arrival)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
        }
        waiting = [pool.submit(engine.post, "generate", body) for _ in range(4)]
        time.sleep(0.5)
        with pytest.raises(DigestMismatchError):
            _sync(trainer, 2, _next_version())
        answers = [each.result(timeout=30) for each in waiting]
    assert [answer.status_code for answer in answers] == [503] * 4
    assert all("TORN" in answer.text for answer in answers)


# Guarantee 4: bounded (F4, F5, F9)


def test_a_frozen_source_is_a_named_deadline_and_the_engine_keeps_answering(engine, trainer):
    victim = start_trainer()
    _connect(victim, engine, deadline_s=4.0)
    _sync(victim, 4, _next_version())
    pid = ray.get(victim.__ray_call__.remote(lambda _: os.getpid()), timeout=30)

    def wait_for_nothing(original: Any) -> Any:
        def finish(read: Any, names: Any, targets: Any, deadline: float) -> None:
            # A read over `cma` does not need its source to run, so the wire itself is frozen here.
            class Never:
                def wait(self, *, timeout_s: float) -> None:
                    time.sleep(max(timeout_s, 0.0))
                    raise TimeoutError("nothing came")

            original(Never(), names, targets, deadline)

        return finish

    _damage(engine, "_finish", wait_for_nothing)
    sync = victim.sync.remote(5, _next_version())
    time.sleep(1.0)
    started = time.monotonic()
    assert _state(engine)["state"] == "SYNCING"
    assert time.monotonic() - started < 1.0
    with pytest.raises(DeadlineExceededError, match="did not deliver") as caught:
        ray.get(sync, timeout=30)
    assert caught.value.rank == 0
    assert _state(engine)["state"] == "TORN"
    os.kill(pid, signal.SIGKILL)


def test_a_trainer_killed_before_the_first_byte_leaves_the_old_version_serving(engine, trainer):
    before = _state(engine)["version"]
    victim = start_trainer()
    _connect(victim, engine, ttl_s=3.0)

    def open_and_die(actor: Any, version: str) -> None:
        publisher = actor._publisher
        publisher._commit = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        publisher.sync(actor.state(6), version=version)

    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(victim.__ray_call__.remote(open_and_die, _next_version()), timeout=60)
    assert _state(engine)["state"] == "SYNCING"
    _connect(trainer, engine)
    with pytest.raises(TransactionBusyError, match="take over with force"):
        _sync(trainer, 6, _next_version())
    _wait_until(
        lambda: _state(engine)["state"] == "SERVING", 10, "the engine to give the dead owner up"
    )
    assert _state(engine)["version"] == before
    _serves(engine, 1)


def test_a_trainer_killed_after_the_bytes_landed_leaves_it_torn_and_force_takes_over(
    engine, trainer
):
    victim = start_trainer()
    _connect(victim, engine, ttl_s=60.0)

    def commit_and_die(actor: Any, version: str) -> None:
        publisher = actor._publisher
        publisher._engines[0].seal = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        publisher.sync(actor.state(6), version=version)

    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(victim.__ray_call__.remote(commit_and_die, _next_version()), timeout=60)
    _connect(trainer, engine)
    with pytest.raises(TransactionBusyError):
        _sync(trainer, 8, _next_version())
    report = _sync(trainer, 8, _next_version(), force=True)
    assert report.verified
    _serves(engine, 8)


def test_a_zombie_trainer_is_told_that_it_is_late(engine, trainer):
    zombie = start_trainer()
    _connect(zombie, engine)
    for seed in (2, 3):
        _sync(trainer, seed, _next_version())
    with pytest.raises(StaleTransactionError, match="another owner took over"):
        _sync(zombie, 4, _next_version())
    _serves(engine, 3)
    ray.kill(zombie)


def test_an_older_version_never_lands_on_a_newer_one(engine, trainer):
    _sync(trainer, 2, _next_version())
    with pytest.raises(StaleTransactionError, match="'5' is older"):
        _sync(trainer, 3, "5")
    assert _state(engine)["state"] == "SERVING"
    _serves(engine, 2)


def test_a_repeated_commit_moves_no_byte_again(engine, trainer):
    def sync_with_commit_sent_twice(actor: Any, version: str) -> list[Any]:
        publisher = actor._publisher
        once, reports = type(publisher)._commit, []

        def twice(*arguments: Any, **options: Any) -> Any:
            reports.append(once(publisher, *arguments, **options))
            reports.append(once(publisher, *arguments, **options))
            return reports[-1]

        publisher._commit = twice
        try:
            publisher.sync(actor.state(9), version=version)
        finally:
            del publisher._commit
        return reports

    first, second = ray.get(
        trainer.__ray_call__.remote(sync_with_commit_sent_twice, _next_version()), timeout=60
    )
    assert first == second
    _serves(engine, 9)


# Guarantee 5: requests and prefixes (F10, F11, F23)


def _generate_many(engine: RunningEngine, pool: Any, count: int, length: int) -> list[Any]:
    body = {
        "sampling_params": {"max_new_tokens": length, "ignore_eos": True, "temperature": 0},
        "return_logprob": True,
    }
    return [
        pool.submit(engine.post, "generate", body | {"input_ids": [20 + i, *PROMPT]})
        for i in range(count)
    ]


@pytest.mark.parametrize("pause", ["in_place", "retract"])
def test_no_running_request_is_lost_and_its_versions_tile_its_tokens(engine, trainer, pause):
    length = 400
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        waiting = _generate_many(engine, pool, 16, length)
        time.sleep(0.7)
        versions = [_next_version(), _next_version()]
        for seed, version in zip((2, 3), versions, strict=True):
            _sync(trainer, seed, version, pause=pause)
            time.sleep(0.3)
        answers = [each.result(timeout=120) for each in waiting]
    assert [answer.status_code for answer in answers] == [200] * 16
    seen = set()
    for answer in answers:
        meta = answer.json()["meta_info"]
        assert meta["finish_reason"]["type"] == "length"
        spans = meta["weight_versions"]
        edges = [(span["start"], span["end"]) for span in spans]
        assert edges[0][0] == 0
        assert edges[-1][1] == length == len(meta["output_token_logprobs"])
        assert all(left[1] == right[0] for left, right in itertools.pairwise(edges))
        seen.update(span["version"] for span in spans)
    assert set(versions) & seen, (versions, seen)
    _serves(engine, 3)


def test_abort_ends_every_request_exactly_once_with_a_reason(engine, trainer):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = _generate_many(engine, pool, 8, 1500)
        time.sleep(0.5)
        _sync(trainer, 2, _next_version(), pause="abort")
        answers = [each.result(timeout=60) for each in waiting]
    reasons = [answer.json()["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert reasons == ["abort"] * 8
    _serves(engine, 2)


@pytest.mark.parametrize("pause", ["in_place", "retract", "abort"])
@pytest.mark.parametrize("running", [False, True])
def test_cached_prefixes_never_serve_another_version(engine, trainer, pause, running):
    prefix = [(7 * i) % 400 + 5 for i in range(500)]
    warm = engine.post(
        "generate",
        {"input_ids": [*prefix, 9], "sampling_params": {"max_new_tokens": 1, "temperature": 0}},
    ).json()["meta_info"]
    assert warm["prompt_tokens"] == 501
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = _generate_many(engine, pool, 2, 200) if running else []
        if running:
            time.sleep(0.5)
        _sync(trainer, 5, _next_version(), pause=pause)
        answer = engine.generate([*prefix, 9], 4)
        for each in waiting:
            assert each.result(timeout=60).status_code == 200
    assert_serves(new_model(5), [*prefix, 9], answer)


# Guarantee 6: nothing lost, nothing missing


def test_three_lists_name_what_is_wrong_before_any_byte_moves(engine, trainer):
    with pytest.raises(WeightNameError) as caught:
        _sync(
            trainer,
            2,
            _next_version(),
            drop=["model.norm.weight"],
            extra={"model.nonsense.weight": (3,)},
        )
    assert "model.nonsense.weight" in str(caught.value)
    assert "model.norm.weight" in str(caught.value)
    assert _state(engine)["state"] == "SERVING"
    _serves(engine, 1)


def test_a_declared_subset_is_sent_and_says_so(engine, trainer):
    def some(actor: Any, version: str) -> Any:
        state = {n: t for n, t in actor.state(2).items() if n.startswith("model.layers.0.")}
        return actor._publisher.sync(state, version=version, partial=["model.layers.0.*"])

    report = ray.get(trainer.__ray_call__.remote(some, _next_version()), timeout=60)
    assert (report.partial, report.verified) == (True, True)
    expected = new_model(1)
    other = new_model(2).state_dict()
    expected.load_state_dict(
        {n: t for n, t in other.items() if n.startswith("model.layers.0.")}, strict=False
    )
    assert_serves(expected, PROMPT, engine.generate(PROMPT, 6))


# Failures of the engine reach the trainer (F17)


@pytest.mark.parametrize(
    "verb", ["begin_session", "end_session", "try_flush_cache", "move_version_label"]
)
def test_an_error_of_the_engine_at_any_step_is_the_trainers_error_within_seconds(
    engine, trainer, verb
):
    def break_verb(host: Any, name: str) -> None:
        async def broken(*_: Any) -> None:
            raise RuntimeError(f"{name} is out of order")

        setattr(host._engine.tokenizer_manager, name, broken)

    def mend_verb(host: Any, name: str) -> None:
        delattr(host._engine.tokenizer_manager, name)

    ray.get(engine.host.__ray_call__.remote(break_verb, verb), timeout=30)
    started = time.monotonic()
    try:
        with pytest.raises(WeightSyncError, match=f"{verb} is out of order"):
            _sync(trainer, 2, _next_version())
    finally:
        ray.get(engine.host.__ray_call__.remote(mend_verb, verb), timeout=30)
    assert time.monotonic() - started < 20
    assert _state(engine)["state"] == ("SERVING" if verb == "begin_session" else "TORN")


# Buckets (F7)


@pytest.mark.parametrize("bucket_bytes", [1, 200_000, 1 << 30])
def test_how_tensors_are_bucketed_cannot_be_seen(engine, trainer, bucket_bytes):
    _connect(trainer, engine, bucket_bytes=bucket_bytes)
    _sync(trainer, 11, _next_version())
    _serves(engine, 11)


# A client's own verbs


def test_a_failed_pull_of_a_client_makes_end_say_torn(engine, trainer):
    _damage(engine, "_start", lambda _: _raise_transfer_error)
    assert engine.post("pause_generation", {}).status_code == 200
    assert engine.post("begin_weight_update", {}).status_code == 200
    with pytest.raises(TransferError):
        ray.get(trainer.pull_into.remote(engine.actors[0], 2, [["model.norm.weight"]]), timeout=60)
    ended = engine.post("end_weight_update", {})
    assert (ended.status_code, "EngineTornError" in ended.text) == (503, True)
    _refused(engine)


def _raise_transfer_error(ref: Any, names: Sequence[str], targets: Any) -> None:
    raise TransferError("no lane", tensor=names[0], phase="wire")


def _wait_until(condition: Any, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.2)


def test_torn_is_what_a_client_that_ignores_errors_runs_into(engine, trainer):
    _damage(engine, "_finish", _flip_a_bit_after_arrival)
    with pytest.raises(DigestMismatchError):
        _sync(trainer, 2, _next_version())
    with pytest.raises(EngineTornError):
        engine.control()._call("POST", "/open", 5.0, _open_body(partial=True))


def _open_body(**changes: Any) -> dict[str, Any]:
    return {
        "transaction": "by hand",
        "sequence": 10**9,
        "owner": "test",
        "version": _next_version(),
        "ttl_s": 5.0,
    } | changes


# Leaks (F22)


def _registrations_and_memory(actor: Any) -> tuple[int, int, int]:
    import psutil
    from ray.experimental.rdt.util import get_tensor_transport_manager

    transport = get_tensor_transport_manager("NIXL")
    pinned = sum(entry.metadata_count for entry in transport._tensor_desc_cache.values())
    return len(transport._tensor_desc_cache), pinned, psutil.Process().memory_info().rss


def test_two_hundred_failing_syncs_leave_registrations_and_memory_where_they_were(engine, trainer):
    _damage(engine, "_finish", _flip_a_bit_after_arrival)

    def fail(actor: Any, count: int) -> None:
        for _ in range(count):
            try:
                actor._publisher.sync(actor.state(2), version="10000000")
            except DigestMismatchError:
                continue
            raise AssertionError("a damaged sync came through")

    def failing(count: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        ray.get(trainer.__ray_call__.remote(fail, count), timeout=180)
        here = ray.get(trainer.__ray_call__.remote(_registrations_and_memory), timeout=30)
        return _in_rank(engine, _registrations_and_memory), here

    rank_before, trainer_before = failing(20)
    rank_after, trainer_after = failing(180)
    assert rank_after[:2] == rank_before[:2]
    assert trainer_after[:2] == trainer_before[:2]
    assert rank_after[2] - rank_before[2] < 24e6, (rank_before, rank_after)
    assert trainer_after[2] - trainer_before[2] < 24e6, (trainer_before, trainer_after)
