"""One replica whose engine has two data-parallel ranks: each call reaches both, each session stays on one of them.

Its engine also parses reasoning and tool calls, which the tests have it write by a regular expression.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import requests
from support.local_ray import local_ray
from support.models import new_model
from support.oracle import assert_serves
from support.serve_app import MODEL, ServedApp, llm_config, running_app
from support.trainer import start_serve_trainer
from test_aborts import Running, abort
from test_sessions import new_tokens, opened, turn

pytestmark = pytest.mark.slow

WAIT_S = 120.0
RANKS = (0, 1)


@pytest.fixture(scope="module")
def app(tiny_model: Path) -> Iterator[ServedApp]:
    engine = {"dp_size": 2, "reasoning_parser": "qwen3", "tool_call_parser": "qwen25"}
    config = llm_config(tiny_model, replicas=1, engine=engine)
    with local_ray(num_cpus=3), running_app(config) as running:
        running.wait_for_replicas(1)
        yield running


def test_turns_of_a_session_stay_on_the_rank_that_has_their_cache(app: ServedApp) -> None:
    for number in range(6):
        session = opened(app)
        prompt = [20 + number, 11, 12, 13, 14]
        for index in range(4):
            answer = turn(app, prompt, session["session_id"])
            cached = answer.json()["meta_info"]["cached_tokens"]
            assert index == 0 or cached >= len(prompt) - 3
            prompt = [*prompt, *new_tokens(answer), 15, 16]


def test_an_abort_finds_a_request_on_either_rank(app: ServedApp) -> None:
    for rank in RANKS:
        running = Running(app, f"on-{rank}", routed_dp_rank=rank)
        other = Running(app, f"on-{rank}0", tokens=600, routed_dp_rank=1 - rank)
        assert running.started.wait(30)
        told = abort(app, rid=f"on-{rank}")[f"on-{rank}"]
        assert (told["found"], told["stage"], told["ended"]) == (True, "running", True)
        assert running.wait() == "abort"
        assert other.wait() == "length"


def test_control_calls_reach_both_ranks(app: ServedApp) -> None:
    (result,) = app.post("/collective_rpc", {"method": "engine_state"}).json()["replicas"]
    assert [rank["rank"] for rank in result["state"]["ranks"]] == [0, 1]
    assert app.post("/sleep", {"tags": ["kv_cache"]}).status_code == requests.codes.ok
    (asleep,) = app.get("/is_sleeping").json()["replicas"]
    assert asleep["state"]["asleep"] == ["kv_cache"]
    assert app.post("/wakeup").status_code == requests.codes.ok
    app.generate([5, 6, 7], 3)


def test_a_sync_and_a_load_reach_both_ranks(app: ServedApp) -> None:
    trainer: Any = start_serve_trainer()
    ray.get(trainer.connect_serve.remote(app.name, MODEL), timeout=WAIT_S)
    (ranks,) = ray.get(trainer.sync.remote(3, "3"), timeout=WAIT_S).ranks.values()
    assert len(ranks) == 2
    load = trainer.load_through_a_replica.remote(app.name, f"SGLangServer:{MODEL}", 4, "4", None)
    assert ray.get(load, timeout=WAIT_S).verified
    for rank in RANKS:
        answer = app.generate([5, 6, 7, 8], 6, routed_dp_rank=rank)
        assert answer.version == "4"
        assert_serves(new_model(4), [5, 6, 7, 8], answer)
    ray.kill(trainer)


def test_reasoning_is_told_apart_from_the_answer(app: ServedApp) -> None:
    answer = app.openai().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "bada"}],
        max_tokens=60,
        temperature=0,
        extra_body={"regex": "<think>abc</think>def"},
    )
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("abc", "def")


def test_a_tool_call_arrives_as_one(app: ServedApp) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
    answer = app.openai().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "bada"}],
        max_tokens=120,
        temperature=0,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "add"}},
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "add"
    assert isinstance(json.loads(call.function.arguments), dict)
