"""Weights out of refs through the engine's own loader: the engine then computes what Hugging Face computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from support.engine import RunningEngine
from support.models import ENGINE_SEED, new_model
from support.oracle import assert_serves
from support.trainer import start_trainer

from sglang.srt.ray.weight_sync import (
    DigestMismatchError,
    EngineRequestError,
    EngineTornError,
    EngineWithoutActorsError,
    WeightManifest,
    WeightNameError,
    load_object_refs,
)

PROMPT = [5, 6, 7, 8, 9, 10]
WAIT_S = 120.0


class Putter:
    """A trainer that only puts: refs to named tensors, whole or in parts."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def put(self, seed: int, num_parts: int, transport: str | None, pairs: bool = False) -> Any:
        items = list(new_model(seed).state_dict().items())
        step = -(-len(items) // num_parts)
        parts = [items[i : i + step] for i in range(0, len(items), step)]
        values = [part if pairs else dict(part) for part in parts]
        self._held.append(values)
        options = {} if transport is None else {"_tensor_transport": transport}
        return [ray.put(value, **options) for value in values], WeightManifest.of(items)


@pytest.fixture(scope="module")
def putter(session_engine: RunningEngine) -> Iterator[Any]:
    ray.cloudpickle.register_pickle_by_value(__import__(__name__))
    actor = ray.remote(num_cpus=0, enable_tensor_transport=True)(Putter).remote()
    yield actor
    ray.kill(actor)


@pytest.fixture
def publish(shared_engine: RunningEngine) -> Iterator[Any]:
    """A `WeightPublisher` to mend with, started when it is first needed."""
    started: list[Any] = []

    def sync(seed: int, version: str) -> None:
        if not started:
            started.append(start_trainer())
            controls = [(shared_engine.url, shared_engine.actors, "e0")]
            ray.get(started[0].connect.remote(controls), timeout=WAIT_S)
        ray.get(started[0].sync.remote(seed, version), timeout=WAIT_S)

    yield sync
    for actor in started:
        ray.kill(actor)


def put(putter: Any, *arguments: Any) -> tuple[list[Any], WeightManifest]:
    return ray.get(putter.put.remote(*arguments), timeout=WAIT_S)


def load(engine: RunningEngine, refs: Any, version: str, **options: Any) -> Any:
    return load_object_refs([engine.control("e0")], refs, version=version, **options)


def assert_holds(engine: RunningEngine, seed: int, version: str) -> None:
    answer = engine.generate(PROMPT, 6)
    assert_serves(new_model(seed), PROMPT, answer)
    assert answer.version == version


def state_of(engine: RunningEngine) -> dict[str, Any]:
    return engine.get("weight_sync").json()


@pytest.mark.parametrize("transport", [None, "nixl"])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_one_ref_in_the_object_store_or_rdt(
    shared_engine: RunningEngine, putter: Any, transport: str | None, with_manifest: bool
):
    seed, version = 71 + with_manifest, f"one-{transport}-{with_manifest}"
    (ref,), manifest = put(putter, seed, 1, transport)
    report = load(shared_engine, ref, version, manifest=manifest if with_manifest else None)
    assert_holds(shared_engine, seed, version)
    assert (report.staging, report.verified) == ("loader", with_manifest)
    assert report.total_bytes == sum(spec.num_bytes for spec in manifest.tensors)
    assert state_of(shared_engine)["verified"] is with_manifest


def test_a_list_of_pairs_and_a_generator_of_refs(shared_engine: RunningEngine, putter: Any):
    refs, _ = put(putter, 73, 4, None, True)
    load(shared_engine, refs, "list")
    assert_holds(shared_engine, 73, "list")
    refs, manifest = put(putter, 74, 5, "nixl")
    assert len(refs) > 3
    report = load(shared_engine, iter(refs), "generator", manifest=manifest)
    assert report.verified
    assert_holds(shared_engine, 74, "generator")
    refs, _ = put(putter, 75, 5, None)
    load(shared_engine, (ref for ref in refs), "no manifest")
    assert_holds(shared_engine, 75, "no manifest")


def test_what_does_not_cover_the_model_is_refused_before_the_pause(
    shared_engine: RunningEngine, putter: Any
):
    refs, _ = put(putter, 76, 1, None)
    load(shared_engine, refs, "good")
    state = new_model(77).state_dict()
    misspelt = {name.replace("norm.weight", "nrom.weight"): t for name, t in state.items()}
    with pytest.raises(WeightNameError, match=r"nrom\.weight"):
        load(shared_engine, ray.put(misspelt), "bad")
    some = {name: state[name] for name in list(state)[:3]}
    with pytest.raises(WeightNameError, match=r"nobody sends"):
        load(shared_engine, [ray.put(some)], "bad")
    with pytest.raises(WeightNameError, match="declared but not given"):
        load(shared_engine, [ray.put(some)], "bad", partial=[*some, "lm_head.*"])
    with pytest.raises(WeightNameError, match="weights must be"):
        load(shared_engine, [ray.put([1, 2])], "bad")
    with pytest.raises(ValueError, match="inside a list"):
        load(shared_engine, state, "bad")
    assert_holds(shared_engine, 76, "good")


def test_a_declared_part_of_the_weights(shared_engine: RunningEngine, putter: Any):
    refs, _ = put(putter, 78, 1, None)
    load(shared_engine, refs, "whole")
    mixed = new_model(78)
    new = {n: t for n, t in new_model(79).state_dict().items() if n.startswith("model.layers.1.")}
    mixed.load_state_dict(new, strict=False)
    report = load(shared_engine, ray.put(new), "part", partial=["model.layers.1.*"])
    assert report.partial
    answer = shared_engine.generate(PROMPT, 6)
    assert_serves(mixed, PROMPT, answer)


def test_a_byte_that_is_not_what_was_announced_tears_nothing_when_it_comes_first(
    shared_engine: RunningEngine, putter: Any
):
    refs, _ = put(putter, 80, 1, None)
    load(shared_engine, refs, "before")
    _, manifest = put(putter, 81, 1, None)
    damaged = new_model(81).state_dict()
    next(iter(damaged.values())).view(-1)[7] += 1.0
    with pytest.raises(DigestMismatchError, match=r"embed_tokens") as refused:
        load(shared_engine, ray.put(damaged), "after", manifest=manifest)
    assert any("SERVING" in note for note in refused.value.__notes__)
    assert_holds(shared_engine, 80, "before")


def test_a_rank_that_fails_half_way_is_torn_and_mended_by_a_publisher(
    shared_engine: RunningEngine, putter: Any, publish: Any
):
    refs, _ = put(putter, 82, 4, None)
    state = new_model(82).state_dict()
    last = list(state)[-2]
    broken = ray.put({last: state[last][:, :3] if state[last].dim() > 1 else state[last][:3]})
    with pytest.raises(EngineRequestError, match="loader failed") as failed:
        load(shared_engine, (ref for ref in [refs[0], broken]), "torn")
    assert failed.value.rank == 0
    assert state_of(shared_engine)["state"] == "TORN"
    assert shared_engine.post("generate", {"input_ids": PROMPT}).status_code == 503
    norm = ray.put({"model.norm.weight": state["model.norm.weight"]})
    with pytest.raises(EngineTornError, match="partial"):
        load(shared_engine, norm, "torn", partial=["*"])
    publish(ENGINE_SEED, "mended")
    assert_holds(shared_engine, ENGINE_SEED, "mended")
    load(shared_engine, refs, "again")
    assert_holds(shared_engine, 82, "again")


def test_a_generator_that_ends_early_is_torn_and_mended_by_a_load(
    shared_engine: RunningEngine, putter: Any
):
    refs, _ = put(putter, 83, 4, None)
    with pytest.raises(WeightNameError, match="nobody sends"):
        load(shared_engine, iter(refs[:2]), "torn")
    assert state_of(shared_engine)["state"] == "TORN"
    load(shared_engine, refs, "whole")
    assert_holds(shared_engine, 83, "whole")


def test_a_load_and_a_pull_in_one_session_of_a_client(
    shared_engine: RunningEngine, putter: Any, publish: Any
):
    """Seed 84 everywhere, but for the final norm, which is pulled, and the head, which is loaded."""
    publish(84, "base")
    state = new_model(85).state_dict()
    mixed = new_model(84)
    names = ["model.norm.weight", "lm_head.weight"]
    mixed.load_state_dict({name: state[name] for name in names}, strict=False)
    puller = start_trainer()
    shared_engine.post("pause_generation", {"mode": "retract"}).raise_for_status()
    shared_engine.post("begin_weight_update", {}).raise_for_status()
    actor = shared_engine.actors[0]
    ray.get(puller.pull_into.remote(actor, 85, [[names[0]]]), timeout=WAIT_S)
    ref = ray.put({names[1]: state[names[1]]})
    ray.get(actor.update_weights_from_object_ref.remote([ref]), timeout=WAIT_S)
    shared_engine.post("end_weight_update", {}).raise_for_status()
    shared_engine.post("continue_generation", {}).raise_for_status()
    ray.kill(puller)
    assert_serves(mixed, PROMPT, shared_engine.generate(PROMPT, 6))


def test_an_engine_without_actors_says_so():
    from sglang.srt.ray.hosted_engine import load_into_engine

    class Forked:
        scheduler_init_result = object()

    with pytest.raises(EngineWithoutActorsError, match="Forked"):
        load_into_engine(Forked(), [ray.ObjectRef.nil()], version="1")
