"""Checks of the Ray cluster that engines of this machine would join: room for them, and who is there already.

A process of its own asks (`cluster_child.py`), so that one that doesn't answer costs a deadline and not the report.
Nothing is started, neither Ray nor an actor.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang.srt.ray.doctor.findings import Finding, Place
from sglang.srt.ray.doctor.machine import device
from sglang.srt.ray.placement import device_resource

ANSWER_TIMEOUT_S = 45.0


def cluster(place: Place) -> Iterator[Finding]:
    """Placement and namespaces, from one answer."""
    if place.address is None and place.environment.get("RAY_ADDRESS") == "local":
        told = None
    else:
        told = asked_cluster(place, timeout_s=ANSWER_TIMEOUT_S)
    if told is None:
        text = "no Ray runs here (see --address); `launch_server --ray` starts one of its own"
        yield Finding(check="placement", status="ok", text=text, facts={"address": None})
        return
    yield placement_finding(told, device_resource(device()))
    yield namespace_finding(told)


def asked_cluster(place: Place, *, timeout_s: float) -> Mapping[str, Any] | None:
    """What the cluster says; None when no address was given and there is none.

    Raises:
        TimeoutError: it does not answer in time.
        ConnectionError: it can't be joined, with Ray's reason.
    """
    address = place.address or place.environment.get("RAY_ADDRESS") or "auto"
    command = [sys.executable, "-P", str(Path(__file__).with_name("cluster_child.py")), address]
    environment = dict(place.environment)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(
            f"Ray at {address!r} did not answer within {timeout_s:g} s; is that its GCS (HOST:6379)?"
        ) from error
    for line in done.stdout.splitlines():
        if line.startswith("TOLD "):
            told: Mapping[str, Any] = json.loads(line.removeprefix("TOLD "))
            return told
        if line == "NONE" and address == "auto":
            return None
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    raise ConnectionError(f"Ray at {address!r} can't be joined: {said!r}")


def placement_finding(told: Mapping[str, Any], resource: str) -> Finding:
    """Args:
    told: as `cluster_child.py` prints it.
    resource: what a rank takes one of, `GPU` or `CPU`.
    """
    nodes = [node for node in told["nodes"] if node["alive"]]
    total, free = (told[which].get(resource, 0.0) for which in ("total", "free"))
    here = max((node["resources"].get(resource, 0.0) for node in nodes), default=0.0)
    text = (
        f"Ray {told['ray']} at {told['address']}, {len(nodes)} node(s): {free:g} of {total:g} {resource} free, "
        f"at most {here:g} on one node"
    )
    problems = []
    if dead := len(told["nodes"]) - len(nodes):
        text += f", {dead} former node(s) gone"
    if total == 0:
        problems.append(f"no node offers any {resource}, so no rank can be placed")
    if waiting := told["placement_groups"].get("PENDING", 0):
        problems.append(f"{waiting} placement group(s) wait for resources")
    return Finding(
        check="placement",
        status="warn" if problems else "ok",
        text="; ".join([text, *problems]),
        facts=told,
    )


def namespace_finding(told: Mapping[str, Any]) -> Finding:
    """In which namespaces a trainer finds the ranks of running engines."""
    ranks: Mapping[str, int] = told["ranks_by_namespace"]
    if ranks:
        where = ", ".join(f"{number} in {name!r}" for name, number in sorted(ranks.items()))
        text = f"ranks of running engines: {where}; give it to ray.get_actor(name, namespace=...)"
    else:
        text = "no ranks of engines run in this cluster; --ray-namespace chooses where theirs are named"
    return Finding(check="Ray namespace", status="ok", text=text, facts={"ranks": dict(ranks)})
