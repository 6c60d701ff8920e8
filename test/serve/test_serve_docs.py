"""docs/serve.md as it runs: its curl lines in order (the comment behind each is its status), and its Python."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import ray
from support.models import new_model
from support.oracle import assert_serves
from support.serve_app import MODEL, ServedApp

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


def python_block(first_line: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(first_line)]
    return str(block)


def test_the_deploying_snippet_builds_an_application(serve_ray: str, monkeypatch: Any) -> None:
    """All of it but the last two calls, which deploy a model that would have to be downloaded."""
    from ray import serve

    deployed: list[Any] = []
    monkeypatch.setattr(serve, "start", lambda **options: deployed.append(options))
    monkeypatch.setattr(serve, "run", lambda app, **options: deployed.append((app, options)))
    exec(python_block("from ray import serve"), {})
    assert deployed[0] == {"http_options": {"host": "127.0.0.1"}}
    app, options = deployed[1]
    assert isinstance(app, serve.Application)
    assert options == {"name": "rollout"}


def test_the_publishing_snippet_syncs_every_replica(
    served: ServedApp, trainer: Any, versions: Any
) -> None:
    number = versions.next()
    snippet = python_block("from sglang.srt.ray import WeightPublisher")
    for there, here in (("rollout", served.name), ("qwen", MODEL), ("7", str(number))):
        assert f'"{there}"' in snippet
        snippet = snippet.replace(f'"{there}"', f'"{here}"')

    def run_there(_actor: Any) -> str:
        from support.models import new_model as make

        names: dict[str, Any] = {"model": make(number)}
        exec(snippet, names)
        return str(names["report"].version)

    assert ray.get(trainer.__ray_call__.remote(run_there), timeout=120) == str(number)
    # The snippet's publisher took over from the one that all tests share.
    ray.get(trainer.connect_serve.remote(served.name, MODEL), timeout=120)
    for _ in range(6):
        assert_serves(new_model(number), [5, 6, 7], served.generate([5, 6, 7], 4))
