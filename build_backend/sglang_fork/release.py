"""Cut a release: build the wheel twice in different places, demand equal bytes, write their hashes.

The second wheel is built from the source archive, unpacked elsewhere, so equality also proves that
the archive is complete. Nothing is uploaded and no tag is made: both are a person's decision.
"""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from . import sdist, upstream, wheel
from .errors import ReleaseError
from .gitrun import Git
from .project import ROOT, load

DIST = ROOT / "dist"
CHANGELOG = ROOT / "CHANGELOG.md"
SUMS = "SHA256SUMS"
_VERSION = re.compile(r"\+rdt\.\d+(\.\d+)?$")


def cut() -> list[Path]:
    """Build and compare everything of this version; the files that are now in dist/.

    Raises:
        ReleaseError: the checkout is not what a release is cut from, or two builds differ.
    """
    version = load().version
    require_releasable(version)
    DIST.mkdir(exist_ok=True)
    archive = DIST / sdist.build(DIST)
    built = DIST / wheel.build(DIST, editable=False)
    with tempfile.TemporaryDirectory(prefix="sglang-release-") as folder:
        again = _rebuilt(archive, Path(folder))
        if again.read_bytes() != built.read_bytes():
            raise ReleaseError(
                f"{built.name}: the checkout gives {_sha256(built)}, its source archive "
                f"{_sha256(again)}.\n  Compare the two: one of them has a file, a date or a mode "
                "of this machine in it."
            )
    files = sorted(file for file in DIST.iterdir() if file.name.startswith(f"sglang-{version}"))
    rows = [f"{_sha256(file)}  {file.name}\n" for file in files]
    (DIST / SUMS).write_text("".join(rows))
    return files


def require_releasable(version: str) -> None:
    """Raises:
    ReleaseError: a version out of form, changes without a commit, or no dated entry in CHANGELOG.md.
    """
    if not _VERSION.search(version):
        raise ReleaseError(
            f"pyproject.toml: version {version!r} must end in +rdt.N or +rdt.N.P; see CONTRIBUTING.md."
        )
    if dirty := Git(folder=ROOT)("status", "--porcelain").strip():
        raise ReleaseError(
            f"a release is cut from a commit, but there are changes without one:\n{dirty}"
        )
    heading = re.compile(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", re.M)
    if not heading.search(CHANGELOG.read_text()):
        raise ReleaseError(f"CHANGELOG.md has no line '## {version} (YYYY-MM-DD)'; write it first.")


def _rebuilt(archive: Path, folder: Path) -> Path:
    """The wheel that the source archive gives in another folder, time zone and process."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    copy = next(folder.iterdir())
    store = copy / "build" / "upstream"
    store.mkdir(parents=True)
    (store / upstream.fetch().name).symlink_to(upstream.fetch())
    out = folder / "out"
    out.mkdir()
    code = f"from sglang_fork import backend; print(backend.build_wheel({str(out)!r}))"
    place = {**os.environ, "PYTHONPATH": str(copy / "build_backend"), "TZ": "Asia/Tokyo"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=place, capture_output=True, text=True
    )
    if done.returncode:
        raise ReleaseError(f"the source archive {archive.name} does not build:\n{done.stderr}")
    return out / done.stdout.strip()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
