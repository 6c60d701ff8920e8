"""Ctrl-C, SIGTERM and SIGHUP end the run once, in order.

The first of them raises ``KeyboardInterrupt`` in the main thread, so every ``with`` block ends what
it started; later ones are ignored, because each step of the ending has its own deadline and cutting
it short is what leaves processes behind.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_raised: list[signal.Signals] = []


def interrupt_once() -> None:
    """Let the first signal raise."""
    for number in SIGNALS:
        signal.signal(number, _raise_and_ignore_the_rest)


def ignore_interrupts() -> None:
    """For an ending that has begun."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def interrupted_by() -> str:
    """The name of the signal that ended the run; Ray's ``get`` drops what the exception says."""
    return _raised[0].name if _raised else "KeyboardInterrupt"


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let a signal raise only at the end of the block, which must not be cut in two.

    For ``ray.init``: cut short it leaves processes that ``ray.shutdown`` does not know of, and it
    sets a handler of its own for SIGTERM, which this replaces.
    """
    arrived: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        interrupt_once()
    if arrived:
        _raise_and_ignore_the_rest(arrived[0], None)


def _raise_and_ignore_the_rest(number: int, frame: FrameType | None) -> None:
    ignore_interrupts()
    _raised.append(signal.Signals(number))
    raise KeyboardInterrupt
