"""One of two replicas loses its scheduler to SIGKILL: who notices, what control calls say meanwhile, and what is left.

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

import psutil
import pytest
import ray
import requests
from support.models import new_model
from support.oracle import assert_serves
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
REPLACED_WITHIN_S = 150.0


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


def test_serve_replaces_it_and_the_new_one_serves_what_was_published(fleet: Fleet) -> None:
    app = fleet.app
    wait_until(
        lambda: (
            fleet.victim not in replica_ids(app)
            and sum(each["serving"] for each in app.replicas()) == 2
        ),
        REPLACED_WITHIN_S,
        app.replicas,
    )
    newcomer = next(iter(set(replica_ids(app)) - set(fleet.sessions)))
    assert app.post("/resume").status_code == requests.codes.ok
    model, seen = new_model(3), set()
    for _ in range(40):
        answer = app.generate(PROMPT, 4)
        assert answer.version == "3"
        assert_serves(model, PROMPT, answer)
        seen.add(answer.replica)
    assert newcomer in seen
    for session in fleet.sessions[fleet.victim]:
        assert fleet.turn(session).status_code in (409, 410)
        again = fleet.turn(session, **{"x-session-history": "full"})
        assert (again.status_code, again.headers["x-session-reopened"]) == (200, "true")


def test_shutdown_leaves_no_process(fleet: Fleet) -> None:
    from ray import serve

    engine_pids = [pid for each in replica_ids(fleet.app) for pid in rank_pids(fleet.app, each)]
    replica_pids = [each["pid"] for each in fleet.app.replicas()]
    helpers = [
        child.pid
        for pid in [*engine_pids, *replica_pids]
        for child in psutil.Process(pid).children(recursive=True)
    ]
    watched = [psutil.Process(pid) for pid in {*engine_pids, *replica_pids, *helpers}]
    serve.shutdown()
    _, left = psutil.wait_procs(watched, timeout=30)
    assert not left, [process.cmdline() for process in left]
    wait_until(lambda: set(group_states()) == {"REMOVED"}, 30, group_states)


def group_states() -> list[str]:
    from ray.util import placement_group_table

    return [group["state"] for group in placement_group_table().values()]
