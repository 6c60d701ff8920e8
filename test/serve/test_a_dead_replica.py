"""One of two replicas loses its scheduler to SIGKILL: who notices, and what is said of it meanwhile.

The tests of this file share one application and run in their order. The file's name makes it the first of its folder:
it takes its application down, and with it everything that Serve runs.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import requests
from support.serve_app import (
    MODEL,
    ServedApp,
    llm_config,
    rank_pids,
    replica_ids,
    running_app,
    wait_until,
)
from support.trainer import start_serve_trainer

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 8]
SEEN_WITHIN_S = 5.0


class Fleet:
    """The application, its trainer, and what the tests know of it."""

    def __init__(self, app: ServedApp) -> None:
        self.app = app
        self.sessions: dict[str, list[str]] = {}
        self.victim = ""
        self.trainer: Any = start_serve_trainer()

    def sync(self, number: int) -> Any:
        return ray.get(self.trainer.sync.remote(number, str(number)), timeout=120)

    def connect(self) -> None:
        ray.get(self.trainer.connect_serve.remote(self.app.name, MODEL), timeout=120)

    def turn(self, session: str, **headers: str) -> requests.Response:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        return self.app.post("/generate", body, headers={"x-session-id": session, **headers})


@pytest.fixture(scope="module")
def fleet(serve_ray: str, tiny_model: Path) -> Iterator[Fleet]:
    with running_app(llm_config(tiny_model), name="mortal") as app:
        app.wait_for_replicas(2)
        fleet = Fleet(app)
        yield fleet
        ray.kill(fleet.trainer)


def outcomes(answer: requests.Response) -> dict[str, str]:
    return {each["replica"]: each["outcome"] for each in answer.json()["replicas"]}


def test_a_dead_scheduler_is_seen_within_five_seconds_and_no_control_call_hides_it(
    fleet: Fleet,
) -> None:
    app = fleet.app
    fleet.connect()
    fleet.sync(1)
    for _ in range(8):
        opened = app.post("/sessions").json()
        fleet.sessions.setdefault(opened["replica"], []).append(opened["session_id"])
    fleet.victim, survivor = replica_ids(app)
    assert len(fleet.sessions) == 2
    os.kill(rank_pids(app, fleet.victim)[0], signal.SIGKILL)
    died_at = time.monotonic()
    for path in ("/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/weight_sync"):
        answer = app.get(path) if path in ("/is_paused", "/weight_sync") else app.post(path)
        told = outcomes(answer)
        assert told[survivor] == "ok"
        if path != "/weight_sync" or time.monotonic() - died_at > SEEN_WITHIN_S:
            assert told[fleet.victim] != "ok", (path, answer.text)
            assert answer.status_code == requests.codes.multi_status

    def is_counted_as_dead() -> bool:
        return any(r["replica"] == fleet.victim and r["dead"] for r in app.replicas())

    wait_until(is_counted_as_dead, SEEN_WITHIN_S - (time.monotonic() - died_at), app.replicas)
    answer = app.post("/pause", {"mode": "retract"})
    assert (answer.status_code, outcomes(answer)) == (207, {fleet.victim: "dead", survivor: "ok"})
    assert "died" in answer.text
    assert app.post("/resume").status_code == requests.codes.multi_status


def test_its_sessions_are_gone_and_the_others_go_on(fleet: Fleet) -> None:
    for session in fleet.sessions[fleet.victim]:
        answer = fleet.turn(session)
        assert answer.status_code in (requests.codes.conflict, requests.codes.gone), answer.text
        assert "x-session-history: full" in answer.json()["error"]["message"]
    (survivor,) = set(fleet.sessions) - {fleet.victim}
    for session in fleet.sessions[survivor]:
        assert fleet.turn(session).status_code == requests.codes.ok


def test_a_sync_that_knew_it_fails_by_name_and_one_that_connects_again_goes_on(
    fleet: Fleet,
) -> None:
    with pytest.raises(Exception, match=fleet.victim):
        fleet.sync(2)
    status = fleet.app.get("/weight_sync").json()["replicas"]
    states = {r["replica"]: r["state"] for r in status}
    (survivor,) = set(fleet.sessions) - {fleet.victim}
    assert (states[survivor]["state"], states[survivor]["version"]) == ("SERVING", "1")
    fleet.connect()
    assert fleet.sync(3).verified
