"""Our own content: the patch series, the upstream bytes it changes, and the overlay's new files.

`patches/series` gives the order, one name a line. The overlay mirrors upstream's `python/`
folder and may only add files: a path that upstream has must be patched instead.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from . import udiff
from .errors import OverlayError, PatchError
from .project import ROOT

PATCHES = ROOT / "patches"
OVERLAY = ROOT / "python"
_PREFIX = "python/"


def names() -> list[str]:
    """Patch names in order of application."""
    lines = (line.strip() for line in (PATCHES / "series").read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def read(name: str) -> bytes:
    """One patch's bytes."""
    try:
        return (PATCHES / name).read_bytes()
    except FileNotFoundError:
        raise PatchError(f"patches/series names {name!r}, which is not in patches/.") from None


def digest() -> str:
    """Changes whenever the series or any patch in it does."""
    parts = [b"\0".join((name.encode(), read(name))) for name in names()]
    return hashlib.sha256(b"\0\0".join(parts)).hexdigest()


def edits() -> dict[str, str]:
    """{upstream path: name of the patch that edits it}."""
    return {file.path: name for name in names() for file in udiff.parse(name, read(name))}


def patched(upstream: Callable[[str], bytes]) -> dict[str, bytes]:
    """{wheel path: new bytes} for every upstream file that the series edits.

    `upstream` reads one file of the upstream wheel and raises KeyError if there is none.
    """
    out: dict[str, bytes] = {}
    for name in names():
        for file in udiff.parse(name, read(name)):
            path = file.path.removeprefix(_PREFIX)
            try:
                source = out[path] if path in out else upstream(path)
            except KeyError:
                raise PatchError(f"patches/{name}: upstream has no {file.path}.") from None
            out[path] = udiff.apply(source, file.hunks, f"patches/{name}: {file.path}")
    return out


def overlay() -> dict[str, Path]:
    """{wheel path: file} for every file of ours, without caches and editors' leftovers."""
    return {
        file.relative_to(OVERLAY).as_posix(): file
        for file in sorted(OVERLAY.rglob("*"))
        if file.is_file() and _is_source(file.relative_to(OVERLAY))
    }


def _is_source(path: Path) -> bool:
    hidden = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
    return not hidden and not path.name.endswith((".pyc", "~", ".orig", ".rej"))


def shadowing(overlay_paths: Iterable[str], upstream_paths: Iterable[str]) -> list[str]:
    """Overlay paths that upstream has too."""
    return sorted(set(overlay_paths) & set(upstream_paths))


def require_only_new(upstream_paths: Iterable[str]) -> dict[str, Path]:
    """The overlay, or OverlayError if it would replace an upstream file."""
    ours = overlay()
    if clash := shadowing(ours, upstream_paths):
        raise OverlayError(
            "".join(f"python/{path} replaces an upstream file.\n" for path in clash)
            + "  Patch it instead: see docs/patches.md."
        )
    return ours
