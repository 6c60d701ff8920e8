"""The load of the release test: concurrent streams and multi-turn sessions, each request with a deadline.

Every stream and session runs on a thread of its own until it is told to stop. What is noted is what the assertions
need: seconds, endings, replicas and versions.
"""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from typing import Any

import requests

REQUEST_DEADLINE_S = 120.0


@dataclasses.dataclass(kw_only=True)
class Notes:
    """What all threads saw. Appended to under the lock of the interpreter alone: lists only grow."""

    stream_seconds: list[float] = dataclasses.field(default_factory=list)
    turn_seconds: list[float] = dataclasses.field(default_factory=list)
    endings: dict[str, int] = dataclasses.field(default_factory=dict)
    stuck: list[str] = dataclasses.field(default_factory=list)
    """Requests that had not ended by their deadline."""
    errors: list[str] = dataclasses.field(default_factory=list)
    spills: list[str] = dataclasses.field(default_factory=list)
    """Turns that another replica answered than the session's, or that were told so."""
    versions: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """Session -> the version of each of its answers, in order."""
    cached_tokens: int = 0


class Load:
    """`with Load(url, streams=64, sessions=16) as load: ...; load.notes`."""

    def __init__(self, url: str, *, streams: int, sessions: int, tokens: int = 24) -> None:
        self.notes = Notes()
        self._url = url
        self._tokens = tokens
        self._stop = threading.Event()
        self._lock = threading.Lock()
        jobs = [(self._stream, n) for n in range(streams)]
        jobs += [(self._session, n) for n in range(sessions)]
        self._threads = [threading.Thread(target=job, args=(n,), daemon=True) for job, n in jobs]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        deadline = time.monotonic() + REQUEST_DEADLINE_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                self.notes.stuck.append(thread.name)

    def _body(self, prompt: list[int], *, stream: bool) -> dict[str, Any]:
        sampling = {"max_new_tokens": self._tokens, "temperature": 1.0, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": sampling, "stream": stream}

    def _ended(self, how: str) -> None:
        with self._lock:
            self.notes.endings[how] = self.notes.endings.get(how, 0) + 1

    def _stream(self, number: int) -> None:
        draw = random.Random(number)
        while not self._stop.is_set():
            prompt = [draw.randrange(5, 500) for _ in range(12)]
            started = time.monotonic()
            last = b"{}"
            try:
                with requests.post(
                    f"{self._url}/generate",
                    json=self._body(prompt, stream=True),
                    stream=True,
                    timeout=REQUEST_DEADLINE_S,
                ) as answer:
                    for line in answer.iter_lines():
                        if line.startswith(b"data: {"):
                            last = line.removeprefix(b"data: ")
                meta = json.loads(last).get("meta_info")
            except requests.Timeout:
                self.notes.stuck.append(f"stream {number}")
                continue
            except requests.RequestException as error:
                self.notes.errors.append(repr(error))
                continue
            if meta is None:
                self.notes.errors.append(f"stream {number} ended with {last[:300]!r}")
                continue
            self._ended(meta["finish_reason"]["type"])
            self.notes.stream_seconds.append(time.monotonic() - started)

    def _session(self, number: int) -> None:
        draw = random.Random(10_000 + number)
        while not self._stop.is_set():
            opened = requests.post(f"{self._url}/sessions", timeout=REQUEST_DEADLINE_S).json()
            prompt = [draw.randrange(5, 500) for _ in range(12)]
            versions = self.notes.versions.setdefault(opened["session_id"], [])
            for _ in range(6):
                if self._stop.is_set():
                    break
                prompt = self._turn(opened, prompt, versions)
            requests.delete(
                f"{self._url}/sessions/{opened['session_id']}", timeout=REQUEST_DEADLINE_S
            )

    def _turn(self, opened: dict[str, Any], prompt: list[int], versions: list[int]) -> list[int]:
        started = time.monotonic()
        try:
            answer = requests.post(
                f"{self._url}/generate",
                json=self._body(prompt, stream=False) | {"return_logprob": True},
                headers={"x-session-id": opened["session_id"]},
                timeout=REQUEST_DEADLINE_S,
            )
        except requests.Timeout:
            self.notes.stuck.append(opened["session_id"])
            return prompt
        if not answer.ok or answer.headers["x-sglang-replica"] != opened["replica"]:
            self.notes.spills.append(f"{answer.status_code}: {answer.text[:200]}")
            return prompt
        meta = answer.json()["meta_info"]
        self._ended(meta["finish_reason"]["type"])
        self.notes.turn_seconds.append(time.monotonic() - started)
        if meta["finish_reason"]["type"] == "abort":
            return prompt
        self.notes.cached_tokens += meta["cached_tokens"]
        version = meta["weight_version"]
        versions.append(int(version) if version.isdecimal() else -1)
        return [*prompt, *(token for _, token, *_ in meta["output_token_logprobs"])]
