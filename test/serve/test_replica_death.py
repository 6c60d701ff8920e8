"""A replica dies: its fate is in the next result, its sessions are not moved in silence, and Serve replaces it."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import requests
from support.serve_app import ServedApp, llm_config, running_app

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def own_app(serve_ray, tiny_model):
    with running_app(llm_config(tiny_model)) as app:
        app.wait_for_replicas(2)
        yield app


def scheduler_pid(app: ServedApp, replica: str) -> int:
    import ray

    (actor,) = app.fleet().ranks.remote(replica).result(timeout_s=30)
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30))


def test_a_killed_replica_makes_the_result_partial_and_is_replaced(own_app: ServedApp) -> None:
    victim, survivor = own_app.replicas()
    os.kill(victim["pid"], signal.SIGKILL)
    answer = own_app.post("/pause", {"mode": "retract"})
    assert answer.status_code == requests.codes.multi_status, answer.text
    results = {each["replica"]: each["outcome"] for each in answer.json()["replicas"]}
    assert results == {victim["replica"]: "dead", survivor["replica"]: "ok"}

    own_app.wait_for_replicas(2)
    ids = {replica["replica"] for replica in own_app.replicas()}
    assert victim["replica"] not in ids
    assert survivor["replica"] in ids
    asked = own_app.get("/is_paused")
    assert asked.status_code == requests.codes.ok
    states = [result["state"]["paused"] for result in asked.json()["replicas"]]
    assert states == [True, True], "a replica that starts in a paused fleet must be paused"
    assert own_app.post("/resume").status_code == requests.codes.ok


def test_a_dead_scheduler_is_seen_within_five_seconds(own_app: ServedApp) -> None:
    own_app.wait_for_replicas(2)
    victim = own_app.replicas()[0]
    os.kill(scheduler_pid(own_app, victim["replica"]), signal.SIGKILL)
    started = time.monotonic()
    while psutil.pid_exists(victim["pid"]):
        assert time.monotonic() - started < 30, "the replica was not replaced"
        time.sleep(0.1)
    assert time.monotonic() - started < 10  # 5 s to see it, then Serve ends the replica
    own_app.wait_for_replicas(2)


def test_a_frozen_replica_is_late_and_the_other_obeys(own_app: ServedApp) -> None:
    own_app.wait_for_replicas(2)
    frozen, other = own_app.replicas()
    os.kill(frozen["pid"], signal.SIGSTOP)
    try:
        answer = own_app.post("/pause", {"mode": "retract", "deadline_s": 2})
    finally:
        os.kill(frozen["pid"], signal.SIGCONT)
    assert answer.status_code == requests.codes.multi_status
    results = {each["replica"]: each["outcome"] for each in answer.json()["replicas"]}
    assert results == {frozen["replica"]: "late", other["replica"]: "ok"}
    own_app.post("/resume")


def test_shutdown_leaves_no_process(own_app: ServedApp) -> None:
    from ray import serve

    own_app.wait_for_replicas(2)
    processes = [psutil.Process(replica["pid"]) for replica in own_app.replicas()]
    processes += [
        psutil.Process(scheduler_pid(own_app, each["replica"])) for each in own_app.replicas()
    ]
    processes += [child for each in list(processes) for child in each.children(recursive=True)]
    serve.shutdown()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert [each.cmdline() for each in alive] == []
