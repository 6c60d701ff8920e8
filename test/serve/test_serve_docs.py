"""Every curl line of docs/serve.md, in order, against a running application; the comment behind it is its status."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from support.serve_app import ServedApp

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serve.md"


def lines() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def run(command: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout.strip()


def test_the_curl_lines_of_the_page_answer_as_it_says(served: ServedApp, tmp_path: Path) -> None:
    environment = {**os.environ, "URL": served.url, "no_proxy": "*"}
    checked = 0
    for line in lines():
        if line.startswith("SESSION="):
            environment["SESSION"] = run(f"{line}; echo $SESSION", environment)
            assert environment["SESSION"].startswith("s-")
            continue
        command, _, status = line.rpartition("  # ")
        assert command.startswith("curl "), f"every line needs its status: {line!r}"
        body = tmp_path / "body"
        found = run(f"{command} -sS -o {body} -w '%{{http_code}}'", environment)
        assert found == status, (line, found, body.read_text())
        checked += 1
    assert checked > 20
