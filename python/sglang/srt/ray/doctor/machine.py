"""Checks of this machine and this environment: versions, devices, settings that are known to do harm.

Each check asks the machine and hands what it heard to a function without side effects, which judges. Imports of torch
and Ray stand inside the checks, so that a broken one is a line of the report.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from sglang.srt.ray.devices import VISIBLE_VARIABLE
from sglang.srt.ray.doctor.findings import Finding, Place
from sglang.srt.ray.weight_sync.lane_probe import ucx_version
from sglang.srt.ray.weight_sync.lanes import environment_warnings

PACKAGES = ("ray", "nixl", "torch")
HOST_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel gives the first PID namespace this number (PROC_PID_INIT_INO), every other one a number of its own."""


def versions(_place: Place) -> Iterator[Finding]:
    """sglang and what moves the bytes, against what sglang's metadata asks for."""
    import sglang

    recorded = importlib.metadata.version("sglang")
    yield sglang_finding(sglang.__version__, recorded, str(Path(sglang.__file__).parent))
    yield from version_findings(importlib.metadata.requires("sglang") or [], _installed)
    ucx = ucx_version()
    yield Finding(check="version", status="ok", text=f"UCX {ucx}", facts={"ucx": ucx})


def sglang_finding(running: str, recorded: str, folder: str) -> Finding:
    """The code that runs and what pip recorded differ where an import path hides the installed package."""
    facts = {"sglang": running, "recorded": recorded, "folder": folder}
    if running == recorded:
        text = f"sglang {running}"
        return Finding(check="version", status="ok", text=text, facts=facts)
    text = (
        f"sglang {running} runs from {folder!r}, but {recorded} is installed: Ray's workers may import the other one; "
        f"look at PYTHONPATH"
    )
    return Finding(check="version", status="warn", text=text, facts=facts)


def version_findings(
    requirements: Sequence[str], installed: Callable[[str], str | None]
) -> Iterator[Finding]:
    """Each of `PACKAGES` against the requirement that names it.

    Args:
        requirements: `Requires-Dist` lines of sglang.
        installed: version of a package, None when it is not there.
    """
    from packaging.requirements import Requirement

    wanted = {(parsed := Requirement(line)).name: parsed.specifier for line in requirements}
    for name in PACKAGES:
        version = installed(name)
        asked = wanted.get(name)
        facts = {name: version, "wanted": str(asked or "")}
        if version is None:
            text = f"{name} is not installed: install sglang with its extra `ray`"
            yield Finding(check="version", status="fail", text=text, facts=facts)
        elif asked and not asked.contains(version, prereleases=True):
            text = f"{name} {version} is not what this release asks for ({asked})"
            yield Finding(check="version", status="warn", text=text, facts=facts)
        else:
            text = f"{name} {version}"
            yield Finding(check="version", status="ok", text=text, facts=facts)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def gpu_names() -> tuple[str, ...]:
    """What torch sees in this process."""
    import torch

    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def device() -> Literal["cpu", "cuda"]:
    """Where engines of this machine have their weights."""
    return "cuda" if gpu_names() else "cpu"


def devices(place: Place) -> Iterator[Finding]:
    """Whether torch sees the GPUs that the machine has."""
    files = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    yield device_finding(gpu_names(), files, place.environment.get(VISIBLE_VARIABLE))


def device_finding(names: Sequence[str], files: Sequence[str], visible: str | None) -> Finding:
    """Args:
    names: of the devices that torch sees.
    files: device files of GPUs in /dev.
    visible: `CUDA_VISIBLE_DEVICES`.
    """
    facts = {"gpus": list(names), "device_files": list(files), VISIBLE_VARIABLE: visible}
    entries = [name.strip() for name in (visible or "").split(",") if name.strip()]
    asked = list(itertools.takewhile(lambda name: name != "-1", entries))  # as CUDA reads it
    setting = "" if visible is None else f" ({VISIBLE_VARIABLE}={visible!r})"
    status: Literal["ok", "warn", "fail"] = "ok"
    if len(asked) > len(names):
        status = "fail"
        text = f"{VISIBLE_VARIABLE}={visible!r} names {len(asked)} GPU(s), torch sees {len(names)}"
    elif files and not names and visible is None:
        status = "fail"
        text = f"/dev has {len(files)} GPU(s), torch sees none: does its CUDA fit the driver?"
    elif files and not names:
        status = "warn"
        text = f"all {len(files)} GPU(s) are hidden{setting}; engines here need --device cpu"
    elif not names:
        text = "no GPU: engines here need --device cpu"
    else:
        kinds = ", ".join(f"{list(names).count(kind)} x {kind}" for kind in dict.fromkeys(names))
        text = f"{kinds}{setting}"
    return Finding(check="devices", status=status, text=text, facts=facts)


def environment(place: Place) -> Iterator[Finding]:
    """Settings of this environment that are known to degrade transfers. A rank may run under another one."""
    yield from environment_findings(place.environment, device())


def environment_findings(variables: Mapping[str, str], where: str) -> Iterator[Finding]:
    warnings = environment_warnings(variables, where)
    for warning in warnings:
        yield Finding(check="environment", status="warn", text=warning)
    if not warnings:
        text = f"nothing is set that is known to degrade transfers into {where} memory"
        yield Finding(check="environment", status="ok", text=text)


def pid_namespace(_place: Place) -> Iterator[Finding]:
    """CUDA IPC and cross-memory attach work between processes of one PID namespace only."""
    yield pid_namespace_finding(os.readlink("/proc/self/ns/pid"))


def pid_namespace_finding(link: str) -> Finding:
    if link == HOST_PID_NAMESPACE:
        text = f"{link}, the host's own"
    else:
        text = (
            f"{link}, that of a container: trainers in another container of this host reach its ranks over TCP only, "
            f"unless both share it (hostPID, --pid=host)"
        )
    return Finding(check="PID namespace", status="ok", text=text, facts={"pid_namespace": link})
