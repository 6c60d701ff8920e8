"""What an engine could leave behind, counted from outside of it."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

RANK_TITLES = ("sglang::", "SchedulerActor")


def engine_processes() -> list[psutil.Process]:
    """Ranks and detokenizers below this process (which started the Ray cluster and so is above its workers)."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(title in " ".join(process.cmdline()) for title in RANK_TITLES):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def shared_memory() -> set[str]:
    return {
        path.name
        for path in Path("/dev/shm").iterdir()
        if path.name.startswith(("sglang", "sgl_", "psm_"))
    }


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def sockets_in_tmp() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).iterdir() if path.is_socket()}


def listening_ports() -> set[int]:
    """TCP ports that this process listens on."""
    connections = psutil.Process().net_connections(kind="tcp")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


def port_is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> float:
    """Seconds until `condition` held."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)
    return time.monotonic() - start
