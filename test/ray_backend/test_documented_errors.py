"""Every error that docs/launching.md lists is a text that the code has, so that whoever searches for one finds it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("python/sglang/srt/ray", "python/sglang/srt/entrypoints")
HOLE = "\0"
# What stands for a value in a documented message: dots, capitals, and defaults of limits.
PLACEHOLDERS = re.compile(r"\.\.\.|\b[NR]\b|\bCAUSE\b|\b\d+ s\b|\b0(?= to)")


def documented() -> list[str]:
    lines = (ROOT / "docs/launching.md").read_text().partition("## Errors and cures")[2]
    return re.findall(r"^\| `(.+?)` \|", lines, flags=re.MULTILINE)


def texts() -> list[str]:
    """All string literals, with a hole wherever a value is formatted in. Implicitly joined ones are one."""
    found = []
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else HOLE for p in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def in_order(pieces: list[str], text: str) -> bool:
    for piece in pieces:
        _, found, text = text.partition(piece)
        if not found:
            return False
    return True


def is_in_the_code(message: str) -> bool:
    pieces = [piece.strip() for piece in PLACEHOLDERS.split(message)]
    pieces = [piece for piece in pieces if piece]
    assert pieces, message
    # A variable's name may be formatted in, as the names of environment variables are.
    named = [re.sub(r"^SGLANG_CPU_OMP_THREADS_BIND", "", piece) for piece in pieces]
    return any(in_order(named, text) for text in texts())


def test_the_page_lists_errors():
    assert len(documented()) > 20


@pytest.mark.parametrize("message", documented())
def test_a_documented_error_is_in_the_code(message: str):
    assert is_in_the_code(message)


@pytest.mark.parametrize("message", ["a bundle has no name", "bundle N has too many ..."])
def test_an_invented_error_is_not(message: str):
    assert not is_in_the_code(message)
