"""The detokenizer of an engine that lives in somebody else's process, and the cleaner of what a killed host leaves.

Upstream's child sends SIGQUIT to its parent when it fails, and is killed when the *thread* that started it ends
(PR_SET_PDEATHSIG counts threads). This one does neither: its death is reported to the engine's watch, and when its
host dies it removes the engine's sockets and shared memory, which nobody else is left to do, before it goes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.ray.liveness import DetokenizerDiedError, EngineFailedError
from sglang.srt.server_args import PortArgs

_IPC = "ipc://"


def instance_files(ports: Sequence[PortArgs]) -> list[Path]:
    """Sockets and shared memory that an engine has on the node of its tokenizer."""
    from sglang.srt.managers.load_snapshot import shm_path_for

    names = [name for port in ports for name in vars(port).values() if isinstance(name, str)]
    sockets = [Path(name.removeprefix(_IPC)) for name in names if name.startswith(_IPC)]
    return [*sockets, *(Path(shm_path_for(port.instance_id)) for port in ports)]


def remove_files(files: Sequence[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


class DetokenizerProcess:
    """A spawned process, watched from a daemon thread. Made in the launching process, on any thread."""

    def __init__(self, server_args: Any, port_args: PortArgs, files: Sequence[Path]) -> None:
        context = multiprocessing.get_context("spawn")
        # A daemon: Python's exit would otherwise wait for it when nobody has shut the engine down.
        self.process = context.Process(
            target=run_hosted_detokenizer,
            args=(server_args, port_args, list(files)),
            name="sglang-detokenizer",
            daemon=True,
        )
        self.process.start()
        self._ending = threading.Event()

    def watch(self, report: Callable[[EngineFailedError], None]) -> None:
        """Have `report` called once, on a thread of its own, if the process ends before `end`."""

        def wait() -> None:
            self.process.join()
            if not self._ending.is_set():
                report(
                    DetokenizerDiedError(
                        f"the detokenizer (pid {self.process.pid}) died with exit code {self.process.exitcode}"
                    )
                )

        threading.Thread(target=wait, name="sglang-detokenizer-watch", daemon=True).start()

    def end(self) -> None:
        """Kill it and wait for its end. May be called twice."""
        self._ending.set()
        self.process.kill()
        self.process.join(timeout=10)


def run_hosted_detokenizer(server_args: Any, port_args: PortArgs, files: Sequence[Path]) -> None:
    """Target of the process. An error ends it with a traceback and exit code 1, and with nothing else."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to the whole terminal; the host ends us
    _leave_with_parent(files)
    import setproctitle

    from sglang.srt.managers.detokenizer_manager import DetokenizerManager
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import get_serving, publish
    from sglang.srt.utils import configure_logger

    setproctitle.setproctitle("sglang::detokenizer")
    load_plugins()  # type: ignore[no-untyped-call]
    publish(server_args, role="detokenizer")
    configure_logger(server_args)
    manager: Any = DetokenizerManager(server_args, port_args)
    if get_serving().tokenizer_worker_num > 1:
        manager.multi_http_worker_event_loop()
    else:
        manager.event_loop()


def _leave_with_parent(files: Sequence[Path]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        with contextlib.suppress(OSError):  # on the way out, with nobody left to tell
            remove_files(files)
        os._exit(0)

    threading.Thread(target=wait, name="sglang-parent-watch", daemon=True).start()
