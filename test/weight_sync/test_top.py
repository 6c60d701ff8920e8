"""The terminal dashboard against a real HTTP server with the real routes and fence; ranks and effects are fakes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from rich.console import Console
from test_weight_history import Fleet, request

from sglang.srt.ray.weight_routes import add_weight_routes
from sglang.srt.ray.weight_sync import top
from sglang.srt.utils.auth import add_api_key_middleware


@contextlib.contextmanager
def served(fleet: Fleet | None, *, api_key: str | None = None, cors: bool = False) -> Iterator[str]:
    """A server over `fleet`'s fence, whose loop is the server's."""
    app = FastAPI()
    if cors:  # as upstream's application has it
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_headers=["*"])
    add_weight_routes(app, None if fleet is None else fleet.fence)
    if api_key is not None:
        add_api_key_middleware(app, api_key=api_key, admin_api_key=None)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive()


def fleet_after(*steps: str) -> Fleet:
    """A fleet that went through `sync` and `tear`, and may stand in an `open` transaction."""
    fleet = Fleet()

    async def go() -> None:
        for number, step in enumerate(steps, 1):
            if step == "sync":
                await fleet.sync(number)
                continue
            await fleet.fence.open(request(number), timeout_s=5)
            fleet.fence._disarm()  # its timer belongs to this loop, which ends here
            if step == "tear":
                fleet.ranks[1].wrote(f"t{number}", failure="the cable broke")
                await fleet.fence.abort(f"t{number}", "rank 1: the cable broke", timeout_s=5)

    asyncio.run(go())
    fleet.fence._lock = asyncio.Lock()
    return fleet


def text_of(answers: list[top.Answer], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(top.rendered(answers))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_one_table_of_a_fleet_fits_a_terminal_and_tells_each_thing() -> None:
    with served(fleet_after("sync", "open")) as busy, served(fleet_after("sync", "tear")) as torn:
        answers = top.ask_all([busy, torn], None)
    text = text_of(answers)
    assert max(map(len, text.splitlines())) <= 80
    assert "1 -> 2" in text
    assert "trainer:7 (" in text
    assert f"{torn} is TORN: rank 1: the cable broke" in " ".join(text.split())
    engines, _, rest = text.partition("ranks ")
    assert [line.split()[:3] for line in engines.splitlines()[4:6]] == [
        ["1", busy.removeprefix("http://"), "SYNCING"],
        ["2", torn.removeprefix("http://"), "TORN"],
    ]
    ranks, _, syncs = rest.partition("last sync")
    assert ranks.count("VERIFIED") == 3
    assert ranks.count("FAILED") == 1
    assert "committed" in syncs
    assert "torn" in syncs
    assert [answer.exit_code for answer in answers] == [0, 1]


def test_once_as_json_is_one_object_and_the_status_tells(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with served(fleet_after("sync")) as url:
        assert top.main(["--once", "--json", url]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["engines"][url]["version"] == "1"
        assert told["engines"][url]["history"][0]["outcome"] == "committed"
    assert top.main(["--once", "--json", url]) == 2
    told = json.loads(capsys.readouterr().out)
    assert "no answer" in told["engines"][url]["problem"]


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "secret")
    with served(fleet_after(), api_key="secret") as url:
        assert top.main(["--once", url]) == 2
        assert top.ask(url, None).problem == "it asks for its API key: see --api-key-env"
        assert top.main(["--once", url, "--api-key-env", "THE_KEY"]) == 0
    with pytest.raises(SystemExit):
        top.main(["--once", "--api-key-env", "NO_SUCH_VARIABLE"])


def test_an_engine_without_weight_sync_says_so() -> None:
    with served(None) as url:
        (answer,) = top.ask_all([url], None)
    assert answer.problem is not None
    assert "--enable-rdt-weight-sync" in answer.problem
    assert answer.exit_code == 2


def test_live_shows_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three polls of the live view; the engine is torn between the first and the second."""
    fleet, shown = fleet_after("sync"), []

    class Screen:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> Screen:
            return self

        def __exit__(self, *_: object) -> None: ...
        def update(self, content: Any, *, refresh: bool) -> None:
            console = Console(file=io.StringIO(), width=80)
            console.print(content)
            shown.append(console.file.getvalue())  # type: ignore[attr-defined]
            fleet.fence.machine.torn_reason = "by hand"
            if len(shown) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(top, "Live", Screen)
    with served(fleet) as url:
        assert top.main([url, "--interval", "0.01"]) == 0
    assert ["by hand" in text for text in shown] == [False, True, True]
