"""One GPU's memory into another's on one host: the read that a weight sync does, beside what the machine itself gives.

In one run the same payloads go by peer copy (the link's own limit), CUDA IPC, NCCL broadcast, and RDT over NIXL into
pinned targets, the last with and without Ray's device isolation and with and without UCX's zero-copy reads. Needs ray,
nixl and torch, not SGLang; every way runs in processes of its own, because their environments differ.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
PAYLOADS = {"32 x 256 MiB": (32, 256 * MIB), "1,000 x 1 MiB": (1000, MIB)}
DRY = {"8 x 4 MiB": (8, 4 * MIB), "100 x 64 KiB": (100, MIB // 16)}
"""With --device cpu, to try the script where there is no GPU."""
ZERO_COPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
ISOLATION_OFF = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
WAIT_S = 60.0
LIMIT_S = 100
WAYS: dict[str, dict[str, str]] = {
    "rdt": {ZERO_COPY: "y"},
    "rdt, isolation off": {ZERO_COPY: "y", ISOLATION_OFF: "1"},
    "peer copy": {},
    "nccl broadcast": {"NCCL_NVLS_ENABLE": "0"},
    "cuda ipc": {},
    "rdt, zero copy unset": {},
}


def transports() -> Any:
    """The product's own module, by file: importing its package would need SGLang."""
    path = ROOT / "python/sglang/srt/ray/weight_sync/transports.py"
    spec = importlib.util.spec_from_file_location("transports", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def filled(count: int, num_bytes: int, device: str, value: int = 0) -> list[Any]:
    """Tensors of consecutive values from `value` on, so that each differs from the others."""
    import torch

    return [
        torch.full((num_bytes // 4,), value + i, dtype=torch.int32, device=device)
        for i in range(count)
    ]


def repeated(run: Callable[[], float], repeats: int) -> list[float]:
    """Seconds of each repetition after one that doesn't count."""
    run()
    return [run() for _ in range(repeats)]


# The machine's own ways


def copied(source: Sequence[Any], target: Sequence[Any], repeats: int) -> list[float]:
    """Seconds of copying one GPU's tensors into the other's."""
    import torch

    def once() -> float:
        for device in (0, 1):
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for into, out_of in zip(target, source, strict=True):
            into.copy_(out_of, non_blocking=True)
        for device in (0, 1):
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    seconds = repeated(once, repeats)
    assert [int(t[-1]) for t in target] == list(range(1, len(target) + 1))
    return seconds


def peer_copy(payload: tuple[int, int], repeats: int) -> list[float]:
    return copied(filled(*payload, "cuda:0", 1), filled(*payload, "cuda:1"), repeats)


def _broadcast(rank: int, payload: tuple[int, int], repeats: int, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    address = "tcp://127.0.0.1:29571"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=2)
    tensors = filled(*payload, "cuda", 1 if rank == 0 else 0)

    def once() -> float:
        dist.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for tensor in tensors:
            dist.broadcast(tensor, 0)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    seconds = repeated(once, repeats)
    assert [int(t[-1]) for t in tensors] == list(range(1, payload[0] + 1))
    if rank == 1:
        results.put(seconds)
    dist.destroy_process_group()


def nccl_broadcast(payload: tuple[int, int], repeats: int) -> list[float]:
    import torch.multiprocessing as mp

    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_broadcast, (payload, repeats, results), 2)
    return list(results.get())


def _ipc_source(payload: tuple[int, int], out: Any, done: Any) -> None:
    out.put(filled(*payload, "cuda:0", 1))
    done.wait(WAIT_S)


def cuda_ipc(payload: tuple[int, int], repeats: int) -> list[float]:
    """The copy alone: opening the handles, once, is not in it."""
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    queue, done = context.Queue(), context.Event()
    process = context.Process(target=_ipc_source, args=(payload, queue, done))
    process.start()
    seconds = copied(queue.get(timeout=WAIT_S), filled(*payload, "cuda:1"), repeats)
    done.set()
    process.join(WAIT_S)
    return seconds


# RDT


class Peer:
    """One end. With Ray's device isolation on, its GPU is `cuda:0` whichever it is."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._transports = transports()
        self._tensors: list[Any] = []

    def hold(self, payload: tuple[int, int], value: int) -> None:
        for tensor in self._tensors:
            self._transports.unpin(tensor)
        self._tensors = filled(*payload, self._device, value)
        for tensor in self._tensors:
            self._transports.pin(tensor)

    def publish(self) -> list[Any]:
        return [self._transports.put(self._tensors)]

    def read(self, refs: Sequence[Any]) -> float:
        """Seconds from the ref in hand to the last byte in place."""
        import torch

        started = time.perf_counter()
        self._transports.described(refs[0], timeout_s=WAIT_S)
        self._transports.Read(refs[0], self._tensors).wait(timeout_s=WAIT_S)
        if self._device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def last_values(self) -> list[int]:
        return [int(t[-1]) for t in self._tensors]


def rdt(device: str) -> Callable[[tuple[int, int], int], list[float]]:
    """Both ends as actors, one a GPU."""
    import ray

    on_gpu = device == "cuda"
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, **({"num_gpus": 2} if on_gpu else {})
    )
    actor = ray.remote(num_cpus=1, num_gpus=int(on_gpu), enable_tensor_transport=True)(Peer)
    second = "cuda:1" if ISOLATION_OFF in os.environ else "cuda:0"
    source = actor.remote("cuda:0" if on_gpu else "cpu")
    ray.get(source.last_values.remote(), timeout=WAIT_S)
    reader = actor.remote(second if on_gpu else "cpu")

    def measure(payload: tuple[int, int], repeats: int) -> list[float]:
        ray.get([source.hold.remote(payload, 1), reader.hold.remote(payload, 0)], timeout=WAIT_S)

        def once() -> float:
            refs = ray.get(source.publish.remote(), timeout=WAIT_S)
            return float(ray.get(reader.read.remote(refs), timeout=WAIT_S))

        seconds = repeated(once, repeats)
        assert ray.get(reader.last_values.remote(), timeout=WAIT_S) == list(
            range(1, payload[0] + 1)
        )
        return seconds

    return measure


def run_one(way: str, device: str, repeats: int) -> None:
    """Inside a way's own process: one JSON line for each payload."""
    own = {"peer copy": peer_copy, "nccl broadcast": nccl_broadcast, "cuda ipc": cuda_ipc}
    measure = own.get(way) or rdt(device)
    for name, payload in (PAYLOADS if device == "cuda" else DRY).items():
        seconds = measure(payload, repeats)
        median = statistics.median(seconds)
        row = {
            "way": way,
            "payload": name,
            "ms": round(median * 1e3, 3),
            "best_ms": round(min(seconds) * 1e3, 3),
            "GBps": round(payload[0] * payload[1] / median / 1e9, 1),
        }
        print("ROW", json.dumps(row), flush=True)


def run_all(ways: Sequence[str], device: str, repeats: int) -> list[dict[str, Any]]:
    """Every way in turn; one that fails is a row with its reason."""
    rows: list[dict[str, Any]] = []
    for way in ways:
        environment = {k: v for k, v in os.environ.items() if k not in (ZERO_COPY, ISOLATION_OFF)}
        command = [sys.executable, __file__, "--way", way, "--device", device]
        command += ["--repeats", str(repeats)]
        try:
            done = subprocess.run(
                command,
                env=environment | WAYS[way],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            output, reason = done.stdout, done.stderr[-800:] if done.returncode else ""
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode()
            reason = f"not done within {LIMIT_S} s"
        found = [json.loads(line[4:]) for line in output.splitlines() if line.startswith("ROW ")]
        if reason:
            found.append({"way": way, "payload": "", "error": reason})
        for row in found:
            print(json.dumps(row), flush=True)
        rows += found
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """As a table, each against the peer copy of the same payload."""
    from rich.console import Console
    from rich.table import Table

    limits = {
        row["payload"]: row["ms"] for row in rows if row["way"] == "peer copy" and "ms" in row
    }
    table = Table("way", "payload", "ms (median)", "GB/s", "of a peer copy")
    for row in rows:
        if "error" in row:
            table.add_row(row["way"], "", row["error"].strip().splitlines()[-1], "", "")
            continue
        limit = limits.get(row["payload"])
        share = "" if limit is None else f"{limit / row['ms']:.2f}"
        table.add_row(row["way"], row["payload"], f"{row['ms']:.2f}", f"{row['GBps']:.0f}", share)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=[*WAYS], help="only this one, in this process")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args()
    if options.way:
        run_one(options.way, options.device, options.repeats)
        return
    ways = [way for way in WAYS if options.device == "cuda" or way.startswith("rdt")]
    rows = run_all(ways, options.device, options.repeats)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    show(rows)


if __name__ == "__main__":
    main()
