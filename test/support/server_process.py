"""`python -m sglang.launch_server` started as a user does: a process of its own, watched from outside.

```python
with launched_server(model_path, "--log-level", "warning", ray_address="local") as server:
    server.wait_until_healthy()
    server.stop(signal.SIGTERM)          # -> seconds until it had ended
    server.returncode, server.output(), server.left_behind()
```
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from .engine import HOST, START_TIMEOUT_S, free_port, wait_until_healthy


class ServerProcess:
    def __init__(
        self, arguments: list[str], environment: dict[str, str], port: int, program: list[str]
    ) -> None:
        self.port = port
        self.url = f"http://{HOST}:{port}"
        self._seen: dict[int, psutil.Process] = {}
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def output(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def wait_until_healthy(self) -> None:
        try:
            wait_until_healthy(self.url, timeout_s=START_TIMEOUT_S, alive=self._alive)
        except RuntimeError as error:
            raise RuntimeError(f"{error}; it said:\n{self.output()[-5000:]}") from error

    def wait(self, timeout_s: float) -> int:
        """Its exit status, noting its children on the way."""
        deadline = time.monotonic() + timeout_s
        while self._alive():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the server still ran after {timeout_s:g} s; it said:\n{self.output()[-5000:]}"
                )
            time.sleep(0.1)
        assert self.returncode is not None
        return self.returncode

    def stop(self, number: signal.Signals, timeout_s: float = 60.0) -> float:
        """Send a signal (Ctrl-C goes to the whole process group, as from a terminal); seconds until the end."""
        assert self._alive(), self.output()[-5000:]
        started = time.monotonic()
        if number == signal.SIGINT:
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)
        self.wait(timeout_s)
        return time.monotonic() - started

    def descendants(self, named: str) -> list[psutil.Process]:
        """Those that run now and whose command line holds the name, in any case."""
        assert self._alive(), self.output()[-5000:]
        return [p for p in self._seen.values() if named in describe(p).lower()]

    def left_behind(self, timeout_s: float = 10.0) -> list[str]:
        """Descriptions of descendants that outlived the server by `timeout_s`."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=timeout_s)
        return [f"{process.pid}: {describe(process)}" for process in alive]

    def close(self) -> None:
        self._alive()
        for process in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.returncode is None:
            self._process.kill()
            self._process.wait(10)
        self._log.close()

    def _alive(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                self._seen[child.pid] = child
        return self._process.poll() is None


def describe(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.NoSuchProcess:
        return "(gone)"


@contextlib.contextmanager
def launched_server(
    model_path: Path | str,
    *arguments: str,
    ray_address: str,
    port: int | None = None,
    environment: dict[str, str] | None = None,
    program: tuple[str, ...] = ("-m", "sglang.launch_server"),
) -> Iterator[ServerProcess]:
    """Start it; whatever is left of it is killed by id at the end.

    Args:
        ray_address: `local` for a Ray of its own, else the address of the cluster that it joins.
        program: what Python runs; a script that takes the same arguments, for tests of `run_server` itself.
    """
    port = port or free_port()
    command = ["--ray", "--model-path", str(model_path), "--device", "cpu", "--dtype", "float32"]
    command += ["--host", HOST, "--port", str(port), "--max-total-tokens", "8192", *arguments]
    server = ServerProcess(
        command, os.environ | {"RAY_ADDRESS": ray_address} | (environment or {}), port, [*program]
    )
    try:
        yield server
    finally:
        server.close()
