"""The built wheel: right metadata, complete RECORD, the same bytes twice, nothing left behind."""

import base64
import csv
import hashlib
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from forkcopy import ACTOR, FILES, Fork, tag

from sglang_fork.errors import ProjectError
from sglang_fork.metadata import replace_lines

ROOT = Path(__file__).resolve().parents[2]
INFO = "sglang-0.5.23+rdt.1.dist-info"


def build(fork: Fork, out: Path, hook: str = "build_wheel", **env: str) -> Path:
    done = fork.hook(hook, out, **env)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.strip()


@pytest.fixture
def complete(patched: Fork) -> Fork:
    """One patch, one overlay file, and leftovers that must not be shipped."""
    patched.overlay("sglang/srt/ray/own/verbs.py", "def pull():\n    return 1\n")
    patched.overlay("sglang/srt/ray/own/__pycache__/verbs.cpython-311.pyc", "cache")
    patched.overlay("sglang/srt/ray/own/.verbs.py.swp", "editor")
    return patched


def test_the_wheel_is_upstream_plus_patches_plus_overlay(complete: Fork, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(complete, tmp_path / "out")) as wheel:
        code = {name for name in wheel.namelist() if INFO not in name}
        assert code == set(FILES) | {"sglang/srt/ray/own/verbs.py"}
        assert b"class Actor(object):" in wheel.read(ACTOR)
        assert b"'0.5.23+rdt.1'" in wheel.read("sglang/_version.py")


def test_every_record_row_is_right(complete: Fork, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(complete, tmp_path / "out")) as wheel:
        rows = list(csv.reader(wheel.read(f"{INFO}/RECORD").decode().splitlines()))
        assert sorted(path for path, _, _ in rows) == sorted(wheel.namelist())
        for path, digest, size in rows[:-1]:
            data = wheel.read(path)
            coded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={coded}", str(len(data)))


def test_the_metadata_differs_from_upstreams_in_the_lines_we_name(
    fork: Fork, tmp_path: Path
) -> None:
    with zipfile.ZipFile(build(fork, tmp_path / "out")) as wheel:
        lines = wheel.read(f"{INFO}/METADATA").decode().split("\n")
    with zipfile.ZipFile(fork.wheel) as wheel:
        before = wheel.read("sglang-0.5.23.dist-info/METADATA").decode().split("\n")
    assert [line for line in lines if line not in before] == [
        "Version: 0.5.23+rdt.1",
        "Requires-Python: >=3.11,<3.14",
        "License-File: NOTICE",
        "License-File: MODIFIED-FILES",
        'Requires-Dist: ray[default,serve]>=2.60; extra == "ray"',
        'Requires-Dist: nixl; extra == "ray"',
        'Requires-Dist: rich; extra == "ray"',
    ]
    assert lines[-2] == "Version: 0.5.23 is also said in the description."


@pytest.mark.parametrize("head", [b"A: 1\n", b"A: 1\nB: 2\nB: 2\n"])
def test_a_metadata_line_must_be_there_exactly_once(head: bytes) -> None:
    with pytest.raises(ProjectError, match=r"the line 'B: 2' [02] times, expected once"):
        replace_lines(head + b"\nB: 2\n", {"B: 2": ("B: 3",)})


def test_the_licences_name_every_changed_file(complete: Fork, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(complete, tmp_path / "out")) as wheel:
        assert wheel.read(f"{INFO}/licenses/LICENSE") == b"upstream's licence\n"
        assert b"Apache License" in wheel.read(f"{INFO}/licenses/NOTICE")
        listed = wheel.read(f"{INFO}/licenses/MODIFIED-FILES").decode()
    assert f"{ACTOR}  (patches/ray-a-base-class.patch)" in listed
    assert "sglang/_version.py" in listed


def test_two_builds_are_the_same_file(complete: Fork, tmp_path: Path) -> None:
    for hook in ("build_wheel", "build_sdist"):
        first = build(complete, tmp_path / "a", hook, TZ="UTC").read_bytes()
        (complete.root / "python/sglang/srt/ray/own/verbs.py").touch()
        second = build(complete, tmp_path / "b", hook, TZ="Asia/Tokyo", PYTHONHASHSEED="7")
        assert second.read_bytes() == first


def test_the_prepared_metadata_is_the_wheels(complete: Fork, tmp_path: Path) -> None:
    build(complete, tmp_path / "meta", "prepare_metadata_for_build_wheel")
    with zipfile.ZipFile(build(complete, tmp_path / "out")) as wheel:
        names = {name for name in wheel.namelist() if name.startswith(INFO)}
        assert names - {f"{INFO}/RECORD"} == {
            file.relative_to(tmp_path / "meta").as_posix()
            for file in (tmp_path / "meta").rglob("*")
            if file.is_file()
        }
        prepared = (tmp_path / "meta" / INFO / "METADATA").read_bytes()
        assert prepared == wheel.read(f"{INFO}/METADATA")


