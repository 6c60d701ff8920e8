"""One clear error for a `launch_server --ray` that can't start, where upstream prints a traceback of 60 lines.

Stands apart from `server_process.py` because upstream's launcher imports it before it knows whether Ray is wanted, so
it may need nothing that is not there without Ray.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.utils.network import is_port_available

TRACEBACK_VARIABLE = "SGLANG_RAY_TRACEBACK"


def reported_in_one_line(run_server: Callable[[Any], None]) -> Callable[[Any], None]:
    """Decorator of upstream's `run_server`: with `--ray`, a failed start is one error message and status 1.

    `SGLANG_RAY_TRACEBACK=1` brings the traceback back. `--enable-rdt-weight-sync` implies `--ray`.
    """

    @functools.wraps(run_server)
    def run(server_args: Any) -> None:
        if server_args.enable_rdt_weight_sync:
            server_args.use_ray = True
        if not server_args.use_ray or os.environ.get(TRACEBACK_VARIABLE) == "1":
            return run_server(server_args)
        choose_log_level(server_args)
        try:
            check_before_launch(server_args)
            run_server(server_args)
        except Exception as error:  # the end of the process: reported, and status 1
            print(f"sglang: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            sys.exit(1)

    return run


def choose_log_level(server_args: Any) -> None:
    """On a CPU that nobody asked for a log level, warnings only: at `info` every few tokens are a line there.

    The record says what the user typed (`launch_command`), which tells a chosen `info` from the default.
    """
    typed = server_args.launch_command or ""
    if server_args.device == "cpu" and "log-level" not in typed and "log_level" not in typed:
        server_args.log_level = "warning"


def check_before_launch(server_args: Any) -> None:
    """Find the mistakes that would otherwise surface minutes later, in another process.

    Raises:
        ValueError: the model path does not exist, or the port is in use.
    """
    path = str(server_args.model_path)
    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not Path(
        path
    ).expanduser().exists():
        raise ValueError(f"model path {path!r} does not exist")
    if not is_port_available(server_args.port):  # type: ignore[no-untyped-call]
        raise ValueError(f"port {server_args.port!r} is in use; choose another one with --port")
