"""Launch an engine inside the caller's own process and serve it on a thread of the caller's choice.

`launch_engine` returns what existing trainers unpack (six values) together with what they need to end it; `serve_http`
blocks in uvicorn. The stand-alone server of `server_process.py` is the same two calls with a process around them.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator
from typing import Any

from sglang.srt.ray.rank_actors import RankActors, RankDiedError, ended_on_failure
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import kill_process_tree

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class LaunchedEngine:
    """A running engine. Unpacks as the six values that `RayEngine._launch_subprocesses` returns."""

    tokenizer_manager: Any
    template_manager: Any
    port_args: Any
    scheduler_init_result: RankActors
    subprocess_watchdog: Any
    weight_cache_daemon_procs: Any
    _ended: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __iter__(self) -> Iterator[Any]:
        return iter(
            (
                self.tokenizer_manager,
                self.template_manager,
                self.port_args,
                self.scheduler_init_result,
                self.subprocess_watchdog,
                self.weight_cache_daemon_procs,
            )
        )

    def __getitem__(self, index: int) -> Any:
        return list(self)[index]

    def __len__(self) -> int:
        return 6

    @property
    def scheduler_actors(self) -> list[Any]:
        """Actor handles, in rank order."""
        return self.scheduler_init_result.scheduler_actors

    def shutdown(self) -> None:
        """End the HTTP server, the ranks, the detokenizer and an own placement group; nothing else.

        May be called twice.
        """
        with self._ended:
            if (stop_server := self.tokenizer_manager._server_stop_hook) is not None:
                stop_server()
            end_launched(self.subprocess_watchdog, self.scheduler_init_result)


def end_launched(subprocess_watchdog: Any, scheduler_init_result: RankActors) -> None:
    """End what a launch started, and only that.

    Upstream's shutdown kills every child of the process, those that Ray started included.
    """
    if subprocess_watchdog is not None:
        subprocess_watchdog.stop()
    scheduler_init_result.end()
    for pid in scheduler_init_result.all_child_pids:
        kill_process_tree(pid, wait_timeout=10)
    scheduler_init_result.all_child_pids.clear()


def launch_engine(server_args: ServerArgs, *, placement_group: Any | None = None) -> LaunchedEngine:
    """Start an engine: its ranks as Ray actors, its tokenizer in this process. Blocks until every rank is ready.

    Args:
        server_args: as for `launch_server`; `use_ray` is implied.
        placement_group: where the ranks go; see `placement.py` for the rule that applies without it.

    Raises:
        ValueError, PlacementError: the placement group can't hold the engine.
        LaunchError: a rank could not start. Whatever had been started is gone again.
    """
    from sglang.srt.ray.engine import RayEngine

    with ended_on_failure():
        launched: Any = RayEngine._launch_subprocesses(
            server_args,
            init_tokenizer_manager_func=RayEngine.init_tokenizer_manager_func,
            run_scheduler_process_func=RayEngine.run_scheduler_process_func,
            run_detokenizer_process_func=RayEngine.run_detokenizer_process_func,
            placement_group=placement_group,
        )
    manager, templates, ports, ranks, watchdog, weight_caches = launched
    return LaunchedEngine(
        tokenizer_manager=manager,
        template_manager=templates,
        port_args=ports,
        scheduler_init_result=ranks,
        subprocess_watchdog=watchdog,
        weight_cache_daemon_procs=weight_caches,
    )


def serve_http(engine: LaunchedEngine, server_args: ServerArgs) -> None:
    """Serve the engine's HTTP endpoints. Blocks until the server is stopped, on whichever thread calls it.

    Raises:
        RankDiedError: the server stopped because a rank died.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.ray.weight_routes import add_weight_routes

    add_weight_routes(http_server.app, getattr(engine.tokenizer_manager, "weight_fence", None))
    ranks = engine.scheduler_init_result

    def stop(failure: RankDiedError) -> None:
        if (stop_server := engine.tokenizer_manager._server_stop_hook) is not None:
            stop_server()

    if ranks.watch is not None:
        ranks.watch.on_failure(stop)
    http_server._setup_and_run_http_server(
        server_args,
        engine.tokenizer_manager,
        engine.template_manager,
        engine.port_args,
        ranks.scheduler_infos,
        engine.subprocess_watchdog,
        execute_warmup_func=http_server._execute_server_warmup,
    )
    if ranks.watch is not None and ranks.watch.failure is not None:
        raise ranks.watch.failure


def shutdown_ray_engine(engine: Any) -> None:
    """What `RayEngine.shutdown` does: as upstream's, but it never touches a process that the engine did not start."""
    result = getattr(engine, "_scheduler_init_result", None)
    if result is None:
        return  # the launch failed, and whatever it had started was ended there
    if isinstance(result, RankActors):
        end_launched(engine.tokenizer_manager._subprocess_watchdog, result)
    if (send_to_rpc := getattr(engine, "send_to_rpc", None)) is not None:
        send_to_rpc.close(linger=0)
        engine.send_to_rpc = None
