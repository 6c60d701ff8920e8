"""Owning a Ray: start a small local one, or join the user's, and leave nothing of ours behind.

A cluster named by ``RAY_ADDRESS`` is joined and left running.  Otherwise a local Ray of two CPUs is
started; on leaving, it is shut down, and every process that had descended from this one is waited
for, then ended by its own id and named.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from interrupts import interrupts_deferred

if TYPE_CHECKING:
    from ray.actor import ActorHandle

LOCAL_RAY = {
    "address": "local",  # not one that happens to run on this machine
    "num_cpus": 2,
    "object_store_memory": 256 << 20,
    "include_dashboard": False,
}
CORE_PROCESSES = ("gcs_server", "raylet")
ALIVE_CHECK_SECONDS = 1.0
EXIT_TIMEOUT_SECONDS = 15.0


class RayGoneError(RuntimeError):
    """The local Ray ended while something was waited for."""


class RaySession:
    """A connected Ray; ``ray_session`` makes it and the driver's main thread uses it."""

    def __init__(self, *, owned: bool) -> None:
        self._owned = owned
        self._seen: set[psutil.Process] = set()
        self._cores = [p for p in self._descendants() if p.name() in CORE_PROCESSES]
        # Ray 2.60 has no public name for it.
        self.log_dir = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"

    def remember_processes(self) -> None:
        """Note what runs now, for ``wait_for_exit``; an orphan can't be found later."""
        self._seen.update(self._descendants())

    def is_alive(self) -> bool:
        """Whether a Ray of our own still has its core.

        A closed terminal or ``timeout`` signals the whole process group, and Ray shields its core
        from Ctrl-C only.  Ray's calls wait a minute for a core that is gone, then end the process.
        """
        return all(_runs(process) for process in self._cores)

    def wait_for(self, ref: Any, *, seconds: float, what: str) -> Any:
        """``ray.get`` with a deadline whose error says what was waited for."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                left = deadline - time.monotonic()
                return ray.get(ref, timeout=min(max(left, 0.0), ALIVE_CHECK_SECONDS))
            except ray.exceptions.GetTimeoutError as e:
                if not self.is_alive():
                    raise RayGoneError(f"{what} can't finish: Ray's own processes ended") from e
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{what} did not finish within {seconds!r} s; "
                        f"see the logs in {str(self.log_dir)!r}, or use --verbose"
                    ) from e

    def kill(self, actor: ActorHandle) -> None:
        """End an actor at once; one whose Ray is gone is gone with it."""
        if self.is_alive():
            ray.kill(actor)

    def wait_for_exit(self) -> None:
        """Ray asks its processes to leave; those that stay are killed, one by one, and named."""
        _, left = psutil.wait_procs(list(self._seen), timeout=EXIT_TIMEOUT_SECONDS)
        names = [f"{process.pid} {_kill(process)}" for process in left]
        if names:
            raise RuntimeError(
                f"{len(names)!r} processes were still there {EXIT_TIMEOUT_SECONDS!r} s after Ray's "
                f"shutdown and were killed: {names!r}; this is a fault of the engine's shutdown"
            )

    def _descendants(self) -> list[psutil.Process]:
        return psutil.Process().children(recursive=True) if self._owned else []


@contextmanager
def ray_session(*, stream_logs: bool) -> Iterator[RaySession]:
    """Connect, and on leaving disconnect; a Ray of our own ends with all its processes."""
    owned = os.environ.get("RAY_ADDRESS", "local") in ("", "local")
    session = None
    try:
        with interrupts_deferred():
            ray.init(log_to_driver=stream_logs, **(LOCAL_RAY if owned else {}))
            session = RaySession(owned=owned)
        yield session
    finally:
        if session is not None:
            session.remember_processes()
        ray.shutdown()
        if session is not None:
            session.wait_for_exit()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> str:
    try:
        name = process.name()
        process.kill()
    except psutil.NoSuchProcess:
        return "(gone by itself)"
    return name
