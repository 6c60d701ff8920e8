"""What the repository does for those who work on it and those who type-check against it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_hooks_correct_spelling_but_never_look_at_patches(tmp_path: Path) -> None:
    for name in (".pre-commit-config.yaml", "scripts"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    typo = "rec" + "ieve\n"  # in two parts, or our own spelling check finds it here
    for name in ("docs/page.md", "patches/one.patch"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(typo)
    for command in (["git", "init", "-q"], ["git", "add", "-A"]):
        subprocess.run(command, cwd=tmp_path, check=True)
    place = {**os.environ, "VENV": sys.prefix, "PRE_COMMIT_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "pre_commit", "run", "codespell", "--all-files"]
    done = subprocess.run(command, cwd=tmp_path, env=place, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "docs/page.md:1: " in done.stdout
    assert "patches/" not in done.stdout


def test_types_of_our_package_are_seen_by_a_type_checker(tmp_path: Path) -> None:
    """As in a user's environment: sglang on the path of another Python, and no configuration of ours."""
    tree = ROOT / "build" / "tree" / "python"
    if not tree.exists():
        pytest.skip("there is no build/tree: scripts/fork tree")
    venv.create(tmp_path / "env", with_pip=False)
    site = next((tmp_path / "env" / "lib").glob("python3.*/site-packages"))
    (site / "sglang.pth").write_text(f"{tree}\n")
    script = tmp_path / "trainer.py"
    script.write_text(
        "from sglang.srt.ray.weight_sync import SyncReport, WeightPublisher\n"
        "def report(publisher: WeightPublisher) -> SyncReport:\n"
        "    return publisher.sync({}, version=7)\n"
    )
    command = [
        sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"),
        "--config-file", os.devnull, "--python-executable", str(tmp_path / "env/bin/python"), str(script),
    ]  # fmt: skip
    place = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MYPYPATH")
    }
    said = subprocess.run(command, cwd=tmp_path, env=place, capture_output=True, text=True).stdout
    assert 'Argument "version" to "sync" of "WeightPublisher" has incompatible type "int"' in said
    assert "py.typed" not in said


def test_every_target_is_listed_by_help() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.M)
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^make (\S+)", said.stdout, re.M))
    assert listed == set(phony.split())
