"""The page of `GET /weight_sync/ui`: one HTML file beside this one, without a build step and without any other file.

The page may run its own script and style and nothing else (its policy names their hashes), so a label or an error
text that somebody put into a version can't become code. It asks `/weight_sync/overview`, with the same key.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

from fastapi.responses import HTMLResponse

_FILE = Path(__file__).with_name("weight_ui.html")


def page() -> HTMLResponse:
    text, policy = _text_and_policy()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return HTMLResponse(text, headers=headers)


@functools.cache
def _text_and_policy() -> tuple[str, str]:
    text = _FILE.read_text(encoding="utf-8")
    script, style = (_hash_of(text, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src http: https:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def _hash_of(text: str, tag: str) -> str:
    (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    return f"'sha256-{digest}'"
