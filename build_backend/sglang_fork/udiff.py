"""Apply a unified diff exactly: no fuzz, no offset, no new files.

The upstream is pinned by hash, so a hunk that is not where it says it is means that the series
and the pin disagree. That is an error, never something to search for. Everything outside a
`diff --git` section (the mail header, the reasons) is left to other modules.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import PatchError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_REFUSED = (
    b"new file",
    b"deleted file",
    b"rename ",
    b"copy ",
    b"old mode",
    b"similarity",
    b"Binary",
    b"GIT binary",
)
_ONLY_EDITS = "a patch may only edit files that upstream has; new files go under python/."


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """One edit: these lines, at this place, become those lines."""

    start: int
    """Line of the first old line in the unpatched file, from 1."""
    new_start: int
    """Line of the first new line in the patched file, from 1."""
    old: tuple[bytes, ...]
    """Context and removed lines: the upstream text that the patch carries."""
    new: tuple[bytes, ...]
    """Context and added lines."""
    at_top: bool
    """No context before the edit, so it must sit at the top of the file."""
    at_end: bool
    """No context after the edit, so it must sit at the end of the file."""


@dataclass(frozen=True, kw_only=True)
class FilePatch:
    """All edits of one upstream file."""

    path: str
    """As in upstream's repository: python/sglang/..."""
    hunks: tuple[Hunk, ...]

    @property
    def upstream_lines(self) -> int:
        """How many lines of upstream's text this patch repeats."""
        return sum(len(hunk.old) for hunk in self.hunks)


class _Lines:
    """The patch's lines with their numbers, and the place for an error."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self.lines = _LINE.findall(data)
        self.at = 0

    def peek(self) -> bytes:
        return self.lines[self.at] if self.at < len(self.lines) else b""

    def take(self) -> bytes:
        line = self.peek()
        self.at += 1
        return line

    def error(self, what: str) -> PatchError:
        return PatchError(f"patches/{self.name}:{self.at}: {what}")


def parse(name: str, data: bytes) -> tuple[FilePatch, ...]:
    """Read the diff sections of a patch file, in file order."""
    lines = _Lines(name, data)
    files: list[FilePatch] = []
    while lines.peek():
        if not lines.take().startswith(b"diff --git "):
            continue
        path = _file_header(lines)
        hunks = tuple(_hunks(lines))
        if not hunks:
            raise lines.error(f"{path}: no hunks")
        if path in {file.path for file in files}:
            raise lines.error(f"{path} appears twice")
        files.append(FilePatch(path=path, hunks=hunks))
    if not files:
        raise PatchError(f"patches/{name}: no diff in it; remove it or run refresh.")
    return tuple(files)


def _file_header(lines: _Lines) -> str:
    while (line := lines.take()) and not line.startswith(b"--- "):
        if line.startswith(_REFUSED):
            raise lines.error(f"{line.decode().strip()!r}: {_ONLY_EDITS}")
    old, new = line[4:].strip().decode(), lines.take()[4:].strip().decode()
    path = new.removeprefix("b/")
    if old != f"a/{path}" or new != f"b/{path}":
        raise lines.error(f"'--- {old}' / '+++ {new}': {_ONLY_EDITS}")
    return path


def _hunks(lines: _Lines) -> Iterator[Hunk]:
    while match := _HUNK.match(lines.peek()):
        lines.take()
        start, old_count, new_start, new_count = (int(n) for n in match.groups(b"1"))
        body = list(_body(lines, old_count, new_count))
        tags = [tag for tag, _ in body]
        if " " not in tags and "-" not in tags:
            raise lines.error("a hunk without any upstream line has no exact place; use -U1.")
        yield Hunk(
            start=start,
            new_start=new_start,
            old=tuple(text for tag, text in body if tag in " -"),
            new=tuple(text for tag, text in body if tag in " +"),
            at_top=tags[0] != " ",
            at_end=tags[-1] != " ",
        )


def _body(lines: _Lines, old_left: int, new_left: int) -> Iterator[tuple[str, bytes]]:
    """The lines of one hunk; a missing final newline is taken off the line it belongs to."""
    while old_left or new_left:
        line = lines.take()
        tag, text = line[:1].decode("latin-1"), line[1:]
        if not tag or tag not in " -+":
            raise lines.error(f"not a hunk line: {line!r}")
        old_left -= tag in " -"
        new_left -= tag in " +"
        if lines.peek().startswith(b"\\"):
            lines.take()
            text = text.removesuffix(b"\n")
        if min(old_left, new_left) < 0:
            raise lines.error("the hunk is longer than its header says")
        yield tag, text


def apply(source: bytes, hunks: tuple[Hunk, ...], where: str) -> bytes:
    """Return `source` with `hunks` applied at exactly the lines they name, or raise PatchError.

    `where` opens the error text: the patch's name and the upstream path.
    """
    lines: list[bytes] = _LINE.findall(source)
    out: list[bytes] = []
    done = 0
    for number, hunk in enumerate(hunks, 1):
        at, end = hunk.start - 1, hunk.start - 1 + len(hunk.old)
        _must_match(lines[at:end], hunk, f"{where}: hunk {number}")
        if at < done:
            raise PatchError(f"{where}: hunk {number} overlaps the hunk before it; run refresh.")
        out += lines[done:at]
        if hunk.new_start != len(out) + 1 and hunk.new:
            raise PatchError(
                f"{where}: hunk {number} says its new text starts at line {hunk.new_start}, "
                f"it starts at {len(out) + 1}; run refresh."
            )
        if (hunk.at_top and at != 0) or (hunk.at_end and end != len(lines)):
            raise PatchError(
                f"{where}: hunk {number} has no context on one side but line {hunk.start} is not "
                "at that edge of the file; run refresh."
            )
        out += hunk.new
        done = end
    return b"".join(out + lines[done:])


def _must_match(found: list[bytes], hunk: Hunk, where: str) -> None:
    for offset, expected in enumerate(hunk.old):
        actual = found[offset] if offset < len(found) else None
        if actual == expected:
            continue
        shown = "<end of file>" if actual is None else repr(actual.decode(errors="replace"))
        raise PatchError(
            f"{where} does not fit upstream at line {hunk.start + offset}\n"
            f"  expected: {expected.decode(errors='replace')!r}\n"
            f"  found:    {shown}\n"
            "  The series and upstream.txt disagree: see docs/patches.md, 'A patch no longer fits'."
        )
