"""A trainer's weights into a live engine: what it then computes is what Hugging Face computes from them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from support.engine import RunningEngine
from support.fused import fused_state
from support.models import ENGINE_SEED, new_model
from support.oracle import GAP, assert_serves, gap, greedy
from support.trainer import start_trainer

from sglang.srt.ray.weight_sync import (
    GenerationNotPausedError,
    SessionNotOpenError,
    TransactionBusyError,
    WeightNameError,
)
from sglang.srt.ray.weight_sync.report import PHASES

PROMPT = [5, 6, 7, 8, 9, 10]
LONG_PROMPT = [3 + (7 * i * i + i) % 500 for i in range(1000)]
WAIT_S = 120.0
MEASURED = {"plan", "stage", "pause", "begin", "wire", "verify", "end", "flush", "version"}


@pytest.fixture(scope="module")
def trainer(session_engine: RunningEngine) -> Iterator[Any]:
    """Connected to the shared engine with buckets of 1 MB, so that a sync has several."""
    actor = start_trainer()
    controls = [(session_engine.url, session_engine.actors, "e0")]
    ray.get(actor.connect.remote(controls, bucket_bytes=1 << 20), timeout=WAIT_S)
    yield actor
    ray.get(actor.close.remote(), timeout=WAIT_S)
    ray.kill(actor)


def sync(trainer: Any, seed: int, version: str, *arguments: Any, **options: Any) -> Any:
    return ray.get(trainer.sync.remote(seed, version, *arguments, **options), timeout=WAIT_S)


def checksums(engine: RunningEngine) -> dict[str, str]:
    response = engine.post("weights_checker", {"action": "checksum"})
    response.raise_for_status()
    return response.json()["ranks"][0]["checksums"]


def expected_checksums(seed: int) -> dict[str, str]:
    """Upstream's checksum, computed from the weights that the trainer has: SHA-256 of the bytes, first 8 bytes."""
    return {
        name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
        for name, tensor in fused_state(new_model(seed).state_dict()).items()
    }


# What the engine says it holds


def test_the_layout_is_what_the_weights_checker_and_hugging_face_say(shared_engine: RunningEngine):
    layout = shared_engine.ask("weight_layout")
    shapes = {name: tuple(t.shape) for name, t in fused_state(new_model(0).state_dict()).items()}
    assert {entry.name: entry.shape for entry in layout.entries} == shapes
    assert {entry.dtype for entry in layout.entries} == {"float32"}
    assert {entry.name for entry in layout.entries} == set(checksums(shared_engine))
    assert shared_engine.ask("weight_layout") == layout


def test_registering_pins_every_parameter_once(shared_engine: RunningEngine):
    first = shared_engine.ask("register_weight_for_rdt")
    assert first == shared_engine.ask("register_weight_for_rdt")
    assert first["registered"] is True
    assert first["tensors"] == len(shared_engine.ask("weight_layout").entries)


def test_verbs_answer_within_a_second_while_the_loop_runs_and_while_it_generates(
    shared_engine: RunningEngine,
):
    def fastest() -> float:
        seconds = []
        for _ in range(5):
            started = time.monotonic()
            shared_engine.ask("weight_layout", timeout_s=10)
            with pytest.raises(GenerationNotPausedError):
                shared_engine.ask("pull_weights", [], [], timeout_s=10)
            seconds.append(time.monotonic() - started)
        return min(seconds)

    assert fastest() < 1.0
    with generating(shared_engine, length=600) as request:
        assert fastest() < 1.0
        assert not request.done.is_set(), "the request ended before the verbs were called"
    assert len(request.answer.tokens) == 600


class Generating:
    """A request on a thread of its own."""

    def __init__(self, engine: RunningEngine, prompt: list[int], length: int) -> None:
        self.answer: Any = None
        self.done = threading.Event()
        self._failure: BaseException | None = None
        self._arguments = engine, prompt, length
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        engine, prompt, length = self._arguments
        try:
            self.answer = engine.generate(prompt, length)
        except BaseException as error:  # raised again where the request is waited for
            self._failure = error
        finally:
            self.done.set()

    def __enter__(self) -> Generating:
        engine, *_ = self._arguments
        self._thread.start()
        deadline = time.monotonic() + 30
        while running_requests(engine) == 0:
            assert time.monotonic() < deadline, "the request did not start within 30 s"
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.done.wait(WAIT_S), "the request did not end"
        if self._failure is not None:
            raise self._failure


def running_requests(engine: RunningEngine) -> int:
    loads = engine.get("v1/loads").json()
    return sum(int(load["num_running_reqs"]) for load in loads["loads"])


def generating(engine: RunningEngine, *, length: int) -> Generating:
    return Generating(engine, PROMPT, length)


# Syncs


