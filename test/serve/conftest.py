"""One Serve application with two replicas for all tests of this folder that don't kill or rescale it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support.serve_app import MODEL, ServedApp, llm_config, running_app
from support.trainer import start_serve_trainer


@pytest.fixture(scope="session")
def serve_ray() -> Iterator[str]:
    """A local Ray with room for a third replica."""
    from support.local_ray import local_ray

    with local_ray(num_cpus=4) as address:
        yield address


@pytest.fixture(scope="session")
def session_app(serve_ray: str, tiny_model: Path) -> Iterator[ServedApp]:
    with running_app(llm_config(tiny_model)) as app:
        app.wait_for_replicas(2)
        yield app


@pytest.fixture
def served(session_app: ServedApp) -> ServedApp:
    """The session's application: two replicas, awake and not paused."""
    session_app.post("/wakeup")
    session_app.post("/resume")
    session_app.wait_for_replicas(2)
    return session_app


@pytest.fixture(scope="session")
def trainer(session_app: ServedApp) -> Iterator[Any]:
    actor = start_serve_trainer()
    ray.get(actor.connect_serve.remote(session_app.name, MODEL), timeout=120)
    yield actor
    ray.kill(actor)


class Versions:
    """Numbers that only grow, since an engine refuses to go back. They are seeds of weights as well."""

    def __init__(self) -> None:
        self._last = 0

    def next(self, count: int = 1) -> int:
        """The first of `count` new ones."""
        first, self._last = self._last + 1, self._last + count
        return first


@pytest.fixture(scope="session")
def versions() -> Versions:
    return Versions()
