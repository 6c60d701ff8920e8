"""One local Ray cluster for all tests of this folder that only place and name actors; engines have their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.local_ray import local_ray as local_ray_of
from tiny_qwen import write_tiny_qwen

# Ray gives a raylet 30 s to start; a loaded machine takes longer.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen(tmp_path_factory.mktemp("tiny-qwen"))


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with local_ray_of(num_cpus=4):
        yield
