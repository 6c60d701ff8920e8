"""`python -m sglang.srt.ray.weight_sync.top [URL ...]`: what the weights of a fleet are doing, live, in a terminal.

It asks `GET /weight_sync/overview` of each engine and needs neither Ray nor a browser, so it works over ssh. `--once`
prints one table and ends, `--json` prints one JSON object a poll; the page `GET /weight_sync/ui` shows one engine in
more detail.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import requests
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

DEFAULT_URL = "http://127.0.0.1:30000"
ANSWER_TIMEOUT_S = 5.0
EXIT_ALL_SERVE, EXIT_UNHEALTHY, EXIT_UNREACHABLE = 0, 1, 2
_PHASES = ("pause", "begin", "wire", "verify", "end", "flush", "version")
_COLOURS = {"SERVING": "green", "VERIFIED": "green", "committed": "green", "UNTOUCHED": "green"}
_BAD_RANK = ("SILENT", "FAILED", "READ GIVEN UP")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What one engine said, or why it said nothing."""

    url: str
    told: Mapping[str, Any] | None
    """The body of `GET /weight_sync/overview`."""
    problem: str | None

    @property
    def exit_code(self) -> int:
        if self.told is None:
            return EXIT_UNREACHABLE
        bad = any(rank["state"] in _BAD_RANK for rank in self.told["ranks"])
        return EXIT_UNHEALTHY if bad or self.told["state"] == "TORN" else EXIT_ALL_SERVE


def ask(url: str, api_key: str | None) -> Answer:
    """One poll of one engine; a silence of 5 s is an answer too."""
    url = url.rstrip("/")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    with requests.Session() as session:
        session.trust_env = (
            False  # engines are inside the cluster: a proxy for the outside is not asked
        )
        try:
            answer = session.get(
                f"{url}/weight_sync/overview", headers=headers, timeout=ANSWER_TIMEOUT_S
            )
        except requests.RequestException as error:
            return Answer(url=url, told=None, problem=f"no answer: {error}")
    if answer.status_code == requests.codes.ok:
        return Answer(url=url, told=answer.json(), problem=None)
    if answer.status_code == requests.codes.unauthorized:
        return Answer(url=url, told=None, problem="it asks for its API key: see --api-key-env")
    return Answer(url=url, told=None, problem=f"status {answer.status_code}: {_text_of(answer)}")


