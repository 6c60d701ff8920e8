"""Which placement group an engine uses, and which bundle each of its ranks gets.

One rule chooses the group: the explicit keyword, else the group set with `use_placement_group`, else the group
that the calling Ray actor runs in, else a group made (and later removed) by the engine. Upstream decides this
inside its launch function and knows GPU bundles only; here it is a pure plan (`assign_bundles`) over bundle
specifications, so that CPU ranks, node-sized bundles and refusals can be tested without a cluster.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.placement_group import placement_group as create_placement_group

from sglang.srt.environ import envs

READY_TIMEOUT_VARIABLE = "SGLANG_RAY_PLACEMENT_TIMEOUT_S"
DEFAULT_READY_TIMEOUT_S = 60.0

_ambient_group: contextvars.ContextVar[PlacementGroup | None] = contextvars.ContextVar(
    "sglang_ray_placement_group", default=None
)


class PlacementError(RuntimeError):
    """The cluster or the group cannot hold the engine; the text says what was needed and what was found."""


@contextlib.contextmanager
def use_placement_group(group: PlacementGroup) -> Iterator[PlacementGroup]:
    """Make `group` the one that engines launched inside the `with` block use.

    The setting belongs to the current thread or async task, as every context variable does.
    """
    token = _ambient_group.set(group)
    try:
        yield group
    finally:
        _ambient_group.reset(token)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenGroup:
    """A placement group, where it came from, and whether this engine has to remove it."""

    group: PlacementGroup
    source: str
    """`keyword`, `context`, `current` or `own`."""

    @property
    def owned(self) -> bool:
        return self.source == "own"

    @property
    def one_device_per_bundle(self) -> bool:
        """Groups handed over on purpose have one device a bundle; the caller's own may be node-sized."""
        return self.source in ("keyword", "context")

    def remove(self) -> None:
        if self.owned:
            remove_placement_group(self.group)


def device_resource(device: str) -> str:
    """The Ray resource that one rank takes one unit of: `CPU` on a plain CPU, `GPU` on anything else."""
    return "CPU" if device == "cpu" else "GPU"


def actor_resources(device: str) -> dict[str, float]:
    """Ray resource options of one rank's actor: one CPU per CPU rank, one GPU (and no CPU) otherwise."""
    if device == "cpu":
        return {"num_cpus": 1, "num_gpus": 0}
    return {"num_cpus": 0, "num_gpus": 1}


