"""What pyproject.toml and upstream.txt say: our version, the pin, and the metadata lines we change.

Both files are read anew at each call, and every path hangs off the folder this file lies in,
so a copy of the repository builds itself. The public part of our version must be the pinned
version: pip then treats our wheel as that very upstream release.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import ProjectError

ROOT = Path(__file__).resolve().parents[2]
PIN = ROOT / "upstream.txt"
BUILD = ROOT / "build"


@dataclass(frozen=True, kw_only=True)
class Pin:
    """The one upstream release this distribution is built from."""

    version: str
    """Upstream's version, as `upstream.txt` pins it."""
    hashes: frozenset[str]
    """SHA-256 of each wheel that may be used, one a platform and Python."""


@dataclass(frozen=True, kw_only=True)
class Project:
    """What the build needs to know from pyproject.toml."""

    version: str
    """Our version: the pinned one and a local part."""
    base: str
    """The pinned upstream version."""
    metadata_edits: Mapping[str, tuple[str, ...]]
    """Upstream METADATA line -> the lines that stand in its place."""


def pin() -> Pin:
    """Read upstream.txt, which is in pip's own requirements format."""
    text = PIN.read_text()
    version = re.search(r"^sglang==(\S+)", text, re.M)
    hashes = frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})\b", text))
    if version is None or not hashes:
        raise ProjectError(
            f"{PIN.name}: needs one line 'sglang==VERSION' with --hash=sha256: pins."
        )
    return Pin(version=version.group(1), hashes=hashes)


def load() -> Project:
    """Read pyproject.toml and hold it against the pin."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    version, base = config["project"]["version"], pin().version
    if version.partition("+")[0] != base or "+" not in version:
        raise ProjectError(
            f"pyproject.toml has version {version!r} but {PIN.name} pins {base!r}: "
            f"the version must be {base}+rdt.N."
        )
    edits = config["tool"]["sglang-fork"]["metadata"]
    return Project(
        version=version, base=base, metadata_edits={old: tuple(new) for old, new in edits.items()}
    )


def version_module(version: str) -> bytes:
    """The text of sglang/_version.py, which upstream's own build generates as well."""
    public = tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())
    return (
        f"__version__ = version = {version!r}\n"
        f"__version_tuple__ = version_tuple = {public!r}\n"
        "__commit_id__ = commit_id = None\n"
    ).encode()
