"""Both ends of measuring the lane between a publisher and each rank, over the transport that weights will take.

A rank reads a probe buffer of the publisher into memory of its own while it goes on serving, and one rank of each host
also measures what that host gives between its own processes. `lanes.py` judges what was measured.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang.srt.ray.weight_sync import transports
from sglang.srt.ray.weight_sync.errors import DeadlineExceededError, TransferError
from sglang.srt.ray.weight_sync.fleet import RankAddress, on_every_rank
from sglang.srt.ray.weight_sync.lane_probe import probe_loopback
from sglang.srt.ray.weight_sync.lanes import (
    HostLoopback,
    Lane,
    Surroundings,
    environment_warnings,
    judged,
    lane_variables,
    untouched_environment,
)

LOOPBACK_TIMEOUT_S = 60.0
PROBE_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}


def surroundings(device: str) -> Surroundings:
    """Those of this process, for memory on `device`."""
    return Surroundings(
        host=socket.gethostname(),
        boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=os.readlink("/proc/self/ns/pid"),
        device=device,
        lane_variables=lane_variables(os.environ),
        warnings=tuple(environment_warnings(os.environ, device)),
    )


def host_loopback(
    environment: Mapping[str, str], device: Any, source_device: Any, *, timeout_s: float
) -> HostLoopback:
    """What this host gives from memory on `source_device` to memory on `device`, under `environment` and without it.

    Raises:
        DeadlineExceededError, TransferError: as `probe_loopback`.
    """
    plain = untouched_environment(environment, device)
    num_bytes = min(PROBE_BYTES[device], PROBE_BYTES[source_device])
    options: dict[str, Any] = {"device": device, "source_device": source_device}
    options |= {"num_bytes": num_bytes, "timeout_s": timeout_s}
    chosen = probe_loopback(environment=environment, **options)
    same = lane_variables(plain) == lane_variables(environment)
    best = chosen if same else probe_loopback(environment=plain, **options)
    return HostLoopback(chosen=chosen, untouched=best)


class RankLaneMeter:
    """The rank's end. Called on threads of the actor's concurrency groups; generation goes on meanwhile."""

    def __init__(self, device: torch.device, *, rank: int) -> None:
        self._device = device
        self._rank = rank
        self._loopbacks: dict[str, HostLoopback] = {}
        self._abandoned: list[torch.Tensor | None] = []

    def surroundings(self) -> Surroundings:
        return surroundings(self._device.type)

    def loopback(self, timeout_s: float, source_device: str) -> HostLoopback:
        """Measured once in the life of the process, in throw-away processes (a second or two on a CPU).

        `source_device` is where the publisher's memory is: what a host gives from a CPU to a GPU says nothing of what
        it gives between GPUs.
        """
        if source_device not in self._loopbacks:
            self._loopbacks[source_device] = host_loopback(
                os.environ, self._device.type, source_device, timeout_s=timeout_s
            )
        return self._loopbacks[source_device]

    def measure(self, refs: Sequence[Any], timeout_s: float) -> float:
        """GB/s of reading the probe buffers of `refs` into memory of this rank; the best read counts.

        Raises:
            DeadlineExceededError, TransferError: naming the rank.
        """
        deadline = time.monotonic() + timeout_s
        scratch: torch.Tensor | None = None
        given_up = False
        best = 0.0
        try:
            for ref in refs:
                ((shape, dtype),) = transports.described(ref, timeout_s=deadline - time.monotonic())
                if scratch is None:
                    scratch = torch.zeros(shape, dtype=dtype, device=self._device)
                    transports.pin(scratch)
                best = max(best, self._read(ref, scratch, deadline))
        except TimeoutError as error:
            given_up = True
            raise DeadlineExceededError(
                f"the probe of the lane did not end within {timeout_s:g} s",
                rank=self._rank,
                phase="connect",
            ) from error
        except transports.TRANSPORT_ERRORS as error:
            raise TransferError(
                f"the probe of the lane failed: {error}", rank=self._rank, phase="connect"
            ) from error
        finally:
            if given_up:  # the read may still write, so its memory stays
                self._abandoned.append(scratch)
            elif scratch is not None:
                transports.unpin(scratch)
        return best

    @staticmethod
    def _read(ref: Any, scratch: torch.Tensor, deadline: float) -> float:
        started = time.perf_counter()
        transports.Read(ref, [scratch]).wait(timeout_s=deadline - time.monotonic())
        seconds = time.perf_counter() - started
        return scratch.numel() * scratch.element_size() / seconds / 1e9


def measured_lanes(
    addresses: Sequence[RankAddress], *, floor: float | None, timeout_s: float
) -> list[Lane]:
    """The lane to every rank. Called by the publisher, in its own process.

    Raises:
        WeightSyncError: a rank that can't be measured, with engine and rank.
    """
    nothing: list[tuple[Any, ...]] = [()] * len(addresses)

    def ask(some: Sequence[RankAddress], verb: str, arguments: Any) -> list[Any]:
        return on_every_rank(some, verb, arguments, timeout_s=timeout_s, phase="connect")

    there: list[Surroundings] = ask(addresses, "lane_surroundings", nothing)
    keys = [(each.boot, each.device, tuple(each.lane_variables.items())) for each in there]
    firsts = {key: index for index, key in reversed(list(enumerate(keys)))}
    chosen = [addresses[index] for index in firsts.values()]
    device = _probe_device({each.device for each in there})
    # Up to two probes, each of which starts two processes: that takes as long as it takes, whatever a read may take.
    loopbacks = on_every_rank(
        chosen,
        "lane_loopback",
        [(LOOPBACK_TIMEOUT_S, device)] * len(chosen),
        timeout_s=2 * LOOPBACK_TIMEOUT_S,
        phase="connect",
    )
    by_host = dict(zip(firsts, loopbacks, strict=True))
    speeds = _speeds(addresses, device, ask, timeout_s)
    here = surroundings(device)
    return [
        judged(
            engine=address.engine.name,
            rank=address.rank,
            here=here,
            there=place,
            loopback=by_host[key],
            gigabytes_per_second=speed,
            floor=floor,
        )
        for address, place, key, speed in zip(addresses, there, keys, speeds, strict=True)
    ]


def _probe_device(devices: set[str]) -> str:
    """Where this process keeps its probe: on a GPU if it has one and every rank does."""
    return "cuda" if devices == {"cuda"} and torch.cuda.is_available() else "cpu"


def _speeds(
    addresses: Sequence[RankAddress], device: str, ask: Any, timeout_s: float
) -> list[float]:
    """All ranks at once, as in a sync: what they share (a link, a core) is part of the answer."""
    buffer = torch.zeros(PROBE_BYTES[device], dtype=torch.uint8, device=device)
    transports.pin(buffer)
    try:
        # The first read of a rank also connects it, so the second one counts.
        refs = [transports.put([buffer]) for _ in range(2)]
        return list(ask(addresses, "measure_lane", [(refs, timeout_s)] * len(addresses)))
    finally:
        transports.unpin(buffer)
