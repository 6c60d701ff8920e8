"""Each way not to get the upstream wheel has a message of its own, here and in a build."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from forkcopy import FILES, Fork, write_wheel

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}


def test_no_network_and_nothing_stored(empty_store: Fork) -> None:
    said = empty_store.fails("check", **OFFLINE)
    assert "sglang: no network: pip reached no package index" in said
    assert "hash mismatch" not in said


def test_no_network_in_a_build_hook(empty_store: Fork, tmp_path: Path) -> None:
    done = empty_store.hook("build_wheel", tmp_path / "out", **OFFLINE)
    assert done.returncode == 1
    assert "sglang: no network" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").iterdir())


def test_a_stored_wheel_that_was_tampered_with(fork: Fork) -> None:
    with fork.wheel.open("ab") as file:
        file.write(b"more")
    said = fork.fails("check")
    assert "sglang: hash mismatch:" in said
    assert fork.wheel.name in said
    assert "no network" not in said


def test_a_tampered_wheel_in_a_find_links_folder(fork: Fork, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    shutil.move(fork.wheel, links)
    with next(links.iterdir()).open("ab") as file:
        file.write(b"more")
    said = fork.fails("check", **OFFLINE | {"PIP_FIND_LINKS": str(links)})
    assert "sglang: hash mismatch: pip was given another wheel" in said
    assert "no network" not in said


def test_a_good_wheel_in_a_find_links_folder_is_stored(fork: Fork, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    shutil.move(fork.wheel, links)
    said = fork("check", **OFFLINE | {"PIP_FIND_LINKS": str(links)})
    assert said.endswith("check: ok\n")
    assert fork.wheel.exists()


def test_no_fallback_to_a_wheel_that_is_not_pinned(fork: Fork, tmp_path: Path) -> None:
    fork.wheel.unlink()
    links = tmp_path / "links"
    write_wheel(links, FILES, version="0.5.24")
    said = fork.fails("check", **OFFLINE | {"PIP_FIND_LINKS": str(links)})
    assert "sglang: pip could not get sglang 0.5.23" in said


def test_a_build_needs_no_pip_of_its_own_when_one_can_be_reached(
    empty_store: Fork, tmp_path: Path
) -> None:
    done = empty_store.hook("get_requires_for_build_wheel", tmp_path)
    assert done.stdout.strip() == "[]"


def test_another_version_in_pyproject_than_in_the_pin(fork: Fork, tmp_path: Path) -> None:
    file = fork.root / "pyproject.toml"
    file.write_text(file.read_text().replace('"0.5.23+rdt.1"', '"0.5.24+rdt.1"'))
    done = fork.hook("build_wheel", tmp_path / "out")
    assert "has version '0.5.24+rdt.1' but upstream.txt pins '0.5.23'" in done.stderr


def unsupported_python() -> str:
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which("python3.10"), *map(str, versions.glob("3.10*/bin/python3.10"))]
    for python in filter(None, found):
        if subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    pytest.skip("no Python 3.10 on this machine to be refused")


def test_python_3_10_is_told_what_to_use(fork: Fork) -> None:
    done = subprocess.run(
        [unsupported_python(), "-c", "from sglang_fork import backend"],
        env={"PYTHONPATH": str(fork.root / "build_backend")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Python 3.10 is not supported; use Python 3.11 to 3.13" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_a_python_without_upstream_wheels_is_refused(version: tuple[int, int]) -> None:
    from sglang_fork import require_supported_python

    with pytest.raises(SystemExit, match=r"use Python 3\.11 to 3\.13"):
        require_supported_python(version)
