"""What a rank remembers of the bytes that landed in it: under which transaction, how far, and whether a read may go on.

The engine's fence decides from these records whether a failed sync left the old weights untouched; so they are written
before the first byte moves, never after. `receiver.py` keeps one ledger per rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.ray.weight_sync.errors import ReadInFlightError, WeightSyncError

if TYPE_CHECKING:
    from sglang.srt.ray.weight_sync.transports import Read


@dataclasses.dataclass(frozen=True, kw_only=True)
class PullReport:
    """What one rank's pull moved and how long it took (seconds, bytes)."""

    rank: int
    total_bytes: int
    wire_seconds: float
    verify_seconds: float
    """Digest time that the wire did not hide: after the last byte had arrived."""
    verified: bool
    early_wire_seconds: float = 0.0
    """The part of `wire_seconds` in which generation went on: into the shadow buffer."""
    early_verify_seconds: float = 0.0
    copy_seconds: float = 0.0
    """From the shadow buffer into the parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank's answer to: what happened to your weights in this transaction?"""

    rank: int
    transaction: str | None
    """The transaction of the last pull; None when it was a client's own verb."""
    session_open: bool
    """Whether the last pull belongs to the weight session that is open now."""
    written: bool
    """Whether bytes may have landed in that transaction (or session)."""
    in_flight: bool
    """Whether a read that was given up may still be writing."""
    failure: str | None
    report: PullReport | None
    """The report of a pull that completed."""
    tensors_written: int
    """Distinct parameters that pulls of that transaction (or session) wrote."""
    tensors_total: int


class SessionBook:
    """The weight sessions of one rank, counted; a session keeps its number however upstream records it."""

    def __init__(self) -> None:
        self._number = 0
        self.pulled = False
        """Whether bytes were pulled in the open session, past the engine's loader."""

    @property
    def key(self) -> Hashable:
        """What the open session's records are filed under."""
        return ("session", self._number)

    def ended(self) -> None:
        self._number += 1
        self.pulled = False


class RankLedger:
    """The record of one rank. Guarded by the receiver's pull lock, except for `status`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._key: Hashable | None = None
        self.transaction: str | None = None
        self.written = False
        self.failure: WeightSyncError | None = None
        self.report: PullReport | None = None
        self.loaded: list[Any] = []
        """What each ref gave that went through the loader, in order."""
        self._tensors: set[str] = set()
        self._failed: set[str] = set()
        self._unfinished: list[Read] = []

    def open(self, key: Hashable, transaction: str | None) -> None:
        """Start a new record unless `key` (a transaction id, or a client's session) has it already.

        Raises:
            ReadInFlightError: an earlier read is not over, so its late bytes could land in the new version.
        """
        self.check_settled()
        if key == self._key:
            return
        self._key, self.transaction = key, transaction
        self.written, self.failure, self.report = False, None, None
        self._tensors, self._failed = set(), set()
        self.loaded = []

    def holds(self, key: Hashable) -> bool:
        return key is not None and key == self._key

    def will_write(self, names: Sequence[str]) -> None:
        """Called right before the first byte may land."""
        self.written = True
        self._tensors.update(names)

    def failed(self, names: Sequence[str], failure: WeightSyncError) -> None:
        self.failure = failure
        self._failed.update(names)

    def succeeded(self, names: Sequence[str]) -> None:
        """These tensors are whole; an earlier failure is forgotten once all that it spoiled was pulled again."""
        self._failed.difference_update(names)
        if not self._failed:
            self.failure = None

    def give_up(self, reads: Sequence[Read]) -> None:
        """Keep reads that did not end in time, until they prove to be over."""
        self._unfinished += [read for read in reads if not read.is_over()]

    def check_settled(self) -> None:
        """Raises:
        ReadInFlightError: a read that was given up is still not over.
        """
        self._unfinished = [read for read in self._unfinished if not read.is_over()]
        if self._unfinished:
            raise ReadInFlightError(
                f"{len(self._unfinished)} read(s) that were given up may still write into rank {self._rank}: try again "
                f"once their source goes on; otherwise end the frozen source process, or restart this rank's engine",
                rank=self._rank,
                phase="begin",
            )

    def status(self, open_session: Hashable | None, tensors_total: int) -> RankStatus:
        """`open_session`: the open session's key."""
        return RankStatus(
            rank=self._rank,
            transaction=self.transaction,
            session_open=open_session is not None and self._key == open_session,
            written=self.written,
            in_flight=bool(self._unfinished),
            failure=None if self.failure is None else str(self.failure),
            report=self.report,
            tensors_written=len(self._tensors),
            tensors_total=tensors_total,
        )