@pytest.mark.parametrize("pause", ["retract", "abort", "in_place"])
def test_after_each_of_several_syncs_the_engine_computes_what_hugging_face_computes(
    shared_engine: RunningEngine, trainer: Any, pause: str
):
    for seed in (11, 12, ENGINE_SEED):
        version = f"{pause}-{seed}"
        report = sync(trainer, seed, version, pause)
        answer = shared_engine.generate([seed, *PROMPT], 8)
        assert_serves(new_model(seed), [seed, *PROMPT], answer)
        assert answer.version == report.version == version
        assert checksums(shared_engine) == expected_checksums(seed)
        assert report.verified
        assert report.pause_mode == pause
        assert report.total_bytes == shared_engine.ask("weight_layout").num_bytes
        assert MEASURED <= set(report.phase_seconds) <= set(PHASES)


def test_the_oracle_would_notice_a_single_tensor_that_stayed_behind(
    shared_engine: RunningEngine, trainer: Any
):
    sync(trainer, 13, "v13")
    answer = shared_engine.generate(PROMPT, 8)
    model = new_model(13)
    assert gap(model, PROMPT, answer) < GAP
    model.model.layers[1].input_layernorm.weight.data *= 1.01
    assert gap(model, PROMPT, answer) > 10 * GAP


@pytest.mark.parametrize(
    ("pause", "old", "new"),
    [
        ("retract", 21, 22),
        ("abort", 23, 24),
        ("in_place", 25, 26),
    ],
)
def test_a_prefix_that_was_cached_before_a_sync_is_not_used_after_it(
    shared_engine: RunningEngine, trainer: Any, pause: str, old: int, new: int
):
    sync(trainer, old, f"v{old}", pause)
    shared_engine.generate(LONG_PROMPT, 2)
    warm = shared_engine.generate(LONG_PROMPT, 2)
    assert warm.cached > 900, "the prefix was not cached: nothing is tested"
    sync(trainer, new, f"v{new}", pause)
    assert_serves(new_model(new), LONG_PROMPT, shared_engine.generate(LONG_PROMPT, 4))


def test_retract_lets_a_running_request_go_on_and_abort_ends_it(
    shared_engine: RunningEngine, trainer: Any
):
    with generating(shared_engine, length=300) as kept:
        sync(trainer, 31, "v31", "retract")
        assert not kept.done.is_set(), "the request ended before the sync"
    assert (kept.answer.finish, len(kept.answer.tokens)) == ("length", 300)
    with generating(shared_engine, length=3000) as ended:
        sync(trainer, 32, "v32", "abort")
    assert ended.answer.finish == "abort"
    assert len(ended.answer.tokens) < 3000
    assert_serves(new_model(32), PROMPT, shared_engine.generate(PROMPT, 4))


def test_what_a_request_generates_after_a_retracting_sync_comes_from_the_new_weights(
    shared_engine: RunningEngine, trainer: Any
):
    sync(trainer, 41, "v41")
    with generating(shared_engine, length=200) as request:
        sync(trainer, 42, "v42", "retract")
        assert not request.done.is_set()
    tokens = request.answer.tokens
    tail = greedy(new_model(42), [*PROMPT, *tokens[:-8]], 8)
    assert tokens[-8:] == tail.tokens
    assert tokens[:1] == greedy(new_model(41), PROMPT, 1).tokens


# Verbs that the client drives itself


@pytest.mark.parametrize("mode", [None, "abort", "retract", "in_place"])
def test_verbs_need_a_pause_in_any_mode_and_an_open_session(
    shared_engine: RunningEngine, trainer: Any, mode: str | None
):
    sync(trainer, 51, "v51")
    actor = shared_engine.actors[0]
    groups = [["model.norm.weight"], ["lm_head.weight", "model.embed_tokens.weight"]]

    def pull() -> Any:
        return ray.get(trainer.pull_into.remote(actor, 52, groups), timeout=WAIT_S)

    with pytest.raises(GenerationNotPausedError, match="pause_generation"):
        pull()
    shared_engine.post(
        "pause_generation", {} if mode is None else {"mode": mode}
    ).raise_for_status()
    with pytest.raises(SessionNotOpenError, match="begin_weight_update"):
        pull()
    shared_engine.post("begin_weight_update", {}).raise_for_status()
    one, two = pull()
    assert (one["bytes"], two["bytes"]) == (256 * 4, 2 * 512 * 256 * 4)
    shared_engine.post("end_weight_update", {}).raise_for_status()
    with pytest.raises(SessionNotOpenError):
        pull()
    assert shared_engine.post("flush_cache").status_code == 200
    shared_engine.post("continue_generation", {"torch_empty_cache": False}).raise_for_status()
    with pytest.raises(GenerationNotPausedError):
        pull()
    merged = expected_checksums(51)
    new = expected_checksums(52)
    merged |= {name: new[name] for group in groups for name in group}
    assert checksums(shared_engine) == merged


def test_a_session_without_a_pause_is_not_enough(shared_engine: RunningEngine, trainer: Any):
    shared_engine.post("begin_weight_update", {}).raise_for_status()
    with pytest.raises(GenerationNotPausedError):
        ray.get(
            trainer.pull_into.remote(shared_engine.actors[0], 52, [["model.norm.weight"]]),
            timeout=WAIT_S,
        )
    shared_engine.post("end_weight_update", {}).raise_for_status()


