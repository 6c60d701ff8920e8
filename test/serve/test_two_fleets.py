"""Two models in one application, as prefill and decode deployments would be: each has a fleet of its own.

What is said to one never reaches the other. Both are whole engines here: handing a cache over needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import requests
from support.local_ray import local_ray
from support.models import new_model
from support.oracle import assert_serves
from support.serve_app import ServedApp, llm_config, running_app
from support.trainer import start_serve_trainer

pytestmark = pytest.mark.slow

FLEETS = ("prefill", "decode")
PROMPT = [5, 6, 7, 8, 9, 10]
WAIT_S = 120.0


@pytest.fixture(scope="module")
def app(tiny_model: Path) -> Iterator[ServedApp]:
    configs = [llm_config(tiny_model, replicas=1, model_id=name) for name in FLEETS]
    with local_ray(num_cpus=4), running_app(configs) as running:
        yield running


def replica_of(app: ServedApp, model: str) -> str:
    (replica,) = app.get(f"/replicas?model={model}").json()["replicas"]
    return str(replica["replica"])


def test_a_request_reaches_the_model_it_names(app: ServedApp) -> None:
    replicas = {name: replica_of(app, name) for name in FLEETS}
    assert len(set(replicas.values())) == 2
    for name in FLEETS:
        assert app.generate(PROMPT, 4, model=name).replica == replicas[name]
    unnamed = app.post("/generate", {"input_ids": PROMPT})
    assert unnamed.status_code == requests.codes.not_found
    assert all(name in unnamed.text for name in FLEETS)


def test_a_pause_of_one_fleet_holds_back_only_its_requests(app: ServedApp) -> None:
    assert app.post("/pause", {"model": "prefill", "mode": "retract"}).status_code == requests.codes.ok
    assert app.generate(PROMPT, 4, model="decode").finish == "length"
    with pytest.raises(requests.exceptions.Timeout):
        app.post(
            "/generate",
            {"input_ids": PROMPT, "model": "prefill", "rid": "held"},
            timeout=2,
        )
    for name in FLEETS:
        (answer,) = app.get(f"/is_paused?model={name}").json()["replicas"]
        assert answer["state"]["paused"] is (name == "prefill")
    assert app.post("/resume", {"model": "prefill"}).status_code == requests.codes.ok
    assert app.generate(PROMPT, 4, model="prefill").finish == "length"


def test_a_session_belongs_to_the_fleet_that_it_was_opened_in(app: ServedApp) -> None:
    opened = app.post("/sessions", {"model": "prefill"}).json()
    assert opened["replica"] == replica_of(app, "prefill")
    headers = {"x-session-id": opened["session_id"]}
    first = app.generate(PROMPT, 8, model="prefill", headers=headers)
    again = app.generate([*PROMPT, *first.tokens], 8, model="prefill", headers=headers)
    assert (first.replica, again.replica) == (opened["replica"], opened["replica"])
    assert again.cached >= len(PROMPT)
    elsewhere = app.post("/generate", {"input_ids": PROMPT, "model": "decode"}, headers=headers)
    assert elsewhere.status_code in (requests.codes.conflict, requests.codes.gone)


def test_one_publisher_moves_both_fleets_together(app: ServedApp) -> None:
    trainer: Any = start_serve_trainer()
    ray.get(trainer.connect_fleets.remote(app.name, FLEETS), timeout=WAIT_S)
    report = ray.get(trainer.sync.remote(3, "3"), timeout=WAIT_S)
    assert len(report.ranks) == 2
    for name in FLEETS:
        answer = app.generate(PROMPT, 6, model=name)
        assert answer.version == "3"
        assert_serves(new_model(3), PROMPT, answer)
    ray.kill(trainer)
