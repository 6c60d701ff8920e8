"""Questions to every rank, for the fence and for Serve's verbs: one answer or exception each, within one deadline."""

from __future__ import annotations

import asyncio
import concurrent.futures
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.ray.rank_calls import RankCalls
from sglang.srt.ray.serve.results import ControlError
from sglang.srt.ray.serve.verbs import ReplicaVerbs
from sglang.srt.ray.weight_sync.errors import DeadlineExceededError


class Rank:
    """An actor handle whose every verb answers with its arguments, fails, or never answers."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __getattr__(self, verb: str) -> Any:
        def remote(*arguments: Any) -> Any:
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            if self.kind == "answers":
                future.set_result([verb, *arguments])
            elif self.kind == "fails":
                future.set_exception(OSError("gone"))
            return SimpleNamespace(future=lambda: future)

        return SimpleNamespace(remote=remote)


RANKS = [Rank("answers"), Rank("fails"), Rank("hangs")]


def test_each_rank_has_an_answer_an_error_or_a_named_deadline():
    answers = asyncio.run(RankCalls(RANKS).each("weight_layout", 1, timeout_s=0.1))
    assert answers[0] == ["weight_layout", 1]
    assert isinstance(answers[1], OSError)
    assert isinstance(answers[2], DeadlineExceededError)
    assert str(answers[2]) == "rank 2 did not answer 'weight_layout' within 0.1 s [rank=2]"


def test_a_rank_that_fails_to_answer_is_silent():
    assert asyncio.run(RankCalls(RANKS[:2]).silent()) == [1]


def test_a_verb_of_serve_names_each_rank_that_did_not_answer():
    engine = SimpleNamespace(tokenizer_manager=SimpleNamespace(), scheduler_actors=RANKS)
    verbs = ReplicaVerbs(engine)
    with pytest.raises(ControlError, match=r"2 of 3 rank.*gone.*rank 2 did not answer"):
        asyncio.run(verbs.collective_rpc(deadline_s=0.1, method="weight_layout", args=[1]))
    engine = SimpleNamespace(tokenizer_manager=SimpleNamespace(), scheduler_actors=RANKS[:1])
    answer = asyncio.run(
        ReplicaVerbs(engine).collective_rpc(deadline_s=1, method="weight_layout", args=[1])
    )
    assert answer["ranks"] == [{"rank": 0, "result": ["weight_layout", 1]}]