@pytest.mark.parametrize(("mode", "old", "new"), [(None, 53, 54), ("in_place", 55, 56)])
def test_a_prefix_that_was_cached_before_a_clients_own_session_is_not_used_after_it(
    shared_engine: RunningEngine, trainer: Any, mode: str | None, old: int, new: int
):
    sync(trainer, old, f"v{old}")
    shared_engine.generate(LONG_PROMPT, 2)
    assert shared_engine.generate(LONG_PROMPT, 2).cached > 900
    names = [entry.name for entry in shared_engine.ask("weight_layout").entries]
    shared_engine.post(
        "pause_generation", {} if mode is None else {"mode": mode}
    ).raise_for_status()
    shared_engine.post("begin_weight_update", {}).raise_for_status()
    pulls = trainer.pull_into.remote(shared_engine.actors[0], new, [names[:7], names[7:]])
    ray.get(pulls, timeout=WAIT_S)
    shared_engine.post("end_weight_update", {}).raise_for_status()
    shared_engine.post("continue_generation", {}).raise_for_status()
    assert_serves(new_model(new), LONG_PROMPT, shared_engine.generate(LONG_PROMPT, 4))


# Refused syncs


def assert_unharmed(engine: RunningEngine, seed: int, version: str) -> None:
    """Serving, not paused, the weights of `seed` under their label, and no session left open."""
    answer = engine.generate(PROMPT, 4, timeout_s=30)
    assert_serves(new_model(seed), PROMPT, answer)
    assert answer.version == version
    assert engine.post("begin_weight_update", {}).status_code == 200
    assert engine.post("end_weight_update", {}).status_code == 200


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ({"rename": {"model.norm.weight": "model.norm.weihgt"}}, "model.norm.weight"),
        ({"drop": ["model.layers.1.self_attn.k_proj.bias"]}, "layers.1.self_attn.qkv_proj.bias"),
        ({"drop": ["lm_head.weight"]}, "lm_head.weight"),
    ],
    ids=["misspelt name", "a part of a fused tensor missing", "a tensor missing"],
)
def test_a_sync_that_does_not_cover_the_model_is_refused_before_the_engine_is_paused(
    shared_engine: RunningEngine, trainer: Any, damage: dict[str, Any], named: str
):
    sync(trainer, 61, "v61")
    with pytest.raises(WeightNameError, match=named) as refused:
        sync(trainer, 62, "v62", **damage)
    assert (refused.value.engine, refused.value.phase) == ("e0", "plan")
    assert_unharmed(shared_engine, 61, "v61")
    sync(trainer, 63, "v63")
    assert_unharmed(shared_engine, 63, "v63")


def test_a_sync_with_a_tensor_that_nobody_takes_is_refused_by_name(
    shared_engine: RunningEngine, trainer: Any
):
    sync(trainer, 61, "v61")
    with pytest.raises(WeightNameError, match=r"\['model\.layers\.9\.extra\.weight'\]"):
        sync(trainer, 62, "v62", extra={"model.layers.9.extra.weight": (4, 4)})
    assert_unharmed(shared_engine, 61, "v61")


def test_a_sync_with_a_wrong_shape_is_refused_by_name(shared_engine: RunningEngine, trainer: Any):
    sync(trainer, 61, "v61")
    # Upstream's loader pads what is too small with zeros, in silence.
    with pytest.raises(WeightNameError, match=r"pads.*layers\.0\.mlp\.down_proj\.weight"):
        sync(trainer, 62, "v62", reshape={"model.layers.0.mlp.down_proj.weight": (256, 511)})
    assert_unharmed(shared_engine, 61, "v61")


@pytest.mark.parametrize("pause", ["retract", "abort", "in_place"])
def test_a_sync_that_finds_a_clients_session_open_is_refused_and_leaves_it_alone(
    shared_engine: RunningEngine, trainer: Any, pause: str
):
    sync(trainer, 61, "v61")
    shared_engine.post("begin_weight_update", {}).raise_for_status()
    with pytest.raises(TransactionBusyError, match="client verbs") as refused:
        sync(trainer, 62, "v62", pause)
    assert (refused.value.engine, refused.value.phase) == ("e0", "begin")
    assert_serves(new_model(61), PROMPT, shared_engine.generate(PROMPT, 4, timeout_s=30))
    assert shared_engine.post("end_weight_update", {}).status_code == 200
    assert_unharmed(shared_engine, 61, "v61")


def test_a_publisher_goes_on_after_a_clients_own_session(
    shared_engine: RunningEngine, trainer: Any
):
    sync(trainer, 61, "v61")
    for _ in range(3):
        shared_engine.post("begin_weight_update", {}).raise_for_status()
        shared_engine.post("end_weight_update", {}).raise_for_status()
    sync(trainer, 63, "v63")
    assert_unharmed(shared_engine, 63, "v63")
