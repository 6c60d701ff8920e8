"""Whether this machine is fit for engines and weight syncs: `python -m sglang.srt.ray.doctor`, where the engine runs.

One line for each thing that was looked at, and an exit status. A check is a function from a `Place` to findings; a new
one is entered here.
"""

from __future__ import annotations

from sglang.srt.ray.doctor import cluster, lane, machine
from sglang.srt.ray.doctor.findings import Check

CHECKS: dict[str, Check] = {
    "versions": machine.versions,
    "devices": machine.devices,
    "environment": machine.environment,
    "PID namespace": machine.pid_namespace,
    "lane settings": lane.lane_settings,
    "loop-back": lane.loopback,
    "placement": cluster.cluster,
}
"""In the order of the report."""
