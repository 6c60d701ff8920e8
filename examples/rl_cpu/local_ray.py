"""Owning a Ray: start a small local one, or join the user's, and leave nothing of ours behind.

A cluster named by ``RAY_ADDRESS`` is joined and left running.  Otherwise a local Ray of two CPUs is
started; on leaving, it is shut down, and every process that had descended from this one is waited
for, then ended by its own id and named.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from interrupts import interrupts_deferred

LOCAL_RAY = {
    "address": "local",  # not one that happens to run on this machine
    "num_cpus": 2,
    "object_store_memory": 256 << 20,
    "include_dashboard": False,
}
EXIT_TIMEOUT_SECONDS = 15.0


@contextmanager
def ray_session(*, stream_logs: bool) -> Iterator[Path]:
    """Yield the session's directory, whose ``logs`` hold what the actors print."""
    joined = os.environ.get("RAY_ADDRESS", "local") not in ("", "local")
    try:
        with interrupts_deferred():
            ray.init(log_to_driver=stream_logs, **({} if joined else LOCAL_RAY))
        # Ray 2.60 has no public name for it.
        yield Path(ray._private.worker._global_node.get_session_dir_path())
    finally:
        descendants = [] if joined else psutil.Process().children(recursive=True)
        ray.shutdown()
        _wait_for_exit(descendants)


def wait_for(ref: Any, *, seconds: float, what: str) -> Any:
    """``ray.get`` with a deadline whose error says what was waited for."""
    try:
        return ray.get(ref, timeout=seconds)
    except ray.exceptions.GetTimeoutError as e:
        raise TimeoutError(
            f"{what} did not finish within {seconds!r} s; see the actors' logs, or use --verbose"
        ) from e


def _wait_for_exit(processes: list[psutil.Process]) -> None:
    """Ray asks its processes to leave; those that stay are killed here, one by one, and named."""
    _, left = psutil.wait_procs(processes, timeout=EXIT_TIMEOUT_SECONDS)
    names = [f"{process.pid} {_kill(process)}" for process in left]
    if names:
        raise RuntimeError(
            f"{len(names)!r} processes were still there {EXIT_TIMEOUT_SECONDS!r} s after Ray's "
            f"shutdown and were killed: {names!r}; this is a fault of the engine's shutdown"
        )


def _kill(process: psutil.Process) -> str:
    try:
        name = process.name()
        process.kill()
    except psutil.NoSuchProcess:
        return "(gone by itself)"
    return name
