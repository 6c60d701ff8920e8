"""Which weights the fleet has published, and who may serve: pure book-keeping over the transactions that pass by.

A publisher's calls to single replicas go through `fleet.py`, so it sees each transaction begin, commit or fail. From
that follows whether a newcomer holds what the others serve (F20), and which replicas a publisher doesn't know of.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedWeights:
    """The last transaction that any replica resumed with."""

    version: str
    sequence: int


@dataclasses.dataclass(kw_only=True)
class _Open:
    version: str
    sequence: int
    expires_at: float
    replicas: set[str]


class Publication:
    """One event loop owns it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self.published: PublishedWeights | None = None
        self.generation = 0
        """Grows with every transaction that begins: weights read before and after it may differ."""

    def opened(
        self, transaction: str, replica: str, *, version: str, sequence: int, ttl_s: float
    ) -> None:
        """A replica was asked to open it (whatever it answers)."""
        if transaction not in self._open:
            self.generation += 1
            self._open[transaction] = _Open(
                version=version,
                sequence=sequence,
                expires_at=self._clock() + ttl_s,
                replicas=set(),
            )
        self._open[transaction].replicas.add(replica)

    def covers(self, transaction: str) -> set[str]:
        """The replicas that were asked to open it."""
        return set(self._open[transaction].replicas) if transaction in self._open else set()

    def committed(self, transaction: str) -> None:
        """A replica serves it: from now on it is what all have to serve."""
        if (held := self._open.pop(transaction, None)) is not None:
            self.remember(PublishedWeights(version=held.version, sequence=held.sequence))

    def aborted(self, transaction: str) -> None:
        self._open.pop(transaction, None)

    def remember(self, weights: PublishedWeights) -> None:
        """Take over what a serving replica holds, when it is newer than what is known."""
        if self.published is None or weights.sequence > self.published.sequence:
            self.published = weights

    @property
    def in_progress(self) -> bool:
        """Whether a transaction is open. One whose owner let its time pass counts as given up."""
        now = self._clock()
        self._open = {key: held for key, held in self._open.items() if held.expires_at > now}
        return bool(self._open)

    def may_serve(self, version: str, generation: int) -> bool:
        """Whether a newcomer that holds `version`, brought to it within `generation`, may serve now."""
        if self.in_progress or generation != self.generation:
            return False
        return self.published is None or version == self.published.version
