"""Cutting a release: from a clean commit with a dated entry only, and only when two builds agree."""

import hashlib
import subprocess
import tarfile
from pathlib import Path

import pytest
from forkcopy import Fork, replace

VERSION = "0.5.23+rdt.1"


def git(fork: Fork, *args: str) -> None:
    identity = ["-c", "user.name=A Person", "-c", "user.email=person@example.invalid"]
    subprocess.run(["git", *identity, *args], cwd=fork.root, check=True, capture_output=True)


@pytest.fixture
def ready(patched: Fork) -> Fork:
    """A committed checkout whose changelog has this version."""
    (patched.root / "CHANGELOG.md").write_text(f"# Changes\n\n## {VERSION} (2026-01-02)\n")
    (patched.root / ".gitignore").write_text("/build/\n/dist/\n__pycache__/\n")
    git(patched, "init", "-q")
    git(patched, "add", "-A")
    git(patched, "commit", "-qm", "All of it")
    return patched


def test_a_release_leaves_wheel_archive_and_their_true_hashes(ready: Fork) -> None:
    assert "two builds agree" in ready("release")
    dist = ready.root / "dist"
    rows = dict(line.split("  ")[::-1] for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert set(rows) == {file.name for file in dist.iterdir()} - {"SHA256SUMS"}
    assert sorted(name.rsplit(".", 1)[1] for name in rows) == ["gz", "whl"]
    for name, told in rows.items():
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == told


def test_changes_without_a_commit_are_refused(ready: Fork) -> None:
    ready.overlay("sglang/srt/ray/own/late.py", "late = 1\n")
    assert "changes without one" in ready.fails("release")
    assert not (ready.root / "dist").exists()


def test_a_version_without_a_dated_entry_is_refused(ready: Fork) -> None:
    replace(ready.root / "CHANGELOG.md", r" \(2026-01-02\)$", " (unreleased)")
    git(ready, "commit", "-qam", "Not yet")
    assert f"no line '## {VERSION} (YYYY-MM-DD)'" in ready.fails("release")


@pytest.mark.parametrize("local", ["rdt.x", "rdt.1.2.3", "other.1"])
def test_a_version_out_of_form_is_refused(ready: Fork, local: str) -> None:
    replace(ready.root / "pyproject.toml", r"^version = .*$", f'version = "0.5.23+{local}"')
    git(ready, "commit", "-qam", "A version")
    assert "must end in +rdt.N or +rdt.N.P" in ready.fails("release")


def test_an_archive_that_lacks_a_file_is_found_out(ready: Fork) -> None:
    """The fault that this exists for: the checkout builds, what is published does not."""
    source = ready.root / "build_backend/sglang_fork/sdist.py"
    replace(source, r"\*series.overlay\(\).values\(\)", "")
    ready.overlay("sglang/srt/ray/own/verbs.py", "x = 1\n")
    git(ready, "add", "-A")
    git(ready, "commit", "-qm", "An archive that forgets the overlay")
    assert "the checkout gives" in ready.fails("release")


def test_the_archive_that_was_compared_is_the_one_in_dist(ready: Fork, tmp_path: Path) -> None:
    ready("release")
    with tarfile.open(ready.root / "dist" / f"sglang-{VERSION}.tar.gz") as tar:
        assert any(name.endswith("upstream.txt") for name in tar.getnames())
