"""What an engine could leave behind, counted from outside of it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files of /dev/shm that these processes have mapped and that have a name (Ray's own have none)."""
    found = set()
    for process in processes:
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            path = line.partition("/dev/shm/")[2]
            if path and not path.endswith("(deleted)"):
                found.add(Path("/dev/shm") / path)
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def local_sockets(port_args: Any) -> set[Path]:
    """Files of the sockets between an engine's processes."""
    names = [name for name in vars(port_args).values() if isinstance(name, str)]
    return {Path(name.removeprefix("ipc://")) for name in names if name.startswith("ipc://")}


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
