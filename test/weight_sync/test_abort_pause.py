"""A pause in mode `abort` takes as long as its requests take to end, not upstream's second between two looks."""

from __future__ import annotations

import threading
import time

from support.engine import RunningEngine
from support.oracle import Generation

UPSTREAMS_WAIT_S = 1.0
REQUESTS = 4


def paused_in(engine: RunningEngine) -> tuple[float, list[Generation]]:
    """How long the pause took while requests ran, and what they got."""
    answers: list[Generation] = []

    def ask() -> None:
        answers.append(engine.generate([5, 6, 7], 3000))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(REQUESTS)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while engine.ask("engine_state")["running"] < REQUESTS:
        assert time.monotonic() < deadline, engine.ask("engine_state")
        time.sleep(0.02)
    started = time.monotonic()
    engine.post("pause_generation", {"mode": "abort"}).raise_for_status()
    seconds = time.monotonic() - started
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a request is stuck"
    engine.post("continue_generation", {"torch_empty_cache": False}).raise_for_status()
    return seconds, answers


def test_it_ends_running_requests_and_returns_at_once(shared_engine: RunningEngine):
    seconds = []
    for _ in range(3):
        took, answers = paused_in(shared_engine)
        seconds.append(took)
        assert {answer.finish for answer in answers} == {"abort"}
        assert len(answers) == REQUESTS
    assert min(seconds) < UPSTREAMS_WAIT_S / 2, seconds
    assert shared_engine.generate([5, 6, 7], 4).finish == "length"
