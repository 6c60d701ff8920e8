"""Every fenced block of the documentation, by page and first line."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
)
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snippet:
    page: str
    language: str
    body: str

    @property
    def key(self) -> tuple[str, str]:
        """Page and first line of code, without spaces at its ends and without its comment."""
        lines = [line for line in self.body.splitlines() if line.strip()]
        return self.page, re.sub(r"  +#.*", "", lines[0]).strip()


def all_snippets() -> dict[tuple[str, str], list[Snippet]]:
    found: dict[tuple[str, str], list[Snippet]] = {}
    for page in PAGES:
        for match in _FENCE.finditer((ROOT / page).read_text()):
            body = textwrap.dedent(match["body"])
            snippet = Snippet(page=page, language=match["language"], body=body)
            found.setdefault(snippet.key, []).append(snippet)
    return found


def body(page: str, first_line: str) -> str:
    (snippet,) = all_snippets()[(page, first_line)]
    return snippet.body
