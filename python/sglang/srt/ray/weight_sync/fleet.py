"""Calls to many engines and ranks at once, each with a deadline, whose failures name the engine and the rank.

The publisher decides what to ask; this file knows how to ask everybody concurrently and how to make one error of many
answers without losing any of them.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray

from sglang.srt.ray.weight_sync.control import EngineControl
from sglang.srt.ray.weight_sync.errors import DeadlineExceededError, WeightSyncError

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankAddress:
    """One receiving rank of one engine."""

    engine: EngineControl
    rank: int
    actor: Any


def on_every_engine(
    engines: Sequence[EngineControl], phase: str, call: Callable[[EngineControl], Answer]
) -> list[Answer]:
    """`call` on all engines concurrently; answers in their order.

    Raises:
        WeightSyncError: the first engine's that failed, with the others' as notes.
    """
    if len(engines) == 1:  # a thread costs more than many a call
        try:
            return [call(engines[0])]
        except Exception as error:
            named = _named(error, engines[0].name, None, phase)
            if named is error:
                raise
            raise named from error
    with concurrent.futures.ThreadPoolExecutor(max_workers=len(engines)) as pool:
        futures = [pool.submit(call, engine) for engine in engines]
    failures = []
    for engine, future in zip(engines, futures, strict=True):
        if (cause := future.exception()) is not None:
            failures.append(_named(cause, engine.name, None, phase))
    _raise_first(failures)
    return [future.result() for future in futures]


def on_every_rank(
    ranks: Sequence[RankAddress],
    verb: str,
    arguments: Sequence[tuple[Any, ...]],
    *,
    timeout_s: float,
    phase: str,
) -> list[Any]:
    """One verb on all ranks concurrently, with each rank's own arguments; answers in their order.

    Raises:
        WeightSyncError: the first rank's that failed or did not answer in time, with the others' as notes.
    """
    refs = [
        getattr(address.actor, verb).remote(*each)
        for address, each in zip(ranks, arguments, strict=True)
    ]
    _, late = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
    answers, failures = [], []
    for address, ref in zip(ranks, refs, strict=True):
        if ref in late:
            late_error = DeadlineExceededError(f"{verb} was not answered within {timeout_s:g} s")
            failures.append(_named(late_error, address.engine.name, address.rank, phase))
            continue
        try:
            answers.append(ray.get(ref))
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            known = (
                cause
                if isinstance(cause, WeightSyncError)
                else WeightSyncError(f"{verb} failed: {error}")
            )
            failures.append(_named(known, address.engine.name, address.rank, phase))
    _raise_first(failures)
    return answers


def abort_everywhere(
    engines: Sequence[EngineControl], transaction: str, cause: BaseException, *, timeout_s: float
) -> None:
    """Tell every engine, one after the other; what it makes of itself (SERVING or TORN) is noted on the error."""
    for engine in engines:
        try:
            state = engine.abort(transaction, str(cause), timeout_s=timeout_s)
            cause.add_note(f"{engine.name}: {state['state']}, version {state['version']!r}")
        except WeightSyncError as error:
            cause.add_note(
                f"{engine.name} could not be told to give up (its time limit will): {error}"
            )


def _named(cause: BaseException, engine: str, rank: int | None, phase: str) -> WeightSyncError:
    error = (
        cause
        if isinstance(cause, WeightSyncError)
        else WeightSyncError(f"{type(cause).__name__}: {cause}")
    )
    error.engine = engine
    error.rank = error.rank if error.rank is not None else rank
    error.phase = error.phase or phase
    return error


def _raise_first(failures: Sequence[WeightSyncError]) -> None:
    if not failures:
        return
    first = failures[0]
    for other in failures[1:]:
        first.add_note(f"also: {other}")
    raise first
