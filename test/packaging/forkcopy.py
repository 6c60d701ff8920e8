"""A copy of this repository over a tiny upstream wheel, so that each test builds in milliseconds.

The backend finds everything from where its own file lies. A copy in a temporary folder therefore
works on the copy alone, and the user's checkout and its build/tree are never touched.
"""

import base64
import csv
import hashlib
import io
import os
import platform
import re
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

ACTOR = "sglang/srt/ray/actor.py"
PLAIN = "sglang/srt/plain.py"
FILES = {
    "sglang/__init__.py": "from sglang._version import __version__\n",
    "sglang/_version.py": "__version__ = '0.5.23'\n",
    "sglang/srt/__init__.py": "",
    "sglang/srt/ray/__init__.py": "",
    ACTOR: "import ray\n\n\n@ray.remote\nclass Actor:\n    def ping(self):\n"
    "        return 'pong'\n",
    PLAIN: "".join(f"value_{n} = {n}\n" for n in range(12)),
    "sglang/srt/configs/world=16,H=7168.json": "{}\n",
    f"sglang/srt/fast{sysconfig.get_config_var('EXT_SUFFIX')}": "not really a module\n",
}
METADATA = """Metadata-Version: 2.4
Name: sglang
Version: 0.5.23
License: many
        folded lines
Requires-Python: >=3.11
License-File: LICENSE
Requires-Dist: numpy
Provides-Extra: ray
Requires-Dist: ray[default]>=2.55.1; extra == "ray"

Version: 0.5.23 is also said in the description.
"""
FIELDS = "\n\nForwarded: no\nRemove-When: upstream has it"


def tag() -> str:
    """The tag of a wheel that fits the running Python."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{python}-{python}-manylinux_2_17_{platform.machine()}"


def write_wheel(folder: Path, files: dict[str, str], version: str = "0.5.23") -> Path:
    """An upstream wheel with these files, complete enough for pip."""
    info = f"sglang-{version}.dist-info"
    members = files | {
        f"{info}/METADATA": METADATA.replace("0.5.23", version),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag()}\n",
        f"{info}/entry_points.txt": "[console_scripts]\nsglang = sglang.cli:main\n",
        f"{info}/licenses/LICENSE": "upstream's licence\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"sglang-{version}-{tag()}.whl"
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in members.items():
            archive.writestr(path, text)
            digest = hashlib.sha256(text.encode()).digest()
            coded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            rows.writerow((path, f"sha256={coded}", len(text.encode())))
        rows.writerow((f"{info}/RECORD", "", ""))
        archive.writestr(f"{info}/RECORD", record.getvalue())
    return wheel


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A copied repository to run commands in."""

    root: Path

    @property
    def tree(self) -> Path:
        return self.root / "build" / "tree"

    @property
    def store(self) -> Path:
        return self.root / "build" / "upstream"

    @property
    def wheel(self) -> Path:
        return next(self.store.glob("*.whl"))

    def python(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run Python with the copy's backend; a failure is for the test to look at."""
        place = {**os.environ, "PYTHONPATH": str(self.root / "build_backend"), **env}
        return subprocess.run(
            [sys.executable, *args], cwd=self.root, env=place, capture_output=True, text=True
        )

    def __call__(self, *args: str, **env: str) -> str:
        """Run one command of the fork that must succeed."""
        done = self.python("-m", "sglang_fork", *args, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def fails(self, *args: str, **env: str) -> str:
        """Run one command that must fail, and return all that it said."""
        done = self.python("-m", "sglang_fork", *args, **env)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def hook(self, name: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Call one build hook as a front end would."""
        folder.mkdir(exist_ok=True)
        code = f"from sglang_fork import backend; print(backend.{name}({str(folder)!r}))"
        return self.python("-c", code, **env)

    def git(self, *args: str) -> str:
        command = ["git", "-C", str(self.tree), "-c", "user.name=A Person", "-c"]
        command += ["user.email=person@example.invalid", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def edit(self, path: str, old: str, new: str) -> None:
        """Change an upstream file in build/tree, without a commit."""
        file = self.tree / "python" / path
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    def commit(self, subject: str, path: str, old: str, new: str) -> None:
        """A new patch, still to be exported."""
        self("tree")
        self.edit(path, old, new)
        self.git("commit", "-qam", subject + FIELDS)

    def overlay(self, path: str, text: str) -> Path:
        file = self.root / "python" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def pin(self, *wheels: Path) -> None:
        """Write upstream.txt for these wheels."""
        hashes = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
        lines = "".join(f" \\\n    --hash=sha256:{one}" for one in hashes)
        (self.root / "upstream.txt").write_text(f"sglang==0.5.23{lines}\n")


def replace(file: Path, pattern: str, by: str) -> None:
    """Plant a fault: one substitution that must hit."""
    text, count = re.subn(pattern, by, file.read_text(), flags=re.M)
    assert count == 1, f"{pattern!r} hit {count} times"
    file.write_text(text)
