"""Measure what a NIXL read between two processes of this machine gives, in two throw-away processes.

UCX reads its environment once, when the first agent of a process starts, and never says which lane it took; so the
question is put to processes that end afterwards. `lanes.py` decides what to make of the answer; the rank itself is
measured through Ray by `receiver.py`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from sglang.srt.ray.weight_sync.errors import DeadlineExceededError, TransferError

DEFAULT_PROBE_BYTES = 64 << 20
_READ_TABLE = re.compile(r"remote memory read.*?\.\.inf +\|([^|]*)\|([^|]*)\|", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loopback:
    """What one read between two processes of this machine showed."""

    lane: str
    """What UCX says it used for large reads, such as `zero-copy cma/memory`; `unknown` if it did not say."""
    gigabytes_per_second: float
    """Best of three; GB are 1e9 bytes."""


def probe_loopback(
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    source_device: Literal["cpu", "cuda"] | None = None,
    environment: Mapping[str, str] | None = None,
    num_bytes: int = DEFAULT_PROBE_BYTES,
    timeout_s: float = 60.0,
) -> Loopback:
    """Read `num_bytes` from another process under `environment` (this process's own when None).

    `device` is where the reader's memory is, `source_device` the other one's (the same when None).

    Called at launch, at connect and by `doctor`, on any thread; takes a second on a CPU, several with a CUDA device.

    Raises:
        DeadlineExceededError: the two processes did not end in time.
        TransferError: no agent starts, or the read fails, with what the process said.
    """
    place = dict(os.environ if environment is None else environment) | {"UCX_PROTO_INFO": "y"}
    arguments = ["--device", device, "--bytes", str(num_bytes)]
    arguments += ["--source-device", source_device or device]
    what = f"the lane probe on {device!r}"
    said = _run_child(arguments, place, what=what, timeout_s=timeout_s)
    found = re.search(r"^SECONDS (\S+)$", said, re.MULTILINE)
    if found is None:
        raise TransferError(f"{what} told no time: {said.strip()[-500:]!r}", phase="connect")
    return Loopback(
        lane=lane_in(said), gigabytes_per_second=num_bytes / float(found.group(1)) / 1e9
    )


def _run_child(
    arguments: list[str], environment: Mapping[str, str], *, what: str, timeout_s: float
) -> str:
    """What `lane_child.py` prints."""
    # By path and with -P, so that neither sglang (seconds of imports) nor our folder gets in.
    script = str(Path(__file__).with_name("lane_child.py"))
    command = [sys.executable, "-P", script, *arguments]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceededError(
            f"{what} did not end within {timeout_s:g} s", phase="connect"
        ) from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-500:]
        raise TransferError(
            f"{what} failed with exit status {done.returncode}: {said!r}", phase="connect"
        )
    return done.stdout


def ucx_version(*, timeout_s: float = 60.0) -> str:
    """The version of the UCX that NIXL loads, as that UCX says it; asked in a throw-away process, about a second.

    Raises:
        DeadlineExceededError, TransferError: as `probe_loopback`. No UCX setting can be the reason: none is passed.
    """
    plain = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    said = _run_child(
        ["--ucx-version"], plain, what="the question for UCX's version", timeout_s=timeout_s
    )
    found = re.search(r"^UCX (\S+)$", said, re.MULTILINE)
    return found.group(1) if found else "unknown"


def lane_in(text: str) -> str:
    """The lane of the largest reads in what `UCX_PROTO_INFO=y` prints."""
    found = _READ_TABLE.findall(text)
    return " ".join(part.strip() for part in found[-1]) if found else "unknown"
