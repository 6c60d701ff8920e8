"""Which placement group an engine uses, and where in it the ranks find free places.

One rule chooses the group: the explicit keyword, else the group set with `use_placement_group`, else the group
that the calling Ray actor runs in, else a group made (and later removed) by the engine. Upstream decides this
inside its launch function, for GPU bundles only, and waits for ever; here every wait has a deadline and says what the
cluster lacks. Which bundle each rank gets is planned in `bundles.py`, without a cluster.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.placement_group import placement_group as create_placement_group

from sglang.srt.ray.bundles import assign_bundles, bundle_indices_from_environment

READY_TIMEOUT_VARIABLE = "SGLANG_RAY_PLACEMENT_TIMEOUT_S"
DEFAULT_READY_TIMEOUT_S = 60.0
GPU_SHARE_VARIABLE = "SGLANG_RAY_GPUS_PER_RANK"
_POLL_S = 0.2

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
    """Ray resource options of one rank's actor: one CPU per CPU rank, one GPU (or a share) and no CPU otherwise."""
    if device == "cpu":
        return {"num_cpus": 1, "num_gpus": 0}
    return {"num_cpus": 0, "num_gpus": gpu_share()}


def gpu_share() -> float:
    """How much of a GPU a rank asks Ray for: all of it, or what `SGLANG_RAY_GPUS_PER_RANK` says.

    A trainer that shares the GPU takes the rest of the same bundle. It is Ray's bookkeeping alone: how much memory
    each of the two uses is up to `mem_fraction_static` and the trainer.

    Raises:
        ValueError: not a number above 0 and up to 1.
    """
    text = os.environ.get(GPU_SHARE_VARIABLE, "1")
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(
            f"{GPU_SHARE_VARIABLE}={text!r} is not a share of a GPU (above 0, up to 1)"
        )
    return share


def rank_share(device: str) -> float:
    """How much of `device_resource` one rank takes."""
    return 1.0 if device == "cpu" else gpu_share()


def choose_group(
    explicit: PlacementGroup | None, *, device: str, ranks: int, nodes: int
) -> ChosenGroup:
    """Apply the one rule and wait until the group is ready. Called by the launching thread, whose context counts.

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
    if (state := _table(group).get("state")) in ("REMOVED", None):
        found = "was removed" if state else "is unknown to this cluster"
        raise PlacementError(
            f"placement group {group.id.hex()!r} (from {chosen.source!r}) {found}; create a new one"
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where one rank runs."""

    bundle: int
    node: str
    """Node id in hex. Not the address: two raylets of one machine share it."""


def place_ranks(chosen: ChosenGroup, *, device: str, ranks: int, replicas: int) -> list[Place]:
    """The place of each rank, in rank order, where a device is free now; waits for a dying engine's to become free.

    Raises:
        ValueError: the group can't hold the ranks, whatever is free (see `assign_bundles`).
        PlacementError: it could, but others hold its places.
    """
    group, nodes = chosen.group, bundle_nodes(chosen.group)

    def plan(bundles: Sequence[Mapping[str, float]]) -> list[int]:
        return assign_bundles(
            bundles,
            ranks=ranks,
            replicas=replicas,
            resource=device_resource(device),
            share=rank_share(device),
            one_device_per_bundle=chosen.one_device_per_bundle,
            indices=None if chosen.owned else bundle_indices_from_environment(),
            nodes=nodes,
            engine_node=ray.get_runtime_context().get_node_id(),
        )

    planned = plan(group.bundle_specs)
    if not chosen.owned:
        planned = _on_free_bundles(group, device_resource(device), plan)
    return [Place(bundle=index, node=nodes[index]) for index in planned]


def bundle_nodes(group: PlacementGroup) -> list[str]:
    """Node id (hex) of each bundle. Node ids, not addresses: two raylets of one machine share an address."""
    nodes = _table(group)["bundles_to_node_id"]
    return [nodes[index] for index in range(len(group.bundle_specs))]


def _on_free_bundles(
    group: PlacementGroup,
    resource: str,
    plan: Callable[[Sequence[Mapping[str, float]]], list[int]],
) -> list[int]:
    timeout = ready_timeout_s()
    deadline = time.monotonic() + timeout
    while True:
        try:
            return plan(free_bundles(group, resource))
        except ValueError as error:
            # It fits the group as such, so somebody else holds the places: perhaps an engine that is just dying.
            if time.monotonic() > deadline:
                raise PlacementError(
                    f"placement group {group.id.hex()!r} has no room within {timeout:g} s "
                    f"({READY_TIMEOUT_VARIABLE}): another engine or actor holds its bundles. Of what is free now: "
                    f"{error}"
                ) from error
        time.sleep(_POLL_S)


def free_bundles(group: PlacementGroup, resource: str) -> list[dict[str, float]]:
    """What is free of `resource` in each bundle now. Ray names a bundle's share `CPU_group_INDEX_GROUP`."""
    available = ray.available_resources()
    return [
        {resource: available.get(f"{resource}_group_{index}_{group.id.hex()}", 0.0)}
        for index in range(len(group.bundle_specs))
    ]
