"""Checks of the lane: what ranks of this machine are started with, and what a transfer between two processes gives.

The transfer is the one that is measured at connect (`weight_sync/lane_meter.py`), in throw-away processes: under the
environment that a rank would get, and with UCX left alone where the two differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sglang.srt.ray.doctor.findings import Finding, Place, Status
from sglang.srt.ray.doctor.machine import device
from sglang.srt.ray.weight_sync.lanes import (
    DEFAULT_FLOOR_SHARES,
    HostLoopback,
    chosen_environment,
    lane_variables,
    loopback_warnings,
)

LOOPBACK_TIMEOUT_S = 60.0


def lane_settings(place: Place) -> Iterator[Finding]:
    """What is set for the ranks, by whom, and why."""
    yield settings_finding(place.environment, device())


def settings_finding(environment: Mapping[str, str], where: str) -> Finding:
    ours, theirs = chosen_environment(where, environment), lane_variables(environment)
    parts = [f"{name}={value!r} is yours and stays" for name, value in theirs.items()]
    for name, value in ours.items():
        parts.append(
            f"{name}={value!r} is set for each rank, or reads between GPUs of a host take TCP"
        )
    if not parts:
        parts = [f"UCX chooses by itself, and nothing has to be set for {where} memory"]
    facts = {"set_for_ranks": ours, "set_by_you": theirs}
    return Finding(check="lane settings", status="ok", text="; ".join(parts), facts=facts)


def loopback(place: Place) -> Iterator[Finding]:
    """One real transfer, in throw-away processes."""
    from sglang.srt.ray.weight_sync.lane_meter import host_loopback

    where = device()
    ranks = dict(place.environment) | chosen_environment(where, place.environment)
    found = host_loopback(ranks, where, where, timeout_s=LOOPBACK_TIMEOUT_S)
    yield loopback_finding(found, where)


def loopback_finding(found: HostLoopback, where: str) -> Finding:
    """`fail` below the share of the host's best at which a publisher refuses to connect."""
    chosen, best = found.chosen, found.untouched
    text = f"{where} to {where} by {chosen.lane!r}: {chosen.gigabytes_per_second:.2f} GB/s"
    warnings = loopback_warnings(found, source=where, target=where)
    status: Status = "warn" if warnings else "ok"
    floor = DEFAULT_FLOOR_SHARES.get(where, 0.0) * best.gigabytes_per_second
    if chosen.gigabytes_per_second < floor:
        status = "fail"
        warnings.append(f"a publisher refuses less than {floor:.2f} GB/s here")
    facts = {
        "device": where,
        "lane": chosen.lane,
        "gigabytes_per_second": chosen.gigabytes_per_second,
        "lane_of_ucx_left_alone": best.lane,
        "gigabytes_per_second_of_ucx_left_alone": best.gigabytes_per_second,
    }
    return Finding(check="loop-back", status=status, text="; ".join([text, *warnings]), facts=facts)
