"""Fixtures: the copied repository without a wheel, over the tiny upstream, and with one patch."""

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for tools in ("build_backend", "scripts"):
    sys.path.insert(0, str(ROOT / tools))

from forkcopy import ACTOR, FILES, Fork, write_wheel  # noqa: E402

COPIED = ("pyproject.toml", "constraints.txt", "LICENSE", "NOTICE", "build_backend", "scripts")


@pytest.fixture
def empty_store(tmp_path: Path) -> Fork:
    """The repository with the real pins, and no upstream wheel stored."""
    root = tmp_path / "repo"
    root.mkdir()
    for name in (*COPIED, "upstream.txt"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, root / name)
    (root / "patches").mkdir()
    (root / "patches" / "series").touch()
    (root / "python" / "sglang").mkdir(parents=True)
    return Fork(root=root)


@pytest.fixture
def fork(empty_store: Fork) -> Fork:
    """The repository over the tiny upstream, with no patch and no overlay file yet."""
    empty_store.pin(write_wheel(empty_store.store, FILES))
    return empty_store


@pytest.fixture
def patched(fork: Fork) -> Fork:
    """The same with one patch, exported."""
    fork.commit("ray: a base class", ACTOR, "class Actor:", "class Actor(object):")
    assert "ray-a-base-class.patch" in fork("refresh")
    return fork
