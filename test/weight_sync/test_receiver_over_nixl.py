"""Pulls between two actors over real Ray and NIXL, without an engine: arrival is proved, refusals move nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
import torch
from support.receiving_rank import ReceivingRank, Source, start
from support.toy_model import Fused, weights_of

from sglang.srt.ray.weight_sync import (
    DeadlineExceededError,
    DigestMismatchError,
    GenerationNotPausedError,
    ReadInFlightError,
    SessionNotOpenError,
    TensorSpec,
    TransferError,
    WeightMismatchError,
    WeightNameError,
    WeightSyncError,
)
from sglang.srt.ray.weight_sync.digest import SUMS, XXH3, tensor_digest
from sglang.srt.ray.weight_sync.shards import Region, ShardCopy, ShardPlan

SHAPES = {"a": (64, 32), "b": (1000,), "c": (3, 5, 7), "d": (1,), "strided": (6, 4)}
NAMES = ["a", "b", "c", "d"]
WAIT_S = 90.0


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=WAIT_S)


@pytest.fixture(scope="module")
def source(ray_address: str) -> Iterator[Any]:
    actor = start(Source)
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def module_rank(ray_address: str) -> Iterator[Any]:
    actor = start(ReceivingRank, SHAPES)
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def fused_rank(ray_address: str) -> Iterator[Any]:
    actor = start(ReceivingRank)
    yield actor
    ray.kill(actor)


@pytest.fixture
def rank(module_rank: Any) -> Any:
    get(module_rank.set_state.remote(paused=True, session=True))
    return module_rank


def random_tensors(names: list[str] = NAMES, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SHAPES[name], generator=generator) for name in names}


def put(source: Any, tensors: Any) -> list[Any]:
    return get(source.put.remote(list(tensors)))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# F1: what a pull reports as arrived has arrived in the parameters


def test_pulled_bytes_stand_in_the_live_parameters_at_their_old_addresses(rank: Any, source: Any):
    before = get(rank.addresses.remote())
    for seed in range(3):
        sent = random_tensors(seed=seed)
        report = get(rank.pull_under_collection.remote(put(source, sent.values()), list(sent)))
        values = get(rank.values.remote())
        assert all(torch.equal(values[name], sent[name]) for name in sent)
        assert report.total_bytes == sum(t.nbytes for t in sent.values())
        assert (report.rank, report.verified) == (5, False)
    assert get(rank.addresses.remote()) == before


def test_a_delivery_to_somewhere_else_is_an_error_and_not_a_success(rank: Any, source: Any):
    before = get(rank.values.remote())
    sent = random_tensors(seed=100)
    with pytest.raises(TransferError, match="'a' arrived at address"):
        get(rank.pull_with_lost_targets.remote(put(source, sent.values()), list(sent)))
    assert same(get(rank.values.remote()), before), "the control: Ray had dropped the targets"


def test_a_pull_takes_any_subset_in_any_order_over_several_refs(rank: Any, source: Any):
    before = get(rank.values.remote())
    sent = random_tensors(["c", "a", "d"], seed=7)
    refs = put(source, [sent["c"]]) + put(source, [sent["a"], sent["d"]])
    get(rank.pull.remote(refs, ["c", "a", "d"]))
    assert same(get(rank.values.remote()), before | sent)


def test_refs_between_which_the_source_gave_memory_back_are_pulled_together(
    ray_address: str, source: Any
):
    shapes = dict.fromkeys("abcd", (4 << 20,))  # 16 MB each: under way when the next starts
    rank = start(ReceivingRank, shapes)
    sent = {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(shapes.items())}
    refs = get(source.put_with_a_release_between.remote([[tensor] for tensor in sent.values()]))
    get(rank.pull.remote(refs, list(sent)))
    held = get(rank.values.remote())
    assert all(torch.equal(held[name], tensor) for name, tensor in sent.items())
    ray.kill(rank)


def test_nothing_may_be_pulled_too(rank: Any):
    assert get(rank.pull.remote([], [])).total_bytes == 0


def test_registering_pins_each_storage_once_and_only_where_pins_are_allowed(fused_rank: Any):
    count = len(get(fused_rank.layout.remote()).entries)
    expected = {"registered": True, "not_reached": [], "tensors": count, "regions": count}
    assert get(fused_rank.register.remote()) == get(fused_rank.register.remote()) == expected
    answer = get(fused_rank.register.remote(pins_allowed=False))
    assert answer["registered"] is False
    assert "memory saver" in answer["reason"]


def test_a_draft_model_is_named_as_what_no_sync_reaches(fused_rank: Any):
    def give_it_one(actor: Any) -> Any:
        actor.scheduler.draft_worker = object()
        try:
            return actor.receiver.register()
        finally:
            del actor.scheduler.draft_worker

    (what,) = get(fused_rank.__ray_call__.remote(give_it_one))["not_reached"]
    assert "draft model" in what


def test_a_parameter_that_cannot_be_a_target_is_refused_when_it_is_registered(rank: Any):
    with pytest.raises(WeightMismatchError, match="'strided' is not contiguous") as refused:
        get(rank.register.remote())
    assert (refused.value.tensor, refused.value.rank) == ("strided", 5)


# F2: a refusal names the parameter, and no byte of any other has moved


def broken(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """All four tensors with the last one replaced: whoever checks one at a time has moved three by then."""
    return random_tensors(NAMES[:3], seed=50) | {name: tensor}


@pytest.mark.parametrize(
    ("tensors", "names", "error", "text"),
    [
        (broken("d", torch.zeros(2)), NAMES, WeightMismatchError, r"'d'.*\(2,\).*\(1,\)"),
        (broken("d", torch.zeros(1, 1)), NAMES, WeightMismatchError, r"'d'.*\(1, 1\)"),
        (broken("d", torch.zeros(1).double()), NAMES, WeightMismatchError, "'d'.*'float64'"),
        (broken("d", torch.zeros(1).int()), NAMES, WeightMismatchError, "'d'.*'int32'"),
        (broken("d", torch.zeros(1)), NAMES[:3], WeightNameError, r"4 tensor\(s\).* 3 name"),
        (broken("d", torch.zeros(1)), [*NAMES, "strided"], WeightMismatchError, "'strided'"),
        (broken("e", torch.zeros(1)), [*NAMES[:3], "e"], WeightNameError, r"\['e'\]"),
        (broken("d", torch.zeros(1)), ["a", "b", "c", "a"], WeightNameError, r"\['a'\]"),
        (broken("d", torch.zeros(4, 6)), [*NAMES[:3], "strided"], WeightMismatchError, "strided"),
    ],
    ids=[
        "size",
        "rank",
        "wider dtype",
        "other dtype",
        "too few names",
        "too many names",
        "unknown name",
        "duplicate name",
        "not contiguous",
    ],
)
def test_a_pull_that_does_not_fit_is_refused_by_name_before_a_byte_moves(
    rank: Any, source: Any, tensors: Any, names: list[str], error: type[Exception], text: str
):
    before = get(rank.values.remote())
    with pytest.raises(error, match=text) as refused:
        get(rank.pull.remote(put(source, tensors.values()), names))
    assert isinstance(refused.value, ValueError)
    assert refused.value.rank == 5
    assert same(get(rank.values.remote()), before)


@pytest.mark.parametrize("digests", [{}, {"a": "xxh3:0"}, {"a": "md5:0", "b": "md5:0"}])
def test_digests_that_could_not_be_compared_are_refused_before_a_byte_moves(
    rank: Any, source: Any, digests: dict[str, str]
):
    before = get(rank.values.remote())
    sent = random_tensors(["a", "b"], seed=60)
    with pytest.raises(ValueError, match=r"'b'|'md5:0'"):
        get(rank.pull.remote(put(source, sent.values()), list(sent), digests=digests))
    assert same(get(rank.values.remote()), before)


def test_an_ordinary_ray_object_is_refused_by_name(rank: Any, source: Any):
    before = get(rank.values.remote())
    refs = get(source.plain_put.remote([torch.zeros(SHAPES["a"])]))
    with pytest.raises(ValueError, match=r"is not an RDT object.*_tensor_transport"):
        get(rank.pull.remote(refs, ["a"]))
    assert same(get(rank.values.remote()), before)


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"paused": False, "session": True}, GenerationNotPausedError),
        ({"paused": True, "session": False}, SessionNotOpenError),
        ({"paused": False, "session": False}, WeightSyncError),
    ],
)
def test_bytes_land_only_while_paused_and_in_a_session(
    rank: Any, source: Any, state: dict[str, bool], error: type[Exception]
):
    before = get(rank.values.remote())
    sent = random_tensors(seed=70)
    refs = put(source, sent.values())
    get(rank.set_state.remote(**state))
    with pytest.raises(error):
        get(rank.pull.remote(refs, list(sent)))
    assert same(get(rank.values.remote()), before)
    get(rank.set_state.remote(paused=True, session=True))
    get(rank.pull.remote(refs, list(sent)))
    assert same(get(rank.values.remote()), before | sent)


# Digests


@pytest.mark.parametrize("algorithm", [XXH3, SUMS])
def test_matching_digests_make_a_pull_verified_and_another_one_is_named_with_both(
    rank: Any, source: Any, algorithm: str
):
    sent = random_tensors(seed=80)
    digests = {name: tensor_digest(tensor, algorithm) for name, tensor in sent.items()}
    refs = put(source, sent.values())
    assert get(rank.pull.remote(refs, list(sent), digests=digests)).verified
    other = tensor_digest(sent["c"] + 1, algorithm)
    with pytest.raises(DigestMismatchError) as refused:
        get(rank.pull.remote(refs, list(sent), digests=digests | {"c": other}))
    assert (refused.value.tensor, refused.value.rank, refused.value.phase) == ("c", 5, "verify")
    assert other in str(refused.value)
    assert digests["c"] in str(refused.value)


def test_a_parameter_above_the_limit_is_split_and_each_part_is_proved(source: Any):
    sent = torch.randn(700_001)
    receiving = start(ReceivingRank, {"small": (3,), "large": tuple(sent.shape)})
    weights = [torch.randn(3), sent]
    try:
        names = ("small", "large")
        manifest = [
            TensorSpec.of(name, tensor) for name, tensor in zip(names, weights, strict=True)
        ]
        copies = [whole_copy(index, tensor.numel()) for index, tensor in enumerate(weights)]
        layout = get(receiving.layout.remote())
        plan = ShardPlan(
            manifest=tuple(manifest),
            layout_fingerprint=layout.fingerprint,
            targets={name: (copy,) for name, copy in zip(names, copies, strict=True)},
            unused_sources=(),
            missing_targets=(),
            partly_sent_targets=(),
            computed_targets=(),
            stateful_buffers=(),
        )
        published = get(source.publish.remote(layout, plan, weights, 1))
        parts = [str(piece) for piece in published.pieces]
        assert parts == [
            "small",
            "large[0:262144]",
            "large[262144:524288]",
            "large[524288:700001]",
        ]
        pull = (published.refs, published.pieces)
        assert get(receiving.pull.remote(*pull, digests=published.digests)).verified
        assert torch.equal(get(receiving.values.remote())["large"], sent)
        wrong = published.digests | {parts[2]: published.digests[parts[1]]}
        with pytest.raises(DigestMismatchError) as refused:
            get(receiving.pull.remote(*pull, digests=wrong))
        assert refused.value.tensor == "large[262144:524288]"
    finally:
        ray.kill(receiving)


def whole_copy(source_index: int, size: int) -> ShardCopy:
    whole = Region(start=0, shape=(size,), strides=(1,))
    return ShardCopy(source=source_index, source_region=whole, target_region=whole)


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
def test_any_bucket_size_brings_the_same_bytes(fused_rank: Any, source: Any, bucket_bytes: int):
    model = Fused()
    weights = weights_of(model)
    receiving = fused_rank
    manifest = [TensorSpec.of(name, tensor) for name, tensor in weights.items()]
    layout, plan = get([receiving.layout.remote(), receiving.plan.remote(manifest)])
    published = get(source.publish.remote(layout, plan, list(weights.values()), bucket_bytes))
    assert (len(published.refs) == 1) is (bucket_bytes > 300)
    report = get(receiving.pull.remote(published.refs, published.pieces, digests=published.digests))
    assert report.verified
    model.load_weights(weights.items())
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert same(get(receiving.values.remote()), expected)


# Memory


def test_a_pull_needs_no_memory_of_its_own(ray_address: str, source: Any):
    size = 128 << 20
    shapes = {"small": (1024,), "large": (size // 4,)}
    receiving = start(ReceivingRank, shapes)
    get(receiving.pull.remote(get(source.put_filled.remote((1024,), 1.0)), ["small"]))
    refs = get(source.put_filled.remote(shapes["large"], 2.0))
    grown, stored = get(receiving.pull_and_measure.remote(refs, ["large"]))
    assert grown < size / 8, f"the peak of resident memory grew by {grown} bytes"
    assert stored == 0
    assert (get(receiving.values.remote())["large"] == 2.0).all()
    ray.kill(receiving)


# F4: a source that stalls or dies


@pytest.fixture
def stallable(ray_address: str) -> Iterator[tuple[Any, psutil.Process]]:
    actor = start(Source)
    process = psutil.Process(get(actor.pid.remote()))
    yield actor, process
    if process.is_running():
        process.send_signal(signal.SIGCONT)
    ray.kill(actor)


@pytest.fixture
def fresh_rank(ray_address: str) -> Iterator[Any]:
    """A rank that has not met its source: its first contact needs the source's process."""
    actor = start(ReceivingRank, {name: SHAPES[name] for name in NAMES})
    get(actor.register.remote())
    yield actor
    ray.kill(actor)


