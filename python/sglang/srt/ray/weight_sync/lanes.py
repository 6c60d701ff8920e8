"""Which lane bytes take from a trainer to a rank, whether it is the one that this machine can give, and how fast it is.

A wrong lane delivers correct data at a hundredth of the speed and says nothing, so a publisher measures the real path
to every rank when it connects and holds it against what a throw-away process of the rank's host reaches with UCX left
alone. What the user set is never changed; what is unset and needed is set before a rank's agent starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sglang.srt.ray.weight_sync.errors import SlowLaneError
from sglang.srt.ray.weight_sync.lane_probe import Loopback

DEFAULT_FLOOR_SHARES = {"cuda": 0.01}
"""By a rank's device: a path on one host must reach this share of the host's loop-back.

The wrong lane between GPUs is slower by a factor of 2,000; the milliseconds in which Ray notices the end of a read
weigh more than the read there (166-190 GB/s of 1,500 were seen at best), hence the small share. Between CPUs the wrong
lane is slower by 3 to 6, less than what a busy machine takes away from the right one, so there it is told by its name
and only a caller's own floor fails it.
"""

_CUDA_READ = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_LANE_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_PROTOS", _CUDA_READ)


def chosen_environment(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What has to be set for a rank on `device` (`cpu` or `cuda`) and is not set in `environment`.

    On one host NIXL's reads between GPUs run at 0.5 GB/s through TCP by default, and at 1,000 GB/s over CUDA IPC with
    this switch in the reader's environment (measured on an H200, UCX of nixl 1.5.1).
    """
    if device == "cuda" and _CUDA_READ not in environment:
        return {_CUDA_READ: "y"}
    return {}


def untouched_environment(environment: Mapping[str, str], device: str) -> dict[str, str]:
    """`environment` without what a user may have told UCX about lanes, and with what we would choose."""
    left = {name: value for name, value in environment.items() if name not in _LANE_VARIABLES}
    return left | chosen_environment(device, left)


def environment_warnings(environment: Mapping[str, str], device: str) -> list[str]:
    """What in an environment is known to degrade transfers on `device`, one sentence each."""
    warnings = []
    for name in _ALLOCATOR_VARIABLES:
        if device == "cuda" and "expandable_segments:true" in environment.get(name, "").lower():
            warnings.append(
                f"{name}={environment[name]!r}: memory of expandable segments can't be read over CUDA IPC; unset it"
            )
    lanes = environment.get("UCX_TLS")
    if lanes is not None and lanes != "all":
        warnings.append(
            f"UCX_TLS={lanes!r} limits the lanes that UCX may take, RDMA to other hosts included; unset it unless "
            f"that is meant"
        )
    if device == "cuda" and environment.get(_CUDA_READ, "y").lower() in ("n", "no", "0", "off"):
        warnings.append(f"{_CUDA_READ}={environment[_CUDA_READ]!r} makes UCX read over TCP")
    return warnings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Where a process runs, as far as lanes go."""

    host: str
    boot: str
    """Equal for two processes of one machine, whatever their containers are called."""
    pid_namespace: str
    device: str
    """`cpu` or `cuda`."""
    lane_variables: Mapping[str, str]
    """What is set of UCX's lane variables."""
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostLoopback:
    """What a host gives between two of its own processes."""

    chosen: Loopback
    """Under a rank's own environment."""
    untouched: Loopback
    """With UCX left alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lane:
    """The path from this publisher to one rank, measured through Ray when the publisher connected."""

    engine: str
    rank: int
    same_host: bool
    gigabytes_per_second: float
    floor_gigabytes_per_second: float | None
    """None where nothing is known of what the path should give: between hosts and between CPUs, unless it was given."""
    host: str
    loopback: HostLoopback
    warnings: tuple[str, ...]
    """One sentence each; empty for a lane as it should be."""

    def check(self) -> None:
        """Raises:
        SlowLaneError: the path is slower than its floor, naming lane, speed, floor and what is known to degrade it.
        """
        floor = self.floor_gigabytes_per_second
        if floor is None or self.gigabytes_per_second >= floor:
            return
        reasons = "; ".join(self.warnings) or "nothing in the rank's environment explains it"
        raise SlowLaneError(
            f"the lane to this rank on {self.host} gives {self.gigabytes_per_second:.3f} GB/s, its floor is "
            f"{floor:.3f} GB/s (lane {self.loopback.chosen.lane!r}): {reasons}. Mend it, or set "
            f"lane_floor_gigabytes_per_second",
            engine=self.engine,
            rank=self.rank,
            phase="connect",
        )


def judged(
    *,
    engine: str,
    rank: int,
    here: Surroundings,
    there: Surroundings,
    loopback: HostLoopback,
    gigabytes_per_second: float,
    floor: float | None,
) -> Lane:
    """What was measured between `here` (the publisher) and `there` (the rank), with what is wrong with it."""
    same_host = here.boot == there.boot
    warnings = [*there.warnings, *(f"the trainer's {text}" for text in here.warnings)]
    if same_host and here.pid_namespace != there.pid_namespace:
        warnings.append(
            "trainer and rank are in different PID namespaces, which rules out CUDA IPC and cross-memory attach; "
            "share the namespace (hostPID, --pid=host)"
        )
    warnings += loopback_warnings(loopback, source=here.device, target=there.device)
    if floor is None and same_host and there.device in DEFAULT_FLOOR_SHARES:
        share = DEFAULT_FLOOR_SHARES[there.device]
        floor = share * max(
            loopback.chosen.gigabytes_per_second, loopback.untouched.gigabytes_per_second
        )
    return Lane(
        engine=engine,
        rank=rank,
        same_host=same_host,
        gigabytes_per_second=gigabytes_per_second,
        floor_gigabytes_per_second=floor,
        host=there.host,
        loopback=loopback,
        warnings=tuple(warnings),
    )


def loopback_warnings(loopback: HostLoopback, *, source: str, target: str) -> list[str]:
    """What is wrong with the lane that a host's own processes take from `source` memory to `target` memory."""
    mine, best = loopback.chosen, loopback.untouched
    if mine.lane != best.lane and _is_slow(mine.lane):
        return [
            f"reads take {mine.lane!r} ({mine.gigabytes_per_second:.2f} GB/s in a loop-back) where {best.lane!r} "
            f"({best.gigabytes_per_second:.2f} GB/s) is available"
        ]
    if _is_slow(best.lane):
        return [
            f"this host gives nothing better than {best.lane!r} ({best.gigabytes_per_second:.2f} GB/s) from "
            f"{source} memory to {target} memory"
        ]
    return []


def lane_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in _LANE_VARIABLES if name in environment}


def _is_slow(lane: str) -> bool:
    return "tcp" in lane or not lane.startswith("zero-copy")
