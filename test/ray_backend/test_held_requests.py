"""Requests that have not reached a scheduler can be ended; all others pass through untouched."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from sglang.srt.ray.held_requests import HeldRequests, ids_of


def obj(rid: str | list[str]) -> SimpleNamespace:
    return SimpleNamespace(rid=rid)


async def upstream(gate: asyncio.Event, seen: list[str]):
    """Waits as for a pause, then answers twice."""
    try:
        await gate.wait()
        yield 1
        yield 2
    except BaseException as error:
        seen.append(type(error).__name__)
        raise


def test_answers_pass_through():
    async def run() -> list[int]:
        gate = asyncio.Event()
        gate.set()
        held = HeldRequests()
        answers = held.answers(obj("a"), upstream(gate, []), lambda: "aborted")
        got = [answer async for answer in answers]
        assert not held.end("a"), "it is no longer held"
        return got

    assert asyncio.run(run()) == [1, 2]


def test_a_held_request_is_ended_and_upstream_is_told():
    async def run() -> None:
        held, seen = HeldRequests(), []
        answers = held.answers(obj(["a", "b"]), upstream(asyncio.Event(), seen), lambda: "aborted")
        first = asyncio.ensure_future(anext(answers))
        await asyncio.sleep(0)
        assert not held.end("c")
        assert held.end("b")
        assert await asyncio.wait_for(first, 5) == "aborted"
        assert seen == ["CancelledError"]
        assert [answer async for answer in answers] == []

    asyncio.run(run())


def test_upstreams_errors_and_the_callers_cancellation_pass():
    async def failing():
        raise ValueError("bad prompt")
        yield

    async def run() -> None:
        held, seen = HeldRequests(), []
        with pytest.raises(ValueError, match="bad prompt"):
            await anext(held.answers(obj("a"), failing(), lambda: "aborted"))
        waiting = asyncio.ensure_future(
            anext(held.answers(obj("a"), upstream(asyncio.Event(), seen), lambda: "aborted"))
        )
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert seen == ["CancelledError"]

    asyncio.run(run())


def test_ids_of_one_many_and_none():
    assert ids_of(obj("a")) == ["a"]
    assert ids_of(obj(["a", "b"])) == ["a", "b"]
    assert ids_of(SimpleNamespace(rid=None)) == []
