"""Control calls over HTTP reach every replica, and the answer has a result for each (F18)."""

from __future__ import annotations

import threading
import time

import pytest
import requests
from support.serve_app import ServedApp


def outcomes(answer: requests.Response) -> list[str]:
    return [result["outcome"] for result in answer.json()["replicas"]]


def states(answer: requests.Response) -> list[dict]:
    return [result["state"] for result in answer.json()["replicas"]]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_holds_every_replica_until_resume(served: ServedApp, mode: str) -> None:
    answer = served.post("/pause", {"mode": mode})
    assert answer.status_code == requests.codes.ok, answer.text
    assert outcomes(answer) == ["ok", "ok"]
    assert {result["replica"] for result in answer.json()["replicas"]} == {
        replica["replica"] for replica in served.replicas()
    }
    asked = served.get("/is_paused")
    assert all(state["paused"] for state in states(asked))
    assert all(rank["paused"] for state in states(asked) for rank in state["ranks"])

    done = threading.Event()
    waiting = threading.Thread(target=lambda: (served.generate([5, 6, 7], 2), done.set()))
    waiting.start()
    assert not done.wait(1.0), "a paused fleet answered"
    assert outcomes(served.post("/resume")) == ["ok", "ok"]
    waiting.join(30)
    assert done.is_set()
    assert not any(state["paused"] for state in states(served.get("/is_paused")))


def test_a_flush_that_the_engines_refuse_is_a_failure(served: ServedApp) -> None:
    assert outcomes(served.post("/reset_prefix_cache")) == ["ok", "ok"]
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True},
        "stream": True,
    }
    with requests.post(f"{served.url}/generate", json=body, stream=True, timeout=60) as running:
        lines = running.iter_lines()  # held: the connection ends with it
        next(lines)
        assert outcomes(served.post("/pause", {"mode": "in_place"})) == ["ok", "ok"]
        answer = served.post("/reset_prefix_cache", {"deadline_s": 1})
        served.post("/resume")
    assert answer.status_code == requests.codes.multi_status
    assert sorted(outcomes(answer)) == ["ok", "refused"]
    assert "not flushed" in answer.text


def test_collective_rpc_calls_allowed_methods_on_every_rank(served: ServedApp) -> None:
    answer = served.post("/collective_rpc", {"method": "engine_state"})
    assert answer.status_code == requests.codes.ok
    for state in states(answer):
        assert [rank["rank"] for rank in state["ranks"]] == [0]
        assert state["ranks"][0]["result"]["paused"] is False
    layout = states(served.post("/collective_rpc", {"method": "weight_layout"}))
    assert layout[0]["ranks"][0]["result"]["fingerprint"] == layout[1]["ranks"][0]["result"]["fingerprint"]  # fmt: skip


@pytest.mark.parametrize("method", ["pull_weights", "__init__", "run_event_loop", "exec"])
def test_collective_rpc_refuses_everything_else(served: ServedApp, method: str) -> None:
    answer = served.post("/collective_rpc", {"method": method})
    assert answer.status_code == requests.codes.forbidden
    assert outcomes(answer) == ["refused", "refused"]


def test_weight_status_and_replicas_name_everybody(served: ServedApp) -> None:
    assert [state["state"] for state in states(served.get("/weight_sync"))] == ["SERVING"] * 2
    assert all(replica["serving"] for replica in served.replicas())
    assert served.get("/health").json() == {"serving_replicas": {"tiny": 2}}


def test_profiling_starts_and_stops_on_every_replica(served: ServedApp, tmp_path) -> None:
    answer = served.post("/start_profile", {"output_dir": str(tmp_path), "activities": ["CPU"]})
    assert outcomes(answer) == ["ok", "ok"], answer.text
    served.generate([5, 6], 2)
    assert outcomes(served.post("/stop_profile")) == ["ok", "ok"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause", {"mode": "later"}),
        ("/pause", {"mode": "abort", "typo": 1}),
        ("/sleep", {"tags": "weights"}),
        ("/collective_rpc", {}),
        ("/resume", {"deadline_s": 0}),
    ],
)
def test_a_wrong_body_is_refused_before_any_replica_is_asked(
    served: ServedApp, path: str, body: dict
) -> None:
    assert served.post(path, body).status_code == requests.codes.unprocessable_entity
    assert not any(state["paused"] for state in states(served.get("/is_paused")))


def test_a_deadline_that_passes_is_late_and_not_ok(served: ServedApp) -> None:
    started = time.monotonic()
    answer = served.post("/collective_rpc", {"method": "weight_layout", "deadline_s": 1e-6})
    assert time.monotonic() - started < 10
    assert answer.status_code == requests.codes.gateway_timeout
    assert outcomes(answer) == ["late", "late"]