def pull_once_the_late_read_is_over(rank: Any, refs: list[Any], names: list[str]) -> None:
    """Until then a rank refuses; how long the source takes to answer again is not ours."""
    deadline = time.monotonic() + 30.0
    while True:
        try:
            get(rank.pull.remote(refs, names))
            return
        except ReadInFlightError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_source_that_stalls_ends_in_a_named_error_at_the_deadline(
    stallable: tuple[Any, psutil.Process], fresh_rank: Any
):
    source, process = stallable
    sent = random_tensors(seed=90)
    refs = put(source, sent.values())
    os.kill(process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError) as late:
        get(fresh_rank.pull.remote(refs, list(sent), deadline_s=3.0))
    assert 2.0 < time.monotonic() - started < 20.0
    assert late.value.rank == 5
    assert "'a' ... 'd'" in str(late.value) or "ObjectRef" in str(late.value)
    assert get(fresh_rank.layout.remote()).entries, "the rank still answers"
    os.kill(process.pid, signal.SIGCONT)
    again = random_tensors(seed=91)
    pull_once_the_late_read_is_over(fresh_rank, put(source, again.values()), list(again))
    assert same(get(fresh_rank.values.remote()), again)


def test_a_source_that_was_killed_ends_in_a_typed_error_in_bounded_time(
    stallable: tuple[Any, psutil.Process], fresh_rank: Any
):
    source, process = stallable
    sent = random_tensors(seed=92)
    refs = put(source, sent.values())
    process.kill()
    process.wait(10)
    started = time.monotonic()
    with pytest.raises(WeightSyncError):
        get(fresh_rank.pull.remote(refs, list(sent), deadline_s=5.0))
    assert time.monotonic() - started < 30.0
    assert get(fresh_rank.layout.remote()).entries, "the rank still answers"
