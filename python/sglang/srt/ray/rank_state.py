"""What one rank's scheduler is doing, read from the scheduler itself.

Flags that a server keeps beside the engine go wrong as soon as somebody else changes the engine; these answers come
from the process that generates. Read on another thread than the event loop's, so numbers may be one batch old.
"""

from __future__ import annotations

from typing import Any


def rank_state(scheduler: Any) -> dict[str, Any]:
    """JSON values: `paused`, `asleep` (released memory tags), `running` and `waiting` requests, `session_open`."""
    return {
        "paused": bool(scheduler._engine_paused),
        "asleep": sorted(scheduler.weight_updater.offload_tags),
        "running": len(scheduler.running_batch.reqs),
        "waiting": len(scheduler.waiting_queue),
        "session_open": scheduler.weight_updater._session is not None,
    }
