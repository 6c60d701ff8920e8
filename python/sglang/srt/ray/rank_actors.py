"""The SchedulerActors of one engine: make them on their bundles, wait until all are ready, end them.

Upstream creates actors in four places, for GPU bundles only, waits without a deadline and never awaits their event
loops; this module is the one place, for every topology, and is what the seam in `RayEngine._launch_scheduler_processes`
calls. `liveness.py` watches the ranks from then on; `launch.py` builds an engine on top.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sglang.srt.layers.dp_attention import compute_dp_attention_world_info
from sglang.srt.mem_cache.hicache_storage import merge_scheduler_info_layouts
from sglang.srt.ray import placement
from sglang.srt.ray.cluster import namespace_of
from sglang.srt.ray.engine import RaySchedulerInitResult
from sglang.srt.ray.hosted_engine import parts_being_launched
from sglang.srt.ray.identity import free_engine_index, get_scheduler_actor_name
from sglang.srt.ray.liveness import EngineWatch, RankSpec, cause_of
from sglang.srt.ray.rank_environment import rank_environments
from sglang.srt.ray.replicas import ReplicaRouter
from sglang.srt.ray.scheduler_actor import SchedulerActor
from sglang.srt.runtime_context import get_device, get_exec, get_parallel
from sglang.srt.server_args import PortArgs, ServerArgs

logger = logging.getLogger(__name__)

LAUNCH_TIMEOUT_VARIABLE = "SGLANG_RAY_LAUNCH_TIMEOUT_S"
DEFAULT_LAUNCH_TIMEOUT_S = 1800.0  # hundreds of GB from a network disk take that long
UNLINK_TIMEOUT_S = 60.0


class LaunchError(RuntimeError):
    """An engine could not be started; everything that was started for it has been ended."""


def rank_specs(
    *,
    tp_size: int,
    pp_size: int,
    dp_size: int = 1,
    attention_dp: Callable[[int], int] | None = None,
) -> list[RankSpec]:
    """All ranks in world order: replicas outside, then pipeline stages, tensor-parallel ranks inside.

    Args:
        attention_dp: with DP attention, the DP rank of a TP rank; there are no replicas then.
    """
    replicas = range(1 if attention_dp else dp_size)
    coordinates = [
        (attention_dp(tp_rank) if attention_dp else replica, pp_rank, tp_rank)
        for replica in replicas
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    ]
    return [
        RankSpec(rank=rank, dp_rank=dp_rank, pp_rank=pp_rank, tp_rank=tp_rank)
        for rank, (dp_rank, pp_rank, tp_rank) in enumerate(coordinates)
    ]


def published_rank_specs() -> list[RankSpec]:
    """The ranks of the configuration that this process has published."""
    parallel = get_parallel()

    def attention_dp(tp_rank: int) -> int:
        return compute_dp_attention_world_info(
            tp_rank, parallel.tp_size, parallel.attn_dp_size, parallel.attn_cp_size
        )[2]

    return rank_specs(
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        dp_size=parallel.num_dp_ranks,
        attention_dp=attention_dp if parallel.attn_dp_enabled else None,
    )


@dataclasses.dataclass
class RankActors(RaySchedulerInitResult):
    """Upstream's launch result, with what is needed to watch and to end the actors."""

    specs: list[RankSpec] = dataclasses.field(default_factory=list)
    places: list[placement.Place] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    namespace: str | None = None
    chosen_group: placement.ChosenGroup | None = None
    watch: EngineWatch | None = None
    router: ReplicaRouter | None = None
    port_args: list[PortArgs] = dataclasses.field(default_factory=list)
    parts: Any = None
    """The `hosted_engine.EngineParts` that these ranks belong to."""

    @property
    def group(self) -> Any:
        """The placement group that holds the ranks."""
        assert self.chosen_group is not None
        return self.chosen_group.group

    def end(self) -> None:
        """Stop routing, kill the actors, remove the placement group if it is ours. May be called twice."""
        if self.watch is not None:
            self.watch.stop()
        if self.router is not None:
            self.router.close()
        if not ray.is_initialized():
            return  # the cluster connection is gone, and with it everything that this job owned
        end_actors(self.scheduler_actors)
        if self.chosen_group is not None:
            self.chosen_group.remove()


