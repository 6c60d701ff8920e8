"""The last syncs of one engine, kept in memory for people to look at: what came, from whom, how it ended, what it cost.

The metrics (`weight_metrics.py`) add up and forget; this remembers each sync and forgets the oldest. The fence writes,
`GET /weight_sync/overview` reads; nothing decides by it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.ray.weight_sync.ledger import PullReport, RankStatus
from sglang.srt.ray.weight_sync.states import Transaction

KEPT = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncRecord:
    """One sync that ended. Seconds, bytes; times are seconds since 1970 by the engine's clock."""

    transaction: str
    owner: str
    from_version: str
    version: str | None
    """What it was to bring; None for a client that drives its own session."""
    outcome: str
    """`committed`, `unverified`, `aborted`, `torn`, or `reloaded` (weights from disk)."""
    reason: str | None
    """Why it did not come through."""
    started_at: float
    ended_at: float
    pause_seconds: float
    step_seconds: Mapping[str, float]
    """The engine's own steps, and `copy`, `wire` and `verify` of the slowest rank as far as generation stood still."""
    total_bytes: int
    gigabytes_per_second: float | None
    """All bytes over the slowest rank's transfer, in 1e9 bytes per second; None when no rank reported."""
    ranks: Sequence[PullReport]


class SyncHistory:
    """Written and read on the fence's event loop."""

    def __init__(self) -> None:
        self._records: deque[SyncRecord] = deque(maxlen=KEPT)
        self._open: tuple[Transaction, str, float] | None = None

    def began(self, transaction: Transaction, from_version: str) -> None:
        self._open = (transaction, from_version, time.time())

    def ended(
        self,
        outcome: str,
        *,
        reason: str | None,
        step_seconds: Mapping[str, float],
        pause_seconds: float,
        ranks: Sequence[RankStatus],
    ) -> None:
        """The sync that began last has ended. A second end of one sync changes nothing."""
        if self._open is None:
            return
        (transaction, from_version, started_at), self._open = self._open, None
        reports = [status.report for status in ranks if status.report is not None]
        wire = max((report.wire_seconds for report in reports), default=0.0)
        total = sum(report.total_bytes for report in reports)
        steps = dict(step_seconds)
        if reports:
            steps |= {
                "wire": max(each.wire_seconds - each.early_wire_seconds for each in reports),
                "verify": max(each.verify_seconds - each.early_verify_seconds for each in reports),
            }
            if copied := max(each.copy_seconds for each in reports):
                steps["copy"] = copied
        self._records.append(
            SyncRecord(
                transaction=transaction.id,
                owner=transaction.owner,
                from_version=from_version,
                version=transaction.version,
                outcome=outcome,
                reason=reason,
                started_at=started_at,
                ended_at=time.time(),
                pause_seconds=pause_seconds,
                step_seconds=steps,
                total_bytes=total,
                gigabytes_per_second=total / wire / 1e9 if wire > 0 else None,
                ranks=reports,
            )
        )

    def reloaded(self, from_version: str, version: str) -> None:
        """All weights came from disk; an open sync is forgotten."""
        now = time.time()
        self._open = None
        self._records.append(
            SyncRecord(
                transaction="",
                owner="update_weights_from_disk",
                from_version=from_version,
                version=version,
                outcome="reloaded",
                reason=None,
                started_at=now,
                ended_at=now,
                pause_seconds=0.0,
                step_seconds={},
                total_bytes=0,
                gigabytes_per_second=None,
                ranks=(),
            )
        )

    def as_json(self) -> list[dict[str, Any]]:
        """Newest first, plain JSON values."""
        return [dataclasses.asdict(record) for record in reversed(self._records)]


def describe_rank(rank: int, answer: RankStatus | Exception) -> dict[str, Any]:
    """One rank as the overview shows it: a word for its state and, where there is one, the reason.

    Args:
        answer: what it said of itself just now, or why it could not be asked.
    """
    if isinstance(answer, Exception):
        return {"rank": rank, "state": "SILENT", "reason": str(answer)}
    if answer.in_flight:
        state = "READ GIVEN UP"  # an abandoned read may still write
    elif answer.failure is not None:
        state = "FAILED"
    elif answer.session_open:
        state = "RECEIVING"
    elif answer.report is not None:
        state = "VERIFIED" if answer.report.verified else "UNVERIFIED"
    elif answer.written:
        state = "WRITTEN"
    else:
        state = "UNTOUCHED"
    fields = dataclasses.asdict(answer)
    return {
        "rank": rank,
        "state": state,
        "reason": answer.failure,
        "last_pull": fields["report"],
    } | {name: fields[name] for name in ("transaction", "tensors_written", "tensors_total")}
