"""Steady requests to a Serve application, each kept with the version that was published when it was sent.

`judge` then holds the answers against Hugging Face's own forward of the weights that each claims to be made of: an
answer of other weights, or of a version older than what was published when the request was sent, is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import requests

from .models import new_model
from .oracle import GAP, Generation, gap
from .serve_app import ServedApp

PROMPT = (5, 6, 7, 8)
LENGTH = 4
PAUSE_BETWEEN_S = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answered:
    """One request that was answered in full."""

    floor: int
    """What was published on every replica when it was sent."""
    answer: Generation


class Load:
    """Threads that ask one request after the other, until `stop`."""

    def __init__(self, app: ServedApp, published: Callable[[], int], *, threads: int) -> None:
        self._app = app
        self._published = published
        self._stopped = threading.Event()
        self.answered: list[Answered] = []
        self.refused: list[str] = []
        """Answers with an error status."""
        self.broken: list[str] = []
        """Requests that got no answer at all."""
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def by(self, replica: str) -> list[Answered]:
        return [each for each in self.answered if each.answer.replica == replica]

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(150)
            assert not thread.is_alive(), "a request has not ended"

    def _ask(self) -> None:
        while not self._stopped.wait(PAUSE_BETWEEN_S):
            floor = self._published()
            try:
                answer = self._app.generate(PROMPT, LENGTH)
            except AssertionError as refusal:
                self.refused.append(str(refusal))
            except requests.RequestException as error:
                self.broken.append(repr(error))
            else:
                self.answered.append(Answered(floor=floor, answer=answer))


@functools.lru_cache(maxsize=8)
def weights(version: int) -> Any:
    """The model of that version: its number is its seed."""
    return new_model(version)


def judge(answered: Sequence[Answered]) -> int:
    """How many were right; raises at the first that was not.

    An answer that a sync interrupted is of two versions, which no single model can be the oracle of: it is skipped, and
    not counted.
    """
    right = 0
    for each in answered:
        version = int(each.answer.version)
        assert version >= each.floor, each
        if gap(weights(version), PROMPT, each.answer) < GAP:
            right += 1
            continue
        spans = each.answer.spans
        assert len(spans) > 1, (each, gap(weights(version), PROMPT, each.answer))
    return right
