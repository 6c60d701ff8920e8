"""The SchedulerActors of one engine: make them on their bundles, wait until all are ready, watch them, end them.

Upstream creates actors inside `RayEngine._launch_scheduler_processes`, for GPU bundles only, waits without a deadline
and never awaits their event loops; this module is what that function's seam calls. `launch.py` builds an engine on top.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sglang.srt.mem_cache.hicache_storage import merge_scheduler_info_layouts
from sglang.srt.ray import placement
from sglang.srt.ray.engine import RaySchedulerInitResult
from sglang.srt.ray.scheduler_actor import SchedulerActor
from sglang.srt.runtime_context import get_device, get_parallel
from sglang.srt.server_args import PortArgs, ServerArgs

logger = logging.getLogger(__name__)

LAUNCH_TIMEOUT_VARIABLE = "SGLANG_RAY_LAUNCH_TIMEOUT_S"
DEFAULT_LAUNCH_TIMEOUT_S = 1800.0  # hundreds of GB from a network disk take that long
_POLL_S = 1.0


class LaunchError(RuntimeError):
    """An engine could not be started; everything that was started for it has been ended."""


class RankDiedError(RuntimeError):
    """A rank's event loop ended while the engine was in use."""


_unfinished: contextvars.ContextVar[list[RankActors] | None] = contextvars.ContextVar(
    "sglang_ray_unfinished_launch", default=None
)


@contextlib.contextmanager
def ended_on_failure() -> Iterator[None]:
    """End what a launch inside the `with` block had started if the launch fails: ranks, own group, detokenizers."""
    children = set(multiprocessing.active_children())
    started: list[RankActors] = []
    token = _unfinished.set(started)
    try:
        yield
    except BaseException:
        for ranks in started:
            ranks.end()
        for child in set(multiprocessing.active_children()) - children:
            child.kill()
            child.join(timeout=10)
        raise
    finally:
        _unfinished.reset(token)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSpec:
    """One rank: its index in the engine, and its coordinates."""

    rank: int
    dp_rank: int
    pp_rank: int
    tp_rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} (dp {self.dp_rank}, pp {self.pp_rank}, tp {self.tp_rank})"


def rank_specs(*, tp_size: int, pp_size: int) -> list[RankSpec]:
    """All ranks of one replica in world order: pipeline stages outside, tensor-parallel ranks inside."""
    return [
        RankSpec(rank=pp_rank * tp_size + tp_rank, dp_rank=0, pp_rank=pp_rank, tp_rank=tp_rank)
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    ]


@dataclasses.dataclass
class RankActors(RaySchedulerInitResult):
    """Upstream's launch result, with what is needed to watch and to end the actors."""

    specs: list[RankSpec] = dataclasses.field(default_factory=list)
    chosen_group: placement.ChosenGroup | None = None
    watch: RankWatch | None = None

    def end(self) -> None:
        """Kill the actors and remove the placement group if it is ours. May be called twice."""
        if self.watch is not None:
            self.watch.stop()
        if self.engine_info_bootstrap_server is not None:
            self.engine_info_bootstrap_server.close()
        if not ray.is_initialized():
            return  # the cluster connection is gone, and with it everything that this job owned
        end_actors(self.scheduler_actors)
        if self.chosen_group is not None:
            self.chosen_group.remove()


def launch_rank_actors(
    server_args: ServerArgs, port_args: PortArgs, explicit_group: Any | None
) -> RankActors:
    """Start every rank of an engine without data parallelism and return when all are ready.

    Raises:
        ValueError, placement.PlacementError: the group can't hold the engine.
        LaunchError: a rank failed or did not get ready in time; the cause is chained.
    """
    parallel, device = get_parallel(), get_device().device
    specs = rank_specs(tp_size=parallel.tp_size, pp_size=parallel.pp_size)
    chosen = placement.choose_group(
        explicit_group, device=device, ranks=len(specs), nodes=parallel.nnodes
    )
    actors: list[Any] = []
    try:
        bundles = _bundles(chosen, device, len(specs))
        address = f"{ray.util.get_node_ip_address()}:{port_args.nccl_port}"
        actors += [
            _create_actor(chosen, bundle, spec, server_args, port_args, address, device)
            for spec, bundle in zip(specs, bundles, strict=True)
        ]
        infos = _wait_until_ready(specs, actors)
    except BaseException:
        end_actors(actors)
        chosen.remove()
        raise
    merge_scheduler_info_layouts(infos)
    loops = [actor.run_event_loop.remote() for actor in actors]
    watch = RankWatch(specs, loops)
    ranks = RankActors(
        scheduler_infos=infos,
        block_until_scheduler_exits=watch.wait,
        scheduler_actors=actors,
        specs=specs,
        chosen_group=chosen,
        watch=watch,
    )
    if (started := _unfinished.get()) is not None:
        started.append(ranks)
    return ranks


