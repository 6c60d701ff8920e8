"""Aborts that are acknowledged: exact ids, the stage each was in, and an answer only once it has ended."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import requests
from support.serve_app import ServedApp


class Running:
    """A long generation on a thread; `meta` is its last `meta_info`."""

    def __init__(self, served: ServedApp, rid: str, tokens: int = 3000, **body: Any) -> None:
        self._body: dict[str, Any] = {
            "input_ids": [5, 6, 7],
            "rid": rid,
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
            "stream": True,
        } | body
        self._url = served.url
        self.started = threading.Event()
        self.meta: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        answer = requests.post(f"{self._url}/generate", json=self._body, stream=True, timeout=120)
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                self.meta = json.loads(line.removeprefix(b"data: "))["meta_info"]
                self.started.set()

    def wait(self) -> str:
        """How it ended."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return str(self.meta["finish_reason"]["type"])


def abort(served: ServedApp, **body: Any) -> dict[str, Any]:
    answer = served.post("/abort_request", body)
    assert answer.status_code == requests.codes.ok, answer.text
    requests_of: dict[str, Any] = answer.json()["requests"]
    return requests_of


def test_a_running_request_is_found_wherever_it_is_and_has_ended_when_the_answer_comes(
    served: ServedApp,
) -> None:
    running = Running(served, "run-1")
    assert running.started.wait(30)
    told = abort(served, rid="run-1")["run-1"]
    assert (told["found"], told["stage"], told["ended"]) == (True, "running", True)
    assert told["replica"] in {replica["replica"] for replica in served.replicas()}
    assert running.wait() == "abort"
    assert running.meta["completion_tokens"] < 3000


def test_an_id_is_exact(served: ServedApp) -> None:
    # Enough of them that both replicas hold one of the longer ids.
    longer = [Running(served, f"r-1{number}", tokens=700) for number in range(6)]
    meant = Running(served, "r-1")
    assert all(each.started.wait(30) for each in [*longer, meant])
    assert set(abort(served, rid="r-1")) == {"r-1"}
    assert meant.wait() == "abort"
    assert [each.wait() for each in longer] == ["length"] * 6


def test_a_request_that_a_pause_holds_back_ends_at_once(served: ServedApp) -> None:
    served.post("/pause", {"mode": "retract"})
    held = Running(served, "held-1", tokens=5)
    time.sleep(0.5)
    started = time.monotonic()
    told = abort(served, rid="held-1")["held-1"]
    assert (told["found"], told["stage"]) == (True, "tokenizing")
    assert held.wait() == "abort"
    assert time.monotonic() - started < 5
    served.post("/resume")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_of_a_paused_fleet_end_too(served: ServedApp, mode: str) -> None:
    running = [Running(served, f"p-{mode}-{number}") for number in range(4)]
    assert all(each.started.wait(30) for each in running)
    served.post("/pause", {"mode": mode})
    told = abort(served, abort_all=True)
    assert {each["stage"] for each in told.values()} == {
        "queued" if mode == "retract" else "running"
    }
    assert [each.wait() for each in running] == ["abort"] * 4
    served.post("/resume")
    served.generate([5, 6, 7], 3)


def test_unknown_ids_and_repeats_are_no_errors(served: ServedApp) -> None:
    told = abort(served, rid=["nobody", "nothing"])
    assert [each["found"] for each in told.values()] == [False, False]
    assert abort(served, abort_all=True) == {}
    assert abort(served, abort_all=True) == {}
    assert served.post("/abort_request", {}).status_code == requests.codes.bad_request
