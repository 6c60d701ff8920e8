"""Ctrl-C, SIGTERM and SIGHUP end the run once, in order.

The first of them raises ``KeyboardInterrupt`` in the main thread, so every ``with`` block ends what
it started; later ones are ignored, because each step of the ending has its own deadline and cutting
it short is what leaves processes behind.
"""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt_once() -> None:
    """Install the handlers; call it again after ``ray.init``, which sets its own for SIGTERM."""
    for number in SIGNALS:
        signal.signal(number, _raise_and_ignore_the_rest)


def ignore_interrupts() -> None:
    """For an ending that has begun."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _raise_and_ignore_the_rest(number: int, frame: FrameType | None) -> None:
    ignore_interrupts()
    raise KeyboardInterrupt(signal.Signals(number).name)
