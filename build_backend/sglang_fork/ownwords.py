"""The own-words rule as a test: none of our files repeats six upstream lines in a row.

Lines are compared without indentation; blank lines and comments do not count, nor do six plain
imports, whose order the sorting gives. Our files are indexed and upstream's are scanned once, so
the cost is one pass over upstream's text.
"""

import zipfile
from collections.abc import Iterator
from pathlib import Path

from .project import ROOT
from .series import OVERLAY

WINDOW = 6
FOLDERS = (OVERLAY, ROOT / "test", ROOT / "examples", ROOT / "benchmark", ROOT / "scripts")


def our_files() -> list[Path]:
    """Every Python file of ours that could hold a copy of upstream text."""
    found = {file for folder in FOLDERS for file in folder.rglob("*.py")}
    return sorted(file for file in found if "__pycache__" not in file.parts)


def windows(text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, six significant lines in one string)."""
    numbered = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    for at in range(len(lines) - WINDOW + 1):
        window = [line for _, line in lines[at : at + WINDOW]]
        if not all(line.startswith(("import ", "from ")) for line in window):
            yield lines[at][0], "\n".join(window)


def copies(wheel: zipfile.ZipFile, files: list[Path]) -> Iterator[str]:
    """One complaint for each file of ours that repeats upstream, with both places."""
    ours: dict[str, list[tuple[Path, int]]] = {}
    for file in files:
        for number, window in windows(file.read_text()):
            ours.setdefault(window, []).append((file, number))
    told: set[Path] = set()
    for name in sorted(n for n in wheel.namelist() if n.endswith(".py")):
        for theirs, window in windows(wheel.read(name).decode(errors="replace")):
            for file, number in ours.get(window, ()):
                if file not in told:
                    told.add(file)
                    yield (
                        f"{file.relative_to(ROOT)}:{number}: repeats {WINDOW} lines of upstream's "
                        f"{name}:{theirs}; call that code, or write it in your own words."
                    )
