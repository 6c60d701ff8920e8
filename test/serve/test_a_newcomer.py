"""Autoscaling from one replica to two and a killed one, all under load and syncs: no request before the version (F20).

The tests of this file share one application and run in their order. Each newcomer's first transfer from its peer fails
when its bytes have landed (`support.flaky_server`), so every one of them is also a retry at the same sequence.
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
from support.serve_app import MODEL, ServedApp, llm_config, replica_ids, running_app, wait_until
from support.serve_load import Answered, Load, judge
from support.trainer import start_serve_trainer

pytestmark = pytest.mark.slow

STARTED_WITHIN_S = 240.0
AUTOSCALING = {
    "min_replicas": 1,
    "initial_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 0.2,
    "upscale_delay_s": 0.2,
    "downscale_delay_s": 3600,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 1.0,
}


class Growing:
    """The application, a trainer that connects when told, and the load."""

    def __init__(self, app: ServedApp, log: Path) -> None:
        self.app = app
        self.log = log
        self.published = 0
        self.trainer: Any = start_serve_trainer()
        self.first = ""
        self.load: Load | None = None

    def connect(self) -> None:
        ray.get(self.trainer.connect_serve.remote(self.app.name, MODEL), timeout=120)

    def sync(self) -> Any:
        number = self.published + 1
        report = ray.get(self.trainer.sync.remote(number, str(number)), timeout=120)
        self.published = number
        return report

    def sync_until(self, reached: Any, pause_s: float = 3.0) -> None:
        deadline = time.monotonic() + STARTED_WITHIN_S
        while not reached():
            assert time.monotonic() < deadline, self.app.replicas()
            self.sync()
            time.sleep(pause_s)

    def answers(self, replica: str) -> list[Answered]:
        """Of the load, by that replica."""
        assert self.load is not None
        return self.load.by(replica)

    def refused(self) -> list[str]:
        assert self.load is not None
        return self.load.refused

    def newcomer(self) -> str:
        return next((name for name in replica_ids(self.app) if name != self.first), "")

    def failed_transfers(self) -> list[str]:
        """Which replicas had one."""
        return [line.split()[0] for line in self.log.read_text().splitlines()]


@pytest.fixture(scope="module")
def growing(serve_ray: str, tiny_model: Path, tmp_path_factory: Any) -> Iterator[Growing]:
    log = tmp_path_factory.mktemp("flaky") / "log"
    log.touch()
    config = llm_config(
        tiny_model,
        deployment={"autoscaling_config": AUTOSCALING},
        server_cls="support.flaky_server:FlakyServer",
        runtime_env={"env_vars": {"FLAKY_LOG": str(log)}},
    )
    with running_app(config, name="growing") as app:
        app.wait_for_replicas(1)
        growing = Growing(app, log)
        yield growing
        if growing.load is not None:
            growing.load.stop()


def test_a_replica_that_autoscaling_adds_under_load_and_syncs_serves_published_weights_only(
    growing: Growing,
) -> None:
    (growing.first,) = replica_ids(growing.app)
    growing.connect()
    growing.sync()
    growing.load = Load(growing.app, lambda: growing.published, threads=2)
    growing.sync_until(lambda: growing.newcomer() and len(growing.answers(growing.newcomer())) > 10)
    newcomer = growing.newcomer()
    assert growing.failed_transfers()[0] == newcomer
    assert not growing.refused()
    assert judge(growing.answers(newcomer)) > 5
    assert judge(growing.answers(growing.first)[-40:]) > 5


def test_a_publisher_that_does_not_know_it_leaves_it_behind_nowhere(growing: Growing) -> None:
    newcomer = growing.newcomer()
    before = len(growing.answers(newcomer))
    for _ in range(3):
        report = growing.sync()
        assert len(report.ranks) == 1
    wait_until(
        lambda: any(a.floor == growing.published for a in growing.answers(newcomer)),
        60,
        growing.app.replicas,
    )
    assert judge(growing.answers(newcomer)[before:]) > 0
    assert not growing.refused()
    growing.connect()
    assert len(growing.sync().ranks) == 2


def test_one_that_is_killed_and_restarts_between_syncs_serves_published_weights_only(
    growing: Growing,
) -> None:
    app, survivor = growing.app, growing.newcomer()
    pid = next(each["pid"] for each in app.replicas() if each["replica"] == growing.first)
    os.kill(pid, signal.SIGKILL)
    before, growing.first = growing.first, survivor
    # By itself: nothing is published until the new one is there.
    wait_until(
        lambda: (
            growing.newcomer() not in ("", before) and len(growing.answers(growing.newcomer())) > 10
        ),
        STARTED_WITHIN_S,
        app.replicas,
    )
    growing.connect()
    assert len(growing.sync().ranks) == 2
    time.sleep(1.0)
    load = growing.load
    assert load is not None
    load.stop()
    assert not load.broken
    assert all("died" in each for each in growing.refused()), growing.refused()
    assert judge(growing.answers(growing.newcomer())) > 5
    assert judge(growing.answers(survivor)[-60:]) > 5
    assert growing.failed_transfers().count(growing.newcomer()) == 1