def choose_group(
    explicit: PlacementGroup | None, *, device: str, ranks: int, nodes: int
) -> ChosenGroup:
    """Apply the one rule and wait until the group is ready.

    Raises:
        PlacementError: the group was removed, or is not ready within the deadline
            (`SGLANG_RAY_PLACEMENT_TIMEOUT_S`, seconds, default 60); a group made here is removed again.
    """
    for source, group in (
        ("keyword", explicit),
        ("context", _ambient_group.get()),
        ("current", ray.util.get_current_placement_group()),
    ):
        if group is not None:
            chosen = ChosenGroup(group=group, source=source)
            _wait_ready(chosen)
            return chosen
    resource = device_resource(device)
    bundle = {"CPU": 1.0, resource: float(ranks // nodes)}
    strategy = "STRICT_PACK" if nodes == 1 else "STRICT_SPREAD"
    chosen = ChosenGroup(
        group=create_placement_group([bundle] * nodes, strategy=strategy), source="own"
    )
    try:
        _wait_ready(chosen)
    except BaseException:
        chosen.remove()
        raise
    return chosen


def ready_timeout_s() -> float:
    return float(os.environ.get(READY_TIMEOUT_VARIABLE, DEFAULT_READY_TIMEOUT_S))


def _wait_ready(chosen: ChosenGroup) -> None:
    group = chosen.group
    timeout = ready_timeout_s()
    if _table(group).get("state") == "REMOVED":
        raise PlacementError(
            f"placement group {group.id.hex()!r} (from {chosen.source!r}) was removed; create a new one"
        )
    if group.wait(timeout_seconds=timeout):
        return
    raise PlacementError(
        f"placement group {group.id.hex()!r} (from {chosen.source!r}) was not ready within {timeout:g} s.\n"
        f"  needed:    {group.bundle_specs!r}\n"
        f"  free now:  {_relevant(ray.available_resources(), group)!r}\n"
        f"  cluster:   {_relevant(ray.cluster_resources(), group)!r}\n"
        f"  Free or add the missing resources, or raise {READY_TIMEOUT_VARIABLE} where nodes are still starting."
    )


def _relevant(resources: dict[str, float], group: PlacementGroup) -> dict[str, float]:
    wanted = {name for bundle in group.bundle_specs for name in bundle}
    return {name: resources.get(name, 0.0) for name in sorted(wanted)}


def _table(group: PlacementGroup) -> dict[str, Any]:
    return placement_group_table(group)


def bundle_nodes(group: PlacementGroup) -> list[str]:
    """Node id (hex) of each bundle. Node ids, not addresses: two raylets of one machine share an address."""
    nodes = _table(group)["bundles_to_node_id"]
    return [nodes[index] for index in range(len(group.bundle_specs))]


def bundle_indices_from_environment() -> list[int] | None:
    """`SGLANG_RAY_BUNDLE_INDICES` ("3,1") as a list, None when unset.

    Raises:
        ValueError: an entry is not an integer.
    """
    text = envs.SGLANG_RAY_BUNDLE_INDICES.get()
    if not text:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(
            f"SGLANG_RAY_BUNDLE_INDICES={text!r} is not a comma-separated list of bundle numbers"
        ) from error


def assign_bundles(
    bundles: Sequence[dict[str, float]],
    *,
    ranks: int,
    resource: str,
    one_device_per_bundle: bool,
    indices: Sequence[int] | None = None,
    nodes: Sequence[str] | None = None,
    engine_node: str | None = None,
) -> list[int]:
    """Bundle index of each rank, in rank order. Pure: no cluster is asked.

    Args:
        bundles: the group's bundle specifications.
        ranks: how many ranks the engine has.
        resource: what one rank takes one unit of (`CPU` or `GPU`).
        one_device_per_bundle: refuse bundles with more than one GPU, and never put two ranks in one.
        indices: bundles to use, in rank order; None takes those that have the resource, the engine's node first.
        nodes, engine_node: node id of each bundle and of the launching process, to place rank 0 beside it.

    Raises:
        ValueError: the group cannot hold the ranks as asked, with what was needed and what was found.
    """
    found = f"found {len(bundles)} bundle(s): {list(bundles)!r}"
    if indices is None:
        candidates = [i for i, bundle in enumerate(bundles) if bundle.get(resource, 0) >= 1]
        if nodes is not None and engine_node is not None:
            candidates.sort(key=lambda i: nodes[i] != engine_node)
    else:
        candidates = _checked_indices(indices, len(bundles))
    slots = _slots(
        bundles, candidates, resource, one_device_per_bundle, explicit=indices is not None
    )
    if indices is not None and len(slots) != ranks:
        raise ValueError(
            f"SGLANG_RAY_BUNDLE_INDICES={list(indices)!r} gives {len(slots)} place(s) with one {resource} each, "
            f"needed exactly {ranks} (one per rank); {found}"
        )
    if len(slots) < ranks:
        raise ValueError(
            f"the placement group is too small: needed {ranks} bundle place(s) with one {resource} each, "
            f"found {len(slots)} in {len(bundles)} bundle(s): {list(bundles)!r}"
        )
    chosen = slots[:ranks]
    if nodes is not None and engine_node is not None and nodes[chosen[0]] != engine_node:
        raise ValueError(
            f"rank 0 would run on node {nodes[chosen[0]]!r} (bundle {chosen[0]}), but the launching process runs on "
            f"{engine_node!r}: they talk over local sockets. Name a bundle of that node first in "
            f"SGLANG_RAY_BUNDLE_INDICES (here: {[i for i, n in enumerate(nodes) if n == engine_node]!r}), "
            f"or launch from the node of that bundle."
        )
    return chosen


def _checked_indices(indices: Sequence[int], total: int) -> list[int]:
    if len(set(indices)) != len(indices):
        raise ValueError(f"SGLANG_RAY_BUNDLE_INDICES has duplicates: {list(indices)!r}")
    if outside := [i for i in indices if not 0 <= i < total]:
        raise ValueError(
            f"SGLANG_RAY_BUNDLE_INDICES names {outside!r}, but the group has bundles 0 to {total - 1}"
        )
    return list(indices)


def _slots(
    bundles: Sequence[dict[str, float]],
    candidates: Sequence[int],
    resource: str,
    one_device_per_bundle: bool,
    *,
    explicit: bool,
) -> list[int]:
    """Each candidate bundle, once for every rank that it can hold."""
    slots: list[int] = []
    for index in candidates:
        devices = int(bundles[index].get(resource, 0))
        if devices < 1 and explicit:
            raise ValueError(f"bundle {index} has no {resource}: {dict(bundles[index])!r}")
        if one_device_per_bundle:
            if resource == "GPU" and devices > 1:
                raise ValueError(
                    f"bundle {index} has {devices} GPUs where one is asked ({dict(bundles[index])!r}); give the "
                    f"engine a group with one GPU a bundle"
                )
            devices = 1
        slots.extend([index] * devices)
    return slots