def test_the_source_archive_builds_the_same_wheel(complete: Fork, tmp_path: Path) -> None:
    archive = build(complete, tmp_path / "out", "build_sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    unpacked = Fork(root=tmp_path / "sglang-0.5.23+rdt.1")
    unpacked.store.mkdir(parents=True)
    (unpacked.store / complete.wheel.name).hardlink_to(complete.wheel)
    ours = build(complete, tmp_path / "a").read_bytes()
    assert build(unpacked, tmp_path / "b").read_bytes() == ours


def test_a_failed_build_leaves_no_half_wheel(complete: Fork, tmp_path: Path) -> None:
    complete.overlay(ACTOR, "mine = 1\n")
    assert complete.hook("build_wheel", tmp_path / "out").returncode == 1
    assert not list((tmp_path / "out").iterdir())


def test_a_patch_that_does_not_fit_stops_the_build(complete: Fork, tmp_path: Path) -> None:
    patch = complete.root / "patches/ray-a-base-class.patch"
    patch.write_text(patch.read_text().replace("-class Actor:", "-class Actress:"))
    done = complete.hook("build_wheel", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.startswith(f"patches/{patch.name}: python/{ACTOR}: hunk 1 does not fit")
    assert "expected: 'class Actress:\\n'" in done.stderr
    assert "found:    'class Actor:\\n'" in done.stderr


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    venv.create(tmp_path / "env", with_pip=True)
    return tmp_path / "env" / "bin" / "python"


def pip(python: Path, *args: str) -> None:
    command = [python, "-m", "pip", "-q", "--disable-pip-version-check", *args]
    subprocess.run(command, check=True, capture_output=True)


def sglang_version(python: Path) -> str:
    code = "import sglang; print(sglang.__version__)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def installed_files(python: Path) -> set[Path]:
    return {file for file in python.parents[1].rglob("*") if "__pycache__" not in file.parts}


def test_install_and_uninstall_leave_nothing(
    complete: Fork, environment: Path, tmp_path: Path
) -> None:
    before = installed_files(environment)
    pip(environment, "install", "--no-deps", str(complete.root))
    assert sglang_version(environment) == "0.5.23+rdt.1"
    pip(environment, "uninstall", "-y", "sglang")
    assert installed_files(environment) == before


def test_an_editable_install_sees_edits_at_once(complete: Fork, environment: Path) -> None:
    before = installed_files(environment)
    pip(environment, "install", "--no-deps", "-e", str(complete.root))
    assert sglang_version(environment) == "0.5.23+rdt.1"
    complete.overlay("sglang/srt/ray/own/verbs.py", "def pull():\n    return 2\n")
    code = "from sglang.srt.ray.own.verbs import pull; print(pull())"
    done = subprocess.run([environment, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"
    native = next(name for name in FILES if name.endswith(".so"))
    assert (complete.tree / "python" / native).exists()
    pip(environment, "uninstall", "-y", "sglang")
    assert installed_files(environment) == before


@pytest.fixture
def real(empty_store: Fork) -> Fork:
    """The repository as it is, over the real upstream wheel."""
    wheels = list((ROOT / "build" / "upstream").glob(f"sglang-*{tag()[:10]}*.whl"))
    if not wheels:
        pytest.skip("no upstream wheel is stored: scripts/fork fetch")
    empty_store.store.mkdir(parents=True)
    (empty_store.store / wheels[0].name).symlink_to(wheels[0])
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("patches", "python"):
        if (ROOT / name).exists():
            shutil.copytree(
                ROOT / name, empty_store.root / name, ignore=ignored, dirs_exist_ok=True
            )
    return empty_store


@pytest.mark.slow
def test_the_real_wheel_installs_and_leaves_nothing(
    real: Fork, environment: Path, tmp_path: Path
) -> None:
    for out in ("a", "b"):
        pip(Path(sys.executable), "wheel", "--no-deps", "-w", str(tmp_path / out), str(real.root))
    (first,), (second,) = (list((tmp_path / out).iterdir()) for out in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    before = installed_files(environment)
    pip(environment, "install", "--no-deps", "--no-compile", str(first))
    assert len(installed_files(environment) - before) > 5000
    pip(environment, "uninstall", "-y", "sglang")
    assert installed_files(environment) == before
