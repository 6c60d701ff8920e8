"""Which bundle of a placement group each rank gets: a pure plan over bundle specifications.

Two shapes of groups exist in the wild: one device a bundle (groups handed over on purpose) and node-sized bundles (the
group that a caller's own actor runs in). Upstream plans the two in separate code paths, by asking every bundle for its
address; here nothing asks a cluster, so that each refusal can be tested, and nodes are told apart by id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sglang.srt.environ import envs


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """The arguments of `assign_bundles`."""

    ranks: int
    replicas: int
    resource: str
    share: float
    one_device_per_bundle: bool
    indices: Sequence[int] | None
    nodes: Sequence[str] | None
    engine_node: str | None


def assign_bundles(
    bundles: Sequence[Mapping[str, float]],
    *,
    ranks: int,
    resource: str,
    one_device_per_bundle: bool,
    indices: Sequence[int] | None = None,
    nodes: Sequence[str] | None = None,
    engine_node: str | None = None,
    replicas: int = 1,
    share: float = 1.0,
) -> list[int]:
    """Bundle index of each rank, in rank order (replicas outside, then pipeline stages, then tensor ranks).

    Args:
        bundles: the group's bundle specifications, or what is free of them.
        ranks: how many ranks the engine has, over all replicas.
        resource: what one rank takes one unit of (`CPU` or `GPU`).
        one_device_per_bundle: refuse bundles with more than one GPU, and never put two ranks in one.
        indices: bundles to use, in rank order; None takes those that have the resource, the engine's node first.
        nodes, engine_node: node id of each bundle and of the launching process, beside which each rank 0 must run.
        replicas: data-parallel replicas, each with a rank 0 that talks to the launching process.
        share: how much of a device one rank takes; below 1 only in bundles of one device at most, because Ray would
            put two ranks on one device of a larger one.

    Raises:
        ValueError: the bundles cannot hold the ranks as asked, with what was needed and what was found.
    """
    request = _Request(
        ranks=ranks,
        replicas=replicas,
        resource=resource,
        share=share,
        one_device_per_bundle=one_device_per_bundle,
        indices=indices,
        nodes=nodes,
        engine_node=engine_node,
    )
    found = f"{len(bundles)} bundle(s): {[dict(bundle) for bundle in bundles]!r}"
    slots = _slots(bundles, _candidates(bundles, request), request)
    if indices is not None:
        if len(slots) < ranks or (one_device_per_bundle and len(slots) != ranks):
            raise ValueError(
                f"SGLANG_RAY_BUNDLE_INDICES={list(indices)!r} gives {len(slots)} place(s) with one {resource} each, "
                f"needed exactly {ranks} (one per rank); found {found}"
            )
        chosen = slots[:ranks]
    elif len(slots) < ranks:
        raise ValueError(
            f"the placement group is too small: needed {ranks} bundle place(s) with one {resource} each, found "
            f"{len(slots)} in {found}"
        )
    else:
        chosen = _leaders_at_home(slots[:ranks], request)
    _check_leaders(chosen, request)
    return chosen


def _candidates(bundles: Sequence[Mapping[str, float]], request: _Request) -> list[int]:
    if request.indices is not None:
        return _checked_indices(request.indices, len(bundles))
    candidates = [
        i for i, bundle in enumerate(bundles) if _fits(bundle.get(request.resource, 0), request)
    ]
    nodes = request.nodes
    if nodes is not None:
        # A node's bundles side by side, so that the ranks of a replica share a node where they can.
        order = {node: place for place, node in reversed(list(enumerate(nodes)))}
        candidates.sort(key=lambda i: (nodes[i] != request.engine_node, order[nodes[i]]))
    return candidates


def _fits(free: float, request: _Request) -> bool:
    return free >= request.share - 1e-6  # Ray counts in steps of 1e-4


def _checked_indices(indices: Sequence[int], total: int) -> list[int]:
    if len(set(indices)) != len(indices):
        raise ValueError(f"SGLANG_RAY_BUNDLE_INDICES has duplicates: {list(indices)!r}")
    if outside := [i for i in indices if not 0 <= i < total]:
        raise ValueError(
            f"SGLANG_RAY_BUNDLE_INDICES names {outside!r}, but the group has bundles 0 to {total - 1}"
        )
    return list(indices)


def _slots(
    bundles: Sequence[Mapping[str, float]], candidates: Sequence[int], request: _Request
) -> list[int]:
    """Each candidate bundle, once for every rank that it can hold."""
    slots: list[int] = []
    for index in candidates:
        free = bundles[index].get(request.resource, 0)
        if request.share < 1 < free:
            raise ValueError(
                f"bundle {index} has {free:g} {request.resource}s; a rank that takes {request.share:g} of one needs "
                f"bundles of one {request.resource} each: {dict(bundles[index])!r}"
            )
        devices = int(free) if request.share == 1 else int(_fits(free, request))
        if devices < 1 and request.indices is not None:
            raise ValueError(f"bundle {index} has no {request.resource}: {dict(bundles[index])!r}")
        if request.one_device_per_bundle:
            if request.resource == "GPU" and devices > 1:
                raise ValueError(
                    f"bundle {index} has {devices} GPUs where one is asked ({dict(bundles[index])!r}); give the "
                    f"engine a group with one GPU a bundle"
                )
            devices = 1
        slots.extend([index] * devices)
    return slots


def _leaders_at_home(slots: Sequence[int], request: _Request) -> list[int]:
    """Share the engine's node evenly among the replicas, so that each replica's rank 0 can be there."""
    if request.replicas == 1 or request.nodes is None:
        return list(slots)
    home = [slot for slot in slots if request.nodes[slot] == request.engine_node]
    away = [slot for slot in slots if request.nodes[slot] != request.engine_node]
    size = request.ranks // request.replicas
    share = len(home) // request.replicas
    if share == 0 or share * request.replicas != len(home):
        return list(slots)
    rest = size - share
    return [
        slot
        for replica in range(request.replicas)
        for slot in (
            *home[replica * share : (replica + 1) * share],
            *away[replica * rest : (replica + 1) * rest],
        )
    ]


def _check_leaders(chosen: Sequence[int], request: _Request) -> None:
    nodes, home = request.nodes, request.engine_node
    if nodes is None or home is None:
        return
    size = request.ranks // request.replicas
    for replica in range(request.replicas):
        bundle = chosen[replica * size]
        if nodes[bundle] != home:
            raise ValueError(
                f"rank {replica * size}{'' if request.replicas == 1 else f' (rank 0 of replica {replica})'} would run "
                f"on node {nodes[bundle]!r} (bundle {bundle}), but the launching process runs on {home!r}, and they "
                f"talk over local sockets. Name bundles of that node for such ranks in SGLANG_RAY_BUNDLE_INDICES "
                f"(here: {[i for i, node in enumerate(nodes) if node == home]!r}), or launch from the node of that "
                f"bundle."
            )