def _bundles(chosen: placement.ChosenGroup, device: str, ranks: int) -> list[int]:
    return placement.assign_bundles(
        chosen.group.bundle_specs,
        ranks=ranks,
        resource=placement.device_resource(device),
        one_device_per_bundle=chosen.one_device_per_bundle,
        indices=None if chosen.owned else placement.bundle_indices_from_environment(),
        nodes=placement.bundle_nodes(chosen.group),
        engine_node=ray.get_runtime_context().get_node_id(),
    )


def _create_actor(
    chosen: placement.ChosenGroup,
    bundle: int,
    spec: RankSpec,
    server_args: ServerArgs,
    port_args: PortArgs,
    dist_init_addr: str,
    device: str,
) -> Any:
    group = chosen.group
    actor_class: Any = SchedulerActor  # wrapped by @ray.remote, which type checkers do not see
    return actor_class.options(
        name=scheduler_actor_name(group.id.hex(), bundle, spec),
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        ),
        **placement.actor_resources(device),
    ).remote(
        server_args=server_args,
        port_args=port_args,
        gpu_id=0,
        tp_rank=spec.tp_rank,
        pp_rank=spec.pp_rank,
        dp_rank=spec.dp_rank,
        dist_init_addr=dist_init_addr,
    )


def scheduler_actor_name(group_id: str, bundle: int, spec: RankSpec) -> str:
    """The Ray name of a rank's actor: unique by group, bundle and rank."""
    return f"sglang_scheduler_pg{group_id}_bundle{bundle}_dp{spec.dp_rank}_pp{spec.pp_rank}_tp{spec.tp_rank}"


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
            raise LaunchError(f"{by_ref[ready[0]]} could not start: {_cause(error)}") from error
    return ray.get(list(by_ref))


def _cause(error: ray.exceptions.RayError) -> str:
    """The last line that says what went wrong on the rank, out of Ray's long report."""
    cause = getattr(error, "cause", None)
    if cause is not None and not isinstance(cause, ray.exceptions.RayError):
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return (errors or lines or [repr(error)])[-1]


def end_actors(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


class RankWatch:
    """Awaits the ranks' event loops on a daemon thread, so that a dead rank is noticed within about a second."""

    def __init__(self, specs: Sequence[RankSpec], loops: Sequence[ray.ObjectRef]) -> None:
        self._specs = dict(zip(loops, specs, strict=True))
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._callbacks: list[Callable[[RankDiedError], None]] = []
        self._lock = threading.Lock()
        self.failure: RankDiedError | None = None
        self._thread = threading.Thread(target=self._run, name="sglang-rank-watch", daemon=True)
        self._thread.start()

    def on_failure(self, callback: Callable[[RankDiedError], None]) -> None:
        """Have `callback` called once, on the watching thread (or here, if a rank is dead already)."""
        with self._lock:
            if self.failure is None:
                self._callbacks.append(callback)
                return
        callback(self.failure)

    def stop(self) -> None:
        """Stop watching: what happens to the ranks from now on was asked for."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5 * _POLL_S)

    def wait(self) -> None:
        """Block until a rank dies or the watch is stopped.

        Raises:
            RankDiedError: naming the rank and the cause.
        """
        self._ended.wait()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                ready, _ = ray.wait(list(self._specs), num_returns=1, timeout=_POLL_S)
                if ready and not self._stopped.is_set():
                    self._report(ready[0])
                    return
        finally:
            self._ended.set()

    def _report(self, loop: ray.ObjectRef) -> None:
        try:
            ray.get(loop)
            cause = "its event loop returned"
        except ray.exceptions.RayError as error:
            cause = _cause(error)
        failure = RankDiedError(f"{self._specs[loop]} died: {cause}")
        logger.error("%s", failure)
        with self._lock:
            self.failure = failure
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(failure)
