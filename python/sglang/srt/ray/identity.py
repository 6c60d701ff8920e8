"""Names of the ranks' actors: how any job of the cluster finds them, and how a new engine gets a free one.

A name follows from the placement group and the rank's place in it, so a trainer can compute it without asking the
engine. Upstream cuts the group id to 8 digits and gives up when a name is taken; here a name whose holder is dying is
waited for, and one whose holder lives is refused or, in a bundle that several engines share, passed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

NAME_TIMEOUT_S = 20.0
_ANSWER_S = 2.0
_POLL_S = 0.1


class NameTakenError(RuntimeError):
    """A living actor holds the name that a new rank needs."""


def get_scheduler_actor_name(
    placement_group: Any,
    *,
    node_ip: str,
    dp_rank: int,
    pp_rank: int,
    tp_rank: int,
    bundle_index: int,
    engine_index: int = 0,
) -> str:
    """The Ray name of a rank's actor; look it up in the engine's namespace with `ray.get_actor`.

    Args:
        placement_group: the engine's group, or its id in hex.
        node_ip: address of the node of the rank 0 of this rank's replica.
        dp_rank, pp_rank, tp_rank: the rank's coordinates.
        bundle_index: the bundle that holds the rank.
        engine_index: which of the engines that share a node-sized bundle, in order of their start.
    """
    group_id = placement_group if isinstance(placement_group, str) else placement_group.id.hex()
    name = (
        f"sglang_scheduler_node{node_ip}_pg{group_id}_bundle{bundle_index}"
        f"_dp{dp_rank}_pp{pp_rank}_tp{tp_rank}"
    )
    return f"{name}_engine{engine_index}" if engine_index else name


def free_engine_index(
    names_of: Callable[[int], Sequence[str]], *, shared: bool, namespace: str | None
) -> int:
    """The first engine index whose names nobody living holds; waits while a dying actor still owns one.

    Args:
        names_of: the names of all ranks for an engine index.
        shared: whether several engines may share a bundle; if not, a living holder is an error.

    Raises:
        NameTakenError: a holder lives, or did not vanish in time.
    """
    index = 0
    while True:
        taken = [name for name in names_of(index) if not await_name(name, namespace=namespace)]
        if not taken:
            return index
        if not shared:
            raise NameTakenError(
                f"a living engine holds the actor name(s) {taken!r} (namespace {namespace or _own_namespace()!r}): "
                f"shut that engine down, or give this one other bundles (SGLANG_RAY_BUNDLE_INDICES)"
            )
        index += 1


def await_name(name: str, *, namespace: str | None, timeout_s: float = NAME_TIMEOUT_S) -> bool:
    """Whether `name` is free, after waiting for a dying holder to vanish. False if its holder lives.

    Raises:
        NameTakenError: the holder is dead, but the name is not free within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while (holder := _holder(name, namespace)) is not None:
        if _lives(holder):
            return False
        # A dead actor keeps its name for as long as anybody has a handle of it (ray 2.60); killing it once more frees
        # the name at once.
        ray.kill(holder)
        if time.monotonic() > deadline:
            raise NameTakenError(
                f"actor name {name!r} still belongs to a dead actor after {timeout_s:g} s; restart the cluster's "
                f"control process (GCS), or use other bundles"
            )
        time.sleep(_POLL_S)
    return True


def _holder(name: str, namespace: str | None) -> Any | None:
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:  # how Ray says that nobody has the name
        return None


def _lives(holder: Any) -> bool:
    """Whether the actor's process answers, or is at least not known to be gone (a rank that still loads is busy)."""
    answer = holder.__ray_ready__.remote()
    ready, _ = ray.wait([answer], timeout=_ANSWER_S)
    if not ready:
        return True
    try:
        ray.get(answer)
    except ray.exceptions.RayActorError:
        return False
    return True


def _own_namespace() -> str:
    return str(ray.get_runtime_context().namespace)
