"""A replica that starts or restarts later takes no request before it holds the published version (F20)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from support.models import new_model
from support.oracle import assert_serves
from support.serve_app import MODEL, ServedApp, llm_config, running_app
from support.trainer import start_serve_trainer

pytestmark = pytest.mark.slow
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def own_app(serve_ray, tiny_model) -> Iterator[ServedApp]:
    with running_app(llm_config(tiny_model)) as app:
        app.wait_for_replicas(2)
        yield app


@pytest.fixture(scope="module")
def trainer(own_app: ServedApp) -> Iterator[Any]:
    actor = start_serve_trainer()
    ray.get(actor.connect_serve.remote(own_app.name, MODEL), timeout=120)
    yield actor
    ray.kill(actor)


class Load:
    """Requests without a break; notes which replica answered with which version."""

    def __init__(self, app: ServedApp) -> None:
        self._app = app
        self._stop = threading.Event()
        self.seen: list[tuple[str, str]] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]

    def _run(self) -> None:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        while not self._stop.is_set():
            answer = self._app.post("/generate", body)
            if answer.ok:
                version = answer.json()["meta_info"]["weight_version"]
                self.seen.append((answer.headers["x-sglang-replica"], version))
            time.sleep(0.02)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_a_restarted_replica_serves_the_published_version_from_its_first_answer_on(
    own_app: ServedApp, trainer: Any
) -> None:
    ray.get(trainer.sync.remote(201, "1"), timeout=120)
    victim = own_app.replicas()[0]
    before = {replica["replica"] for replica in own_app.replicas()}
    with Load(own_app) as load:
        os.kill(victim["pid"], signal.SIGKILL)
        own_app.get("/is_paused")  # whoever asks first notices the death
        own_app.wait_for_replicas(2)
        (newcomer,) = {replica["replica"] for replica in own_app.replicas()} - before
        deadline = time.monotonic() + 60
        while newcomer not in {replica for replica, _ in load.seen}:
            assert time.monotonic() < deadline, "the newcomer got no request"
            time.sleep(0.1)
    assert {version for _, version in load.seen} == {"1"}
    for _ in range(6):
        assert_serves(new_model(201), PROMPT, own_app.generate(PROMPT, 4))


def test_a_publisher_that_does_not_know_a_newcomer_leaves_it_behind_nowhere(
    own_app: ServedApp, trainer: Any
) -> None:
    """The publisher connected before the restart, so its next sync reaches the old replica only."""
    ray.get(trainer.connect_serve.remote(own_app.name, MODEL), timeout=120)
    ray.get(trainer.sync.remote(202, "2"), timeout=120)
    known = own_app.replicas()
    os.kill(known[0]["pid"], signal.SIGKILL)
    own_app.get("/is_paused")
    own_app.wait_for_replicas(2)
    survivor = start_serve_trainer()
    try:
        ray.get(survivor.connect_one.remote(own_app.name, MODEL, known[1]["replica"]), timeout=120)
        ray.get(survivor.sync.remote(203, "3"), timeout=120)
        with Load(own_app) as load:
            own_app.wait_for_replicas(2, timeout_s=60)
            time.sleep(1)
        assert {version for _, version in load.seen} == {"3"}
        assert len({replica for replica, _ in load.seen}) == 2
        for _ in range(6):
            assert_serves(new_model(203), PROMPT, own_app.generate(PROMPT, 4))
    finally:
        ray.kill(survivor)


def test_scaling_up_during_syncs_admits_no_old_version(own_app: ServedApp, tiny_model: Any) -> None:
    from ray import serve

    from sglang.srt.ray.serve import build_app

    own_app.wait_for_replicas(2)
    trainer = start_serve_trainer()
    ray.get(trainer.connect_serve.remote(own_app.name, MODEL), timeout=120)
    known = {replica["replica"] for replica in own_app.replicas()}
    with Load(own_app) as load:
        scaled = build_app(llm_config(tiny_model, replicas=3))
        serve.run(scaled, name=own_app.name, route_prefix="/", blocking=False, _blocking=False)
        deadline = time.monotonic() + 240
        version = 10
        while sum(replica["serving"] for replica in own_app.replicas()) < 3:
            assert time.monotonic() < deadline
            ray.get(trainer.sync.remote(300 + version, str(version)), timeout=120)
            version += 1
        ray.get(trainer.sync.remote(300 + version, str(version)), timeout=120)
        own_app.wait_for_replicas(3)
        mark = len(load.seen)
        time.sleep(3)
    ray.kill(trainer)
    assert known < {replica["replica"] for replica in own_app.replicas()}
    assert {seen for _, seen in load.seen[mark:]} == {str(version)}
    assert len({replica for replica, _ in load.seen[mark:]}) == 3