def _text_of(answer: requests.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text.strip()[:200]


def ask_all(urls: Sequence[str], api_key: str | None) -> list[Answer]:
    """All engines at once, in the order given."""
    with concurrent.futures.ThreadPoolExecutor(len(urls)) as pool:
        return list(pool.map(lambda url: ask(url, api_key), urls))


def as_json(answers: Sequence[Answer]) -> str:
    """One line: time of the poll and each engine's answer."""
    engines = {answer.url: answer.told or {"problem": answer.problem} for answer in answers}
    return json.dumps({"time": time.time(), "engines": engines})


def rendered(answers: Sequence[Answer]) -> RenderableType:
    """Engines, their ranks, and what the last sync of each cost; fits 80 columns."""
    parts: list[RenderableType] = [_engines(answers)]
    if any(answer.told for answer in answers):
        parts += [_ranks(answers), _last_syncs(answers)]
    for answer in answers:
        if answer.problem is not None:
            parts.append(Text(f"{answer.url}: {answer.problem}", style="red"))
        elif answer.told is not None and answer.told["torn_reason"]:
            parts.append(Text(f"{answer.url} is TORN: {answer.told['torn_reason']}", style="red"))
    return Group(*parts)


def _table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _word(word: str) -> Text:
    bad = word in (*_BAD_RANK, "TORN", "torn")
    return Text(word, style=_COLOURS.get(word, "red" if bad else "yellow"))


def _engines(answers: Sequence[Answer]) -> Table:
    table = _table("engines", "#", "engine", "state", "version", "owner")
    for number, answer in enumerate(answers, 1):
        name = Text(answer.url.partition("://")[2] or answer.url)
        if (told := answer.told) is None:
            table.add_row(str(number), name, _word("SILENT"))
            continue
        version, owner = Text(told["version"]), Text("-")
        if (held := told["transaction"]) is not None:
            version.append(f" -> {held['version'] or '(unlabelled)'}")
            owner = Text(f"{held['owner']} ({told['expires_in_s']:.0f} s left)")
        elif told["history"]:
            owner = Text(f"last: {told['history'][0]['owner']}")
        table.add_row(str(number), name, _word(told["state"]), version, owner)
    return table


def _last_syncs(answers: Sequence[Answer]) -> Table:
    names = (*_PHASES, "paused", "GB/s")
    table = _table("last sync, ms by phase", "#", "outcome", numbers=names)
    for number, answer in enumerate(answers, 1):
        if answer.told is None or not answer.told["history"]:
            continue
        last = answer.told["history"][0]
        speed = last["gigabytes_per_second"]
        table.add_row(
            str(number),
            _word(last["outcome"]),
            *(_milliseconds(last["step_seconds"].get(phase)) for phase in _PHASES),
            _milliseconds(last["pause_seconds"]),
            "-" if speed is None else f"{speed:.2f}",
        )
    return table


def _milliseconds(seconds: float | None) -> Text:
    return Text("-" if seconds is None else f"{seconds * 1e3:.1f}")


def _ranks(answers: Sequence[Answer]) -> Table:
    table = _table("ranks", "#", "rank", "state", "tensors", "MB", "GB/s", "reason")
    for number, answer in enumerate(answers, 1):
        for rank in () if answer.told is None else answer.told["ranks"]:
            table.add_row(str(number), *_rank_cells(rank))
    return table


def _rank_cells(rank: Mapping[str, Any]) -> list[RenderableType]:
    cells: list[RenderableType] = [str(rank["rank"]), _word(rank["state"])]
    pull = rank.get("last_pull")
    tensors = "-"
    if "tensors_total" in rank:
        tensors = f"{rank['tensors_written']} of {rank['tensors_total']}"
    cells.append(tensors)
    if pull is None:
        cells += ["-", "-"]
    else:
        seconds = pull["wire_seconds"]
        cells.append(f"{pull['total_bytes'] / 1e6:.1f}")
        cells.append(f"{pull['total_bytes'] / seconds / 1e9:.2f}" if seconds > 0 else "-")
    cells.append(Text(rank["reason"] or ""))
    return cells


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sglang.srt.ray.weight_sync.top",
        description="Watch the weights of engines that were started with --enable-rdt-weight-sync.",
        epilog="With --once the exit status is 0 when all serve, 1 when an engine is TORN or a rank failed or is "
        "silent, 2 when an engine does not answer.",
    )
    parser.add_argument("url", nargs="*", default=[DEFAULT_URL], help=f"default {DEFAULT_URL}")
    parser.add_argument("--once", action="store_true", help="print once and end")
    parser.add_argument("--json", action="store_true", help="one JSON object a poll")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between polls")
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="environment variable that holds the engines' admin key (or API key)",
    )
    options = parser.parse_args(arguments)
    if options.interval <= 0:
        parser.error(f"--interval must be positive, got {options.interval!r}")
    if options.api_key_env is not None and options.api_key_env not in os.environ:
        parser.error(f"--api-key-env: there is no variable {options.api_key_env!r}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Poll until interrupted, or once."""
    options = options_from(arguments)
    api_key = os.environ[options.api_key_env] if options.api_key_env else None
    if options.once:
        answers = ask_all(options.url, api_key)
        if options.json:
            print(as_json(answers))
        else:
            Console().print(rendered(answers))
        return max(answer.exit_code for answer in answers)
    try:
        _watch(options, api_key)
    except KeyboardInterrupt:
        return 0  # how one ends it


def _watch(options: argparse.Namespace, api_key: str | None) -> NoReturn:
    if options.json:
        while True:
            print(as_json(ask_all(options.url, api_key)), flush=True)
            time.sleep(options.interval)
    with Live(Text("asking ..."), screen=True, auto_refresh=False) as live:
        while True:
            live.update(rendered(ask_all(options.url, api_key)), refresh=True)
            time.sleep(options.interval)


if __name__ == "__main__":
    sys.exit(main())
