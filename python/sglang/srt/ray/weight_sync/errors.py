"""Typed errors of a weight sync, each naming the engine, rank, tensor and phase that it concerns.

A caller tells kinds apart by class, never by parsing text. All of them survive a trip through Ray (plain exceptions
with keyword arguments do not unpickle), where they arrive as an instance of their own class and of `RayTaskError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLACES = ("engine", "rank", "tensor", "phase")
"""What an error may say of where it happened."""


class WeightSyncError(RuntimeError):
    """A weight sync could not go on. `engine`, `rank`, `tensor` and `phase` are None where they don't apply."""

    def __init__(
        self,
        message: str,
        *,
        engine: str | None = None,
        rank: int | None = None,
        tensor: str | None = None,
        phase: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.engine = engine
        self.rank = rank
        self.tensor = tensor
        self.phase = phase

    def __str__(self) -> str:
        where = [
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if name in PLACES and value is not None
        ]
        return f"{self.message} [{', '.join(where)}]" if where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, places_of(self))


def _rebuild(kind: type[WeightSyncError], message: str, places: dict[str, Any]) -> WeightSyncError:
    return kind(message, **places)


def places_of(error: WeightSyncError) -> dict[str, Any]:
    """Where it happened, by the names of `PLACES`; None where one doesn't apply."""
    # An error that Ray has wrapped is of our class too, but may lack what our constructor sets.
    return {name: getattr(error, name, None) for name in PLACES}


def retold(told: Mapping[str, Any], *, engine: str) -> WeightSyncError:
    """An engine's own error again, from its class name (`type`), its `message` and its places.

    Called in the trainer. `engine` is the name that the trainer knows it by. A class that is not one of this file
    becomes an `EngineRequestError`.

    Raises:
        KeyError: `told` has no `type` or no `message`.
    """
    kind = globals().get(str(told["type"]))
    if not (isinstance(kind, type) and issubclass(kind, WeightSyncError)):
        kind = EngineRequestError
    places = {name: told.get(name) for name in PLACES} | {"engine": engine}
    error: WeightSyncError = kind(str(told["message"]), **places)
    return error


class WeightSyncDisabledError(WeightSyncError):
    """The engine was started without `--enable-rdt-weight-sync`."""


class EngineWithoutActorsError(WeightSyncError):
    """The engine's ranks are no Ray actors, so object refs can't reach them."""


class SessionNotOpenError(WeightSyncError):
    """Bytes may land only between `begin_weight_update` and `end_weight_update`."""


class GenerationNotPausedError(WeightSyncError):
    """Bytes may land only while generation is paused (in any mode)."""


class WeightNameError(WeightSyncError, ValueError):
    """Unknown, duplicate, missing or miscounted tensor names. Nothing was written."""


class UnplannableModelError(WeightSyncError):
    """The engine's loader computes with the weights, so bytes can't be placed for it. Nothing was written."""


class WeightMismatchError(WeightSyncError, ValueError):
    """A source tensor's shape or dtype differs from its target's. Nothing was written."""


class TransferError(WeightSyncError):
    """The transport failed, or delivered elsewhere than into the target. The targets must be taken as torn."""


class DigestMismatchError(WeightSyncError):
    """Bytes arrived that differ from those that were sent. The targets must be taken as torn."""


class TransactionError(WeightSyncError):
    """A transaction can't be what the caller takes it for."""


class StaleTransactionError(TransactionError):
    """A late or superseded transaction: something newer was seen."""


class TransactionBusyError(TransactionError):
    """Another owner's transaction is open."""


class UnknownTransactionError(TransactionError):
    """No such transaction is open: it failed, expired, or was taken over."""


class EngineTornError(WeightSyncError):
    """The engine's weights are (or may be) partly written: it serves nothing until a complete sync or a reload."""


class ReadInFlightError(WeightSyncError):
    """A read that was given up may still write into parameters; the message says which rank to restart."""


class SlowLaneError(WeightSyncError):
    """The path from trainer to rank is slower than its floor; the message names the lane and what degrades it."""


class EngineRequestError(WeightSyncError):
    """The engine answered a control request with an error; its text is in the message."""


class DeadlineExceededError(WeightSyncError, TimeoutError):
    """A wait ended without an answer; the message names who was waited for and how long."""
