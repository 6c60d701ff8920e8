"""The two throw-away processes of `lane_probe.py`, run by path: one offers memory, the other one reads it with NIXL.

Imports nothing of sglang, whose import takes longer than the probe. Prints `SECONDS s` for the best of three reads, or
with `--ucx-version` only `UCX v`, the version of the library that NIXL loaded.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import time
from typing import Any

_REPEATS = 3
_OFFER = "OFFER "


def _memory(device: str, num_bytes: int) -> tuple[Any, int]:
    """Touched memory on the device (kept alive by the first value), and its address."""
    if device == "cpu":
        import numpy

        array: Any = numpy.ones(num_bytes, dtype=numpy.uint8)
        return array, array.ctypes.data
    import torch

    tensor = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    return tensor, tensor.data_ptr()


def _agent(role: str, device: str, num_bytes: int) -> tuple[Any, Any, Any]:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(f"lane-probe-{role}", nixl_agent_config(backends=["UCX"]))
    memory, address = _memory(device, num_bytes)
    kind = "DRAM" if device == "cpu" else "VRAM"
    agent.register_memory([(address, num_bytes, 0, "")], kind)
    return agent, memory, agent.get_xfer_descs([(address, num_bytes, 0)], kind)


def _serve(device: str, num_bytes: int) -> None:
    agent, _memory_kept, descriptors = _agent("source", device, num_bytes)
    parts = [agent.get_agent_metadata(), agent.get_serialized_descs(descriptors)]
    print(_OFFER + json.dumps([base64.b64encode(part).decode() for part in parts]), flush=True)
    sys.stdin.read()  # until the reader is done


def _read(device: str, num_bytes: int, source_device: str) -> None:
    arguments = ["--device", source_device, "--bytes", str(num_bytes), "--source"]
    source = subprocess.Popen(
        [sys.executable, "-P", __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert source.stdin is not None
    try:
        # While the other process imports torch, so does this one.
        agent, _memory_kept, local = _agent("reader", device, num_bytes)
        metadata, descriptors = _offer_of(source)
        remote = agent.add_remote_agent(metadata)
        there = agent.deserialize_descs(descriptors)
        seconds = [_seconds_of_a_read(agent, local, there, remote) for _ in range(_REPEATS + 1)]
        print(f"SECONDS {min(seconds[1:])}", flush=True)  # the first one connects
    finally:
        source.stdin.close()
        source.kill()
        source.wait()


def _offer_of(source: subprocess.Popen[str]) -> tuple[bytes, bytes]:
    assert source.stdout is not None
    for line in source.stdout:
        if line.startswith(_OFFER):
            parts = json.loads(line.removeprefix(_OFFER))
            metadata, descriptors = (base64.b64decode(part) for part in parts)
            return metadata, descriptors
    raise SystemExit(f"the source process ended with status {source.wait()}")


def _seconds_of_a_read(agent: Any, local: Any, there: Any, remote: Any) -> float:
    handle = agent.initialize_xfer("READ", local, there, remote, b"")
    started = time.perf_counter()
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    seconds = time.perf_counter() - started
    agent.release_xfer_handle(handle)
    if state != "DONE":
        raise SystemExit(f"the read ended as {state!r}")
    return seconds


def _print_ucx_version() -> None:
    """NIXL brings several builds of UCX and loads one of them: the mapped files say which."""
    import ctypes
    from pathlib import Path

    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("ucx-version", nixl_agent_config(backends=["UCX"]))
    mapped = {
        line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()
    }
    libraries = [path for path in mapped if Path(path).name.startswith("libucp")]
    if not libraries:
        raise SystemExit(f"{agent!r} loaded no libucp")
    version = ctypes.CDLL(libraries[0]).ucp_get_version_string
    version.restype = ctypes.c_char_p
    print(f"UCX {version().decode()}", flush=True)


def main() -> None:
    """One of the two processes: the reader (which starts the other) or the source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--source-device", choices=["cpu", "cuda"])
    parser.add_argument("--bytes", type=int, default=1)
    parser.add_argument("--source", action="store_true")
    parser.add_argument("--ucx-version", action="store_true")
    arguments = parser.parse_args()
    if arguments.ucx_version:
        _print_ucx_version()
    elif arguments.source:
        _serve(arguments.device, arguments.bytes)
    else:
        _read(arguments.device, arguments.bytes, arguments.source_device or arguments.device)


if __name__ == "__main__":
    main()
