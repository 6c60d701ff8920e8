"""Every order of sleep and wake (F12), over HTTP and against the server class: the state is the ranks', and none dies.

The expected state is a set of tags, moved by the rule of the contract: None and [] mean everything, and what is already
so stays so.
"""

from __future__ import annotations

from typing import Any

import pytest
import requests
from support.serve_app import MODEL, ServedApp

ALL = frozenset({"kv_cache", "weights", "cuda_graph"})
KV, WEIGHTS = ["kv_cache"], ["weights"]

ORDERS: list[list[tuple[str, Any]]] = [
    [("sleep", None), ("wakeup", None)],
    [("sleep", []), ("wakeup", [])],
    [("sleep", None), ("wakeup", [])],
    [("sleep", []), ("wakeup", None)],
    [("wakeup", None)],
    [("wakeup", [])],
    [("wakeup", KV)],
    [("wakeup", WEIGHTS), ("wakeup", WEIGHTS)],
    [("sleep", KV), ("wakeup", KV)],
    [("sleep", WEIGHTS), ("wakeup", WEIGHTS)],
    [("sleep", KV), ("wakeup", WEIGHTS), ("wakeup", KV)],
    [("sleep", KV), ("wakeup", None)],
    [("sleep", WEIGHTS), ("wakeup", [])],
    [("sleep", KV + WEIGHTS), ("wakeup", KV), ("wakeup", WEIGHTS)],
    [("sleep", KV + WEIGHTS), ("wakeup", WEIGHTS), ("wakeup", KV)],
    [("sleep", KV + KV), ("wakeup", KV + KV)],
    [("sleep", KV), ("sleep", KV), ("wakeup", KV), ("wakeup", KV)],
    [("sleep", None), ("sleep", None), ("wakeup", None), ("wakeup", None)],
    [("sleep", KV), ("sleep", WEIGHTS), ("wakeup", None)],
    [("sleep", KV), ("sleep", None), ("wakeup", KV), ("wakeup", None)],
    [("sleep", None), ("wakeup", KV), ("sleep", KV), ("wakeup", None)],
    [("sleep", None), ("wakeup", WEIGHTS), ("sleep", []), ("wakeup", [])],
    [("sleep", ["cuda_graph"]), ("wakeup", ["cuda_graph"])],
    [("sleep", ["attic"]), ("wakeup", None)],
    [("sleep", None), ("wakeup", ["attic"]), ("wakeup", None)],
    [("sleep", ["kv_cache", "attic"]), ("wakeup", KV)],
]


def after(asleep: frozenset[str], verb: str, tags: Any) -> frozenset[str] | None:
    """The rule; None when the call has to be refused."""
    meant = frozenset(tags or ALL)
    if meant - ALL:
        return None
    return asleep | meant if verb == "sleep" else asleep - meant


def told(results: list[Any]) -> list[set[str]]:
    return [set(result["state"]["asleep"]) for result in results]


def ids(order: list[tuple[str, Any]]) -> str:
    return " ".join(f"{verb}:{'-' if tags is None else ','.join(tags)}" for verb, tags in order)


@pytest.mark.parametrize("order", ORDERS, ids=ids)
def test_over_http(served: ServedApp, order: list[tuple[str, Any]]) -> None:
    asleep: frozenset[str] = frozenset()
    for verb, tags in order:
        answer = served.post(f"/{verb}", {"tags": tags})
        expected = after(asleep, verb, tags)
        if expected is None:
            assert answer.status_code == requests.codes.bad_request, answer.text
            assert "attic" in answer.text
        else:
            asleep = expected
            assert answer.status_code == requests.codes.ok, answer.text
        asked = served.get("/is_sleeping").json()["replicas"]
        assert told(asked) == [asleep, asleep]
        assert [each["state"]["sleeping"] for each in asked] == [bool(asleep)] * 2
    assert not asleep
    served.generate([5, 6, 7], 2)


@pytest.mark.parametrize("order", ORDERS, ids=ids)
def test_against_the_server_class(served: ServedApp, order: list[tuple[str, Any]]) -> None:
    """As Ray's own protocol calls it: by the handle of the deployment, to every replica."""
    from ray import serve

    handle = serve.get_deployment_handle(f"SGLangServer:{MODEL}", served.name)
    asleep: frozenset[str] = frozenset()
    for verb, tags in order:
        expected = after(asleep, verb, tags)
        answers = handle.broadcast(verb, tags=tags).results(timeout_s=60, return_exceptions=True)
        if expected is None:
            assert all("attic" in str(answer) for answer in answers)
        else:
            asleep = expected
            assert [set(answer["asleep"]) for answer in answers] == [asleep, asleep]
        sleeping = handle.broadcast("is_sleeping").results(timeout_s=60)
        assert sleeping == [bool(asleep)] * 2
    served.generate([5, 6, 7], 2)


def test_a_busy_engine_refuses_and_goes_on(served: ServedApp) -> None:
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 800, "ignore_eos": True},
        "stream": True,
    }
    with requests.post(f"{served.url}/generate", json=body, stream=True, timeout=120) as running:
        lines = running.iter_lines()
        next(lines)
        served.post("/pause", {"mode": "in_place"})
        answer = served.post("/sleep")
        assert answer.status_code == requests.codes.multi_status, answer.text
        refused = [each for each in answer.json()["replicas"] if each["outcome"] == "refused"]
        assert [each["error"]["status"] for each in refused] == [requests.codes.conflict]
        assert "requests are running" in refused[0]["error"]["message"]
        served.post("/wakeup")
        served.post("/resume")
        assert sum(1 for _ in lines) > 10, "the request that was running has ended"


def test_requests_to_a_sleeping_engine_are_told_so(served: ServedApp) -> None:
    served.post("/sleep", {"tags": KV})
    answer = served.post("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}})
    assert answer.status_code == requests.codes.service_unavailable
    assert "POST /wakeup" in answer.text
    served.post("/wakeup")
    served.generate([5, 6], 1)


def test_without_a_memory_saver_the_answer_says_that_nothing_is_freed(served: ServedApp) -> None:
    state = served.post("/sleep", {"tags": KV}).json()["replicas"][0]["state"]
    assert state["memory_saver"] is False
    assert "no memory is given back" in state["note"]
    served.post("/wakeup")
