"""The parts of `staging="shadow"` that need no Ray and no engine: the buffer's record, the split, the wait."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import zmq

from sglang.srt.ray.weight_sync import (
    DigestMismatchError,
    ReadInFlightError,
    StaleTransactionError,
)
from sglang.srt.ray.weight_sync.buckets import Published
from sglang.srt.ray.weight_sync.layout import TensorPiece
from sglang.srt.ray.weight_sync.ledger import PullReport
from sglang.srt.ray.weight_sync.paused_loop import paused_wait
from sglang.srt.ray.weight_sync.shadow import ShadowBuffer

PIECES = [TensorPiece(name="a"), TensorPiece(name="b", elements=(0, 7))]
TARGETS = [torch.zeros(3, 5), torch.zeros(7, dtype=torch.bfloat16)]
REPORT = PullReport(rank=0, total_bytes=74, wire_seconds=1.0, verify_seconds=0.5, verified=True)


@pytest.fixture
def shadow() -> ShadowBuffer:
    return ShadowBuffer(0, pins_allowed=False)


class FakeRead:
    """A transfer that was given up."""

    def __init__(self) -> None:
        self.over = False

    def is_over(self) -> bool:
        return self.over


def test_the_buffers_have_the_targets_shapes_and_share_no_memory_with_them(shadow):
    buffers = shadow.open("t", PIECES, TARGETS)
    assert [(b.shape, b.dtype) for b in buffers] == [(t.shape, t.dtype) for t in TARGETS]
    spans = sorted((b.data_ptr(), b.data_ptr() + b.nbytes) for b in [*buffers, *TARGETS])
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(buffer.data_ptr() % 64 == buffers[0].data_ptr() % 64 for buffer in buffers)


def test_only_a_transaction_that_completed_can_be_copied_from(shadow):
    with pytest.raises(StaleTransactionError, match="'t'"):
        shadow.staged("t")
    shadow.open("t", PIECES, TARGETS)
    with pytest.raises(StaleTransactionError):
        shadow.staged("t")
    shadow.succeeded(REPORT)
    assert shadow.staged("t").report is REPORT
    assert shadow.answer("t") is REPORT
    assert shadow.answer("u") is None
    shadow.open("u", PIECES, TARGETS)
    with pytest.raises(StaleTransactionError, match="last staged: 'u'"):
        shadow.staged("t")


def test_a_repeated_call_of_a_failed_transfer_gets_its_error_again(shadow):
    shadow.open("t", PIECES, TARGETS)
    shadow.failed(DigestMismatchError("wrong", tensor="a"))
    for _ in range(2):
        with pytest.raises(DigestMismatchError, match="wrong"):
            shadow.answer("t")
    with pytest.raises(StaleTransactionError):
        shadow.staged("t")


def test_the_memory_is_used_again_and_given_back(shadow):
    first = shadow.open("t", PIECES, TARGETS)[0].data_ptr()
    assert shadow.open("u", PIECES, TARGETS)[0].data_ptr() == first
    shadow.succeeded(REPORT)
    assert shadow.release() == 128
    assert shadow.release() == 0
    with pytest.raises(StaleTransactionError):
        shadow.staged("u")


def test_nothing_is_staged_or_released_while_a_read_that_was_given_up_may_still_write(shadow):
    shadow.open("t", PIECES, TARGETS)
    late, over = FakeRead(), FakeRead()
    over.over = True
    shadow.give_up([late, over])
    with pytest.raises(ReadInFlightError, match="1 read"):
        shadow.open("u", PIECES, TARGETS)
    with pytest.raises(ReadInFlightError):
        shadow.release()
    late.over = True
    assert len(shadow.open("u", PIECES, TARGETS)) == 2


def published() -> Published:
    pieces = [TensorPiece(name=name) for name in "abcd"]
    return Published(
        refs=["r0", "r1", "r2"],
        pieces=pieces,
        digests={str(piece): f"xxh3:{piece}" for piece in pieces},
        counts=[1, 2, 1],
        sizes=[10, 20, 30],
    )


@pytest.mark.parametrize(
    ("limit", "first"), [(None, 3), (60, 3), (59, 2), (30, 2), (29, 1), (10, 1), (9, 0)]
)
def test_a_split_takes_the_first_refs_that_fit_and_loses_nothing(limit, first):
    whole = published()
    early, rest = whole.split(limit)
    assert early.refs == whole.refs[:first]
    assert early.refs + rest.refs == whole.refs
    assert early.pieces + rest.pieces == whole.pieces
    assert early.digests | rest.digests == whole.digests
    assert early.counts + rest.counts == whole.counts
    for part in (early, rest):
        assert sum(part.counts) == len(part.pieces) == len(part.digests)


def test_a_paused_loop_with_a_socket_wakes_for_a_message_and_looks_up_now_and_then():
    context = zmq.Context()
    hears, tells = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    port = hears.bind_to_random_port("tcp://127.0.0.1")
    tells.connect(f"tcp://127.0.0.1:{port}")
    try:
        wait = paused_wait(
            SimpleNamespace(
                ipc_channels=SimpleNamespace(recv_from_tokenizer=hears, recv_from_rpc=None)
            )
        )
        started = time.monotonic()
        wait()
        assert 0.004 < time.monotonic() - started < 1.0
        sender = threading.Timer(0.001, tells.send, args=(b"wake",))
        sender.start()
        while not wait():
            assert time.monotonic() - started < 5.0
        sender.join()
    finally:
        context.destroy(linger=0)


def test_a_paused_loop_without_a_socket_sleeps_a_moment():
    started = time.monotonic()
    paused_wait(SimpleNamespace())()
    assert 0.0004 < time.monotonic() - started < 1.0
