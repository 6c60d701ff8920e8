"""How a scheduler's paused event loop waits: for its next message where it has a socket, else for a moment.

Upstream's loop spins while generation is paused. The rank that hears the tokenizer can sleep until a message wakes it;
the other ranks of its group wait in the broadcast that hands the message on, and never get here before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_LONGEST_WAIT_MS = 5
"""Upstream does a little between messages (timeouts, statistics); it goes on doing it this often."""
_SHORT_SLEEP_S = 0.0005


def paused_wait(scheduler: Any) -> Callable[[], object]:
    """What to call between two looks at the messages, on the event loop's own thread."""
    channels = getattr(scheduler, "ipc_channels", None)
    sockets = [getattr(channels, name, None) for name in ("recv_from_tokenizer", "recv_from_rpc")]
    if sockets[0] is None or not hasattr(sockets[0], "getsockopt"):
        return lambda: time.sleep(_SHORT_SLEEP_S)
    import zmq

    poller = zmq.Poller()
    for socket in filter(None, sockets):
        poller.register(socket, zmq.POLLIN)
    return lambda: poller.poll(_LONGEST_WAIT_MS)
