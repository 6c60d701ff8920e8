"""The states of one engine's weights, as a pure machine: no clock, no network, no torch.

```
SERVING(v) --open--> SYNCING(v -> w) --seal--> SYNCING, sealed --resume--> SERVING(w)
                        |  fail, nothing written --> SERVING(v)
                        |  fail, bytes written ----> TORN(v -> w)
TORN --open--> SYNCING (any failure: TORN again)      TORN --reload from disk--> SERVING(x)
```
Whoever owns the machine (the engine's `weight_fence`) performs the effects; tests and the fault table of the
documentation walk this very code. Every call names its transaction, and a repeated call changes nothing.
"""

from __future__ import annotations

import dataclasses
import enum

from sglang.srt.ray.weight_sync.errors import (
    EngineTornError,
    StaleTransactionError,
    TransactionBusyError,
    UnknownTransactionError,
)


class WeightState(enum.StrEnum):
    """What an engine does with its weights."""

    SERVING = "SERVING"
    SYNCING = "SYNCING"
    TORN = "TORN"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transaction:
    """One attempt to bring one engine to one version."""

    id: str
    sequence: int
    """Counts the transactions of a fleet: a lower or equal number never follows a higher one."""
    owner: str
    """Who drives: told to whoever finds the engine busy."""
    version: str | None
    """The label to serve under; None leaves the label alone (a client's own verbs)."""
    own: bool = False
    """Made in the engine's own process (a transfer from a peer): never late, so a sequence may be tried again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commitment:
    """The last transaction that was served."""

    id: str
    verified: bool


class WeightStateMachine:
    """State, version and open transaction of one engine. Not thread-safe: one event loop owns it."""

    def __init__(self, version: str) -> None:
        self.state = WeightState.SERVING
        self.version = version
        self.open_transaction: Transaction | None = None
        self.sealed = False
        self.torn_reason: str | None = None
        self.last_commitment: Commitment | None = None
        self.last_sequence = 0

    def open(self, transaction: Transaction) -> bool:
        """SERVING or TORN -> SYNCING. Returns False when this transaction is open already.

        Raises:
            StaleTransactionError: a later transaction was seen, or the version is older than what is served.
            TransactionBusyError: another transaction is open; fail it first.
        """
        if self.open_transaction == transaction:
            return False
        labelled = transaction.version is not None
        least = self.last_sequence + (0 if transaction.own else 1)
        if labelled and transaction.sequence < least:
            raise StaleTransactionError(
                f"transaction {transaction.id!r} of {transaction.owner!r} has sequence {transaction.sequence}, but "
                f"{self.last_sequence} was seen: it is late, or another owner took over; connect again to take over "
                f"in turn"
            )
        if self.open_transaction is not None:
            held = self.open_transaction
            raise TransactionBusyError(
                f"{held.owner!r} is bringing this engine to version {held.version!r} (transaction {held.id!r}); "
                f"wait, or take over with force"
            )
        if self.state is WeightState.SERVING and _is_older(transaction.version, self.version):
            raise StaleTransactionError(
                f"version {transaction.version!r} is older than the served {self.version!r}; an older version never "
                f"replaces a newer one"
            )
        self.open_transaction, self.sealed = transaction, False
        if labelled:  # a client's own session makes no publisher late
            self.last_sequence = transaction.sequence
        self.state = WeightState.SYNCING
        return True

    def seal(self, transaction_id: str) -> bool:
        """All ranks hold the new weights, proved. Returns False when that was known already."""
        if self._already_committed(transaction_id):
            return False
        self._held(transaction_id)
        changed, self.sealed = not self.sealed, True
        return changed

    def resume(self, transaction_id: str, *, verified: bool) -> bool:
        """SYNCING, sealed -> SERVING(w). Returns False when this transaction is served already."""
        if self._already_committed(transaction_id):
            return False
        held = self._held(transaction_id)
        if not self.sealed:
            raise EngineTornError(
                f"transaction {transaction_id!r} is not sealed: not every rank has proved version {held.version!r}"
            )
        if held.version is not None:
            self.version = held.version
        self.last_commitment = Commitment(id=held.id, verified=verified)
        self.open_transaction, self.sealed, self.torn_reason = None, False, None
        self.state = WeightState.SERVING
        return True

    def fail(self, transaction_id: str, *, reason: str, written: bool) -> WeightState:
        """SYNCING -> SERVING(v) if no byte landed (and none was torn before), TORN otherwise."""
        held = self._held(transaction_id)
        if written or self.torn_reason is not None:
            self.torn_reason = (
                f"{reason} ({self.version!r} -> {held.version!r}, transaction {held.id!r})"
            )
            self.state = WeightState.TORN
        else:
            self.state = WeightState.SERVING
        self.open_transaction, self.sealed = None, False
        return self.state

    def reload(self, version: str | None) -> None:
        """Any state -> SERVING: all weights were loaded from disk. An open transaction is forgotten."""
        if version is not None:
            self.version = version
        self.open_transaction, self.sealed, self.torn_reason = None, False, None
        self.state = WeightState.SERVING

    def _already_committed(self, transaction_id: str) -> bool:
        last = self.last_commitment
        return self.open_transaction is None and last is not None and last.id == transaction_id

    def _held(self, transaction_id: str) -> Transaction:
        held = self.open_transaction
        if held is None or held.id != transaction_id:
            raise UnknownTransactionError(
                f"transaction {transaction_id!r} is not open here (state {self.state.value}, open: "
                f"{None if held is None else held.id!r}); it failed, expired, or another owner took over"
            )
        return held


def _is_older(version: str | None, than: str) -> bool:
    """Whether both are numbers and the first is smaller; other labels have no order."""
    return (
        version is not None
        and version.isdecimal()
        and than.isdecimal()
        and int(version) < int(than)
    )
