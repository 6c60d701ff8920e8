"""Fixtures that several folders share: one local Ray, one tiny model, one engine for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine import RunningEngine, running_engine


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Address of a local Ray with two CPUs, which this process is connected to."""
    from support.local_ray import local_ray

    with local_ray() as address:
        yield address


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model path of a random Qwen2 (`ENGINE_SEED`) with its tokenizer."""
    from support.models import write_model

    return write_model(tmp_path_factory.mktemp("tiny_qwen2"))


@pytest.fixture(scope="session")
def session_engine(ray_address: str, tiny_model: Path) -> Iterator[RunningEngine]:
    """The one engine of the session; tests take it as `shared_engine`."""
    with running_engine(tiny_model) as engine:
        yield engine


@pytest.fixture
def shared_engine(session_engine: RunningEngine) -> RunningEngine:
    """The session's engine: serving, not paused, no session open. Its weights are whatever the last test left."""
    session_engine.make_usable()
    return session_engine
