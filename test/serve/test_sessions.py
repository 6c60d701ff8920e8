"""Sessions over HTTP: every turn reaches the same replica, whose cache proves it, or is told that it can't (F19)."""

from __future__ import annotations

import time

import pytest
import ray
import requests
from support.models import new_model
from support.oracle import Generation, assert_serves
from support.serve_app import MODEL, ServedApp

LENGTH = 8


def opened(served: ServedApp, **body) -> dict:
    answer = served.post("/sessions", body)
    assert answer.status_code == requests.codes.created, answer.text
    return answer.json()


def turn(served: ServedApp, prompt: list[int], session: str, header: str = "x-session-id"):
    sampling = {"max_new_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    answer = served.post("/generate", body, headers={header: session})
    assert answer.status_code == requests.codes.ok, answer.text
    return answer


def new_tokens(answer: requests.Response) -> list[int]:
    return [token for _, token, *_ in answer.json()["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize("header", ["x-session-id", "X_Session_Id"])
def test_turns_stay_on_their_replica_and_use_its_cache(served: ServedApp, header: str) -> None:
    served.post("/reset_prefix_cache")
    for number in range(6):
        session = opened(served)
        prompt = [10 + number, 11, 12, 13, 14]
        for index in range(4):
            answer = turn(served, prompt, session["session_id"], header)
            assert answer.headers["x-sglang-replica"] == session["replica"]
            assert answer.headers["x-session-reopened"] == "false"
            cached = answer.json()["meta_info"]["cached_tokens"]
            # All but the last token of the turn before: its key and value are computed when it is fed back.
            assert index == 0 or cached >= len(prompt) - 3
            prompt = [*prompt, *new_tokens(answer), 15, 16]


def test_sessions_spread_over_the_replicas(served: ServedApp) -> None:
    replicas = {opened(served)["replica"] for _ in range(24)}
    assert replicas == {replica["replica"] for replica in served.replicas()}


def test_a_streamed_chat_is_a_turn_too(served: ServedApp) -> None:
    session = opened(served)
    client = served.openai(default_headers={"x-session-id": session["session_id"]})
    messages = [{"role": "user", "content": "bada gepi"}]
    for _ in range(3):
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, max_tokens=4, stream=True
        )
        assert raw.headers["x-sglang-replica"] == session["replica"]
        text = "".join(p.choices[0].delta.content or "" for p in raw.parse() if p.choices)
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "gepi"},
        ]
    assert served.get(f"/sessions/{session['session_id']}").json()["turns"] == 3


def test_a_closed_session_answers_410_and_an_unknown_one_404(served: ServedApp) -> None:
    session = opened(served)["session_id"]
    assert served.delete(f"/sessions/{session}").json()["closed"]
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    answer = served.post("/generate", body, headers={"x-session-id": session})
    assert answer.status_code == requests.codes.gone
    assert "it was closed" in answer.json()["error"]["message"]
    assert served.delete(f"/sessions/{session}").status_code == requests.codes.gone
    answer = served.post("/generate", body, headers={"x-session-id": "mine"})
    assert answer.status_code == requests.codes.not_found


def test_a_session_of_another_replica_answers_409_or_begins_again_with_its_history(
    served: ServedApp,
) -> None:
    """As after a change of the ring: the same key, opened elsewhere."""
    session = opened(served)
    (other,) = {r["replica"] for r in served.replicas()} - {session["replica"]}
    moved = session["session_id"].replace(session["replica"], other)
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
    answer = served.post("/generate", body, headers={"x-session-id": moved})
    assert answer.status_code == requests.codes.conflict
    assert "x-session-history: full" in answer.json()["error"]["message"]
    headers = {"x-session-id": moved, "x-session-history": "full"}
    answer = served.post("/generate", body, headers=headers)
    assert answer.status_code == requests.codes.ok
    assert answer.headers["x-session-reopened"] == "true"
    assert answer.headers["x-sglang-replica"] == session["replica"]


def test_an_idle_session_expires(served: ServedApp) -> None:
    session = opened(served, idle_s=0.3)["session_id"]
    time.sleep(0.6)
    answer = served.get(f"/sessions/{session}")
    assert answer.status_code == requests.codes.gone
    assert "no turn came for 0.3 s" in answer.text


def test_a_sync_under_an_open_session_gives_the_next_turn_new_weights_and_no_old_cache(
    served: ServedApp, trainer, versions
) -> None:
    session = opened(served)
    prompt = [21, 22, 23, 24, 25]
    for _ in range(2):
        number = versions.next()
        ray.get(trainer.sync.remote(number, str(number)), timeout=120)
        answer = turn(served, prompt, session["session_id"])
        meta = answer.json()["meta_info"]
        assert answer.headers["x-sglang-replica"] == session["replica"]
        assert meta["weight_version"] == str(number)
        assert meta["cached_tokens"] == 0
        tokens = new_tokens(answer)
        logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
        assert_serves(new_model(number), prompt, Generation(tokens=tokens, logprobs=logprobs))
        prompt = [*prompt, *tokens]