def launch_rank_actors(
    server_args: ServerArgs, port_args: PortArgs, explicit_group: Any | None
) -> RankActors:
    """Start every rank of an engine, and with data parallelism the router, and return when all are ready.

    Raises:
        ValueError, placement.PlacementError: the group can't hold the engine.
        identity.NameTakenError: another engine lives in these bundles.
        LaunchError: a rank failed or did not get ready in time; the cause is chained.
    """
    parallel, device = get_parallel(), get_device().device
    specs = published_rank_specs()
    replicas = 1 if parallel.attn_dp_enabled else parallel.num_dp_ranks
    namespace = namespace_of(server_args)
    with contextlib.ExitStack() as undo:
        chosen = placement.choose_group(
            explicit_group, device=device, ranks=len(specs), nodes=parallel.nnodes
        )
        undo.callback(chosen.remove)
        places = placement.place_ranks(chosen, device=device, ranks=len(specs), replicas=replicas)
        router = _router(server_args, port_args)
        if router is not None:
            undo.callback(router.close)
        ranks = RankActors(
            scheduler_infos=[],
            specs=specs,
            places=places,
            namespace=namespace,
            chosen_group=chosen,
            router=router,
            port_args=[port_args, *(router.port_args_of_replicas if router else ())],
        )
        undo.callback(end_actors, ranks.scheduler_actors)
        parts_being_launched().ranks = ranks
        _create_actors(ranks, server_args, port_args, replica_size=len(specs) // replicas)
        infos = _wait_until_ready(specs, ranks.scheduler_actors)
        _unlink_message_queues(specs, ranks.scheduler_actors)
        undo.pop_all()
    _begin(ranks, infos)
    return ranks


def _router(server_args: ServerArgs, port_args: PortArgs) -> ReplicaRouter | None:
    if get_parallel().num_dp_ranks == 1:
        return None
    return ReplicaRouter(server_args, port_args, engine_ip=ray.util.get_node_ip_address())


def _begin(ranks: RankActors, infos: list[dict[str, Any]]) -> None:
    """Let the event loops run, and watch them."""
    if ranks.router is not None:
        infos = [ranks.router.engine_info(infos)]
    else:
        merge_scheduler_info_layouts(infos)
    ranks.scheduler_infos.extend(infos)
    loops = [actor.run_event_loop.remote() for actor in ranks.scheduler_actors]
    ranks.watch = EngineWatch(ranks.specs, loops)
    ranks.block_until_scheduler_exits = ranks.watch.wait
    if ranks.router is not None:
        ranks.router.start(ranks.watch.fail)


def _create_actors(
    ranks: RankActors, server_args: ServerArgs, port_args: PortArgs, *, replica_size: int
) -> None:
    """Make all actors, without waiting for any; they land in `ranks.scheduler_actors` one by one."""
    device = get_device().device
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    leaders = [
        addresses[ranks.places[rank // replica_size * replica_size].node]
        for rank in range(len(ranks.specs))
    ]
    environments = rank_environments(
        [place.node for place in ranks.places],
        device=device,
        memory_saver=get_exec().features.enable_memory_saver,
    )
    ranks.names = _free_names(ranks, leaders, placement.device_resource(device))
    actor_class: Any = SchedulerActor  # wrapped by @ray.remote, which type checkers do not see
    for rank, spec in enumerate(ranks.specs):
        ports = port_args if ranks.router is None else ranks.router.ports_of(spec)
        actor = actor_class.options(
            name=ranks.names[rank],
            namespace=ranks.namespace,
            runtime_env={"env_vars": environments[rank]},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=ranks.group,
                placement_group_bundle_index=ranks.places[rank].bundle,
            ),
            **placement.actor_resources(device),
        ).remote(
            server_args=server_args,
            port_args=ports,
            gpu_id=0,
            tp_rank=spec.tp_rank,
            pp_rank=spec.pp_rank,
            dp_rank=spec.dp_rank,
            dist_init_addr=f"{leaders[rank]}:{ports.nccl_port}",
        )
        ranks.scheduler_actors.append(actor)


def _free_names(ranks: RankActors, leaders: Sequence[str], resource: str) -> list[str]:
    """A name for each rank; `leaders` are the addresses of the rank 0 of each one's replica."""

    def names_of(engine_index: int) -> list[str]:
        return [
            get_scheduler_actor_name(
                ranks.group,
                node_ip=leader,
                dp_rank=spec.dp_rank,
                pp_rank=spec.pp_rank,
                tp_rank=spec.tp_rank,
                bundle_index=place.bundle,
                engine_index=engine_index,
            )
            for spec, place, leader in zip(ranks.specs, ranks.places, leaders, strict=True)
        ]

    bundles = ranks.group.bundle_specs
    shared = any(bundles[place.bundle].get(resource, 0) > 1 for place in ranks.places)
    return names_of(free_engine_index(names_of, shared=shared, namespace=ranks.namespace))


def _wait_until_ready(specs: Sequence[RankSpec], actors: Sequence[Any]) -> list[dict[str, Any]]:
    """Each rank's init info; fails as soon as one rank fails, whatever the others do."""
    timeout = float(os.environ.get(LAUNCH_TIMEOUT_VARIABLE, DEFAULT_LAUNCH_TIMEOUT_S))
    deadline = time.monotonic() + timeout
    by_ref = {actor.get_info.remote(): spec for spec, actor in zip(specs, actors, strict=True)}
    pending = list(by_ref)
    while pending:
        ready, pending = ray.wait(
            pending, num_returns=1, timeout=max(deadline - time.monotonic(), 0.0)
        )
        if not ready:
            late = [str(by_ref[ref]) for ref in pending]
            raise LaunchError(
                f"{', '.join(late)} did not get ready within {timeout:g} s ({LAUNCH_TIMEOUT_VARIABLE} sets the limit)"
            )
        try:
            ray.get(ready)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"{by_ref[ready[0]]} could not start: {cause_of(error)}") from error
    return ray.get(list(by_ref))


def _unlink_message_queues(specs: Sequence[RankSpec], actors: Sequence[Any]) -> None:
    """After this a rank may be killed at any time and leaves no shared memory behind."""
    by_ref = {
        actor.unlink_message_queues.remote(): spec
        for spec, actor in zip(specs, actors, strict=True)
    }
    _, late = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=UNLINK_TIMEOUT_S)
    if late:
        raise LaunchError(
            f"{', '.join(str(by_ref[ref]) for ref in late)} did not answer within {UNLINK_TIMEOUT_S:g} s of being ready"
        )
    for ref, spec in by_ref.items():
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"{spec} could not start: {cause_of(error)}") from error


def end_actors(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)
