"""A rank's second buffer: the next weights land and are proved here while the old ones go on serving.

Nothing in here is served. Once the transfer is over and every digest agrees, the engine pauses for one copy into the
parameters, which are written by nobody else; so a transfer may take as long as the lane makes it take, and one that
fails leaves the engine as it was. `receiver.py` reads into it and copies out of it, under its pull lock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.ray.weight_sync import transports
from sglang.srt.ray.weight_sync.errors import (
    ReadInFlightError,
    StaleTransactionError,
    WeightSyncError,
)
from sglang.srt.ray.weight_sync.layout import TensorPiece
from sglang.srt.ray.weight_sync.ledger import PullReport

if TYPE_CHECKING:
    from sglang.srt.ray.weight_sync.transports import Read

_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staged:
    """What one transaction has left in the buffer, proved."""

    pieces: tuple[TensorPiece, ...]
    buffers: tuple[torch.Tensor, ...]
    """In the order of `pieces`."""
    report: PullReport


class ShadowBuffer:
    """Holds what the last transaction staged. Guarded by the receiver's pull lock.

    The memory stays allocated (and pinned) for the next sync until `release` or a sync that needs another amount.
    """

    def __init__(self, rank: int, *, pins_allowed: bool) -> None:
        self._rank = rank
        self._pins_allowed = pins_allowed
        self._memory: torch.Tensor | None = None
        self._transaction: str | None = None
        self._pieces: tuple[TensorPiece, ...] = ()
        self._buffers: tuple[torch.Tensor, ...] = ()
        self._report: PullReport | None = None
        self._failure: WeightSyncError | None = None
        self._unfinished: list[Read] = []

    def answer(self, transaction: str) -> PullReport | None:
        """What a repeated call of `transaction` is answered; None when it has not been here.

        Raises:
            WeightSyncError: what it failed with.
        """
        if transaction != self._transaction:
            return None
        if self._failure is not None:
            raise self._failure
        return self._report

    def open(
        self, transaction: str, pieces: Sequence[TensorPiece], targets: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Make room for these pieces; what another transaction left here is gone.

        Raises:
            ReadInFlightError: an earlier read may still write into the buffer.
        """
        self._check_settled()
        self._transaction, self._report, self._failure = transaction, None, None
        self._pieces = tuple(pieces)
        needed = sum(_aligned(target.nbytes) for target in targets)
        device = targets[0].device
        memory = self._memory
        if memory is None or memory.numel() != needed or memory.device != device:
            self._free()
            memory = self._memory = torch.empty(needed, dtype=torch.uint8, device=device)
            if self._pins_allowed:
                transports.pin(memory)
        self._buffers = tuple(_views(memory, targets))
        return list(self._buffers)

    def give_up(self, reads: Sequence[Read]) -> None:
        """Keep reads that did not end in time, until they prove to be over."""
        self._unfinished += [read for read in reads if not read.is_over()]

    def failed(self, failure: WeightSyncError) -> None:
        self._failure = failure

    def succeeded(self, report: PullReport) -> None:
        self._report = report

    def staged(self, transaction: str) -> Staged:
        """Raises:
        StaleTransactionError: the buffer holds nothing, or not this transaction's weights.
        """
        if transaction != self._transaction or self._report is None:
            raise StaleTransactionError(
                f"transaction {transaction!r} has nothing staged on this rank (last staged: {self._transaction!r}); "
                f"another owner took the buffer, or the transfer failed",
                rank=self._rank,
                phase="copy",
            )
        return Staged(pieces=self._pieces, buffers=self._buffers, report=self._report)

    def release(self) -> int:
        """Give the memory back; returns how many bytes it was.

        Raises:
            ReadInFlightError: an earlier read may still write into the buffer.
        """
        self._check_settled()
        freed = 0 if self._memory is None else self._memory.numel()
        self._transaction, self._report, self._failure = None, None, None
        self._free()
        return freed

    def _free(self) -> None:
        self._buffers = ()
        if self._memory is not None and self._pins_allowed:
            transports.unpin(self._memory)
        self._memory = None

    def _check_settled(self) -> None:
        self._unfinished = [read for read in self._unfinished if not read.is_over()]
        if self._unfinished:
            raise ReadInFlightError(
                f"{len(self._unfinished)} read(s) that were given up may still write into the shadow buffer of rank "
                f"{self._rank}: end the frozen source process, or sync with staging='direct'",
                rank=self._rank,
                phase="prefetch",
            )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _views(memory: torch.Tensor, targets: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    offset = 0
    for target in targets:
        yield memory[offset : offset + target.nbytes].view(target.dtype).view(target.shape)
        offset += _aligned(target.nbytes)
