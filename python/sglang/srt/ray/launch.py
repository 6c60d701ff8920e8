"""Launch an engine inside the caller's own process and serve it on a thread of the caller's choice.

`launch_engine` returns what existing trainers unpack (six values) together with what they need to end it; `serve_http`
blocks in uvicorn. The stand-alone server of `server_process.py` is the same two calls with a process around them.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.ray.caller_process import only_server
from sglang.srt.ray.liveness import EngineFailedError
from sglang.srt.ray.rank_actors import RankActors
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_LAST_ANSWERS_S = 1.0  # after a failure: time for waiting requests and health probes to be told, before the port closes


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

    @property
    def failure(self) -> EngineFailedError | None:
        """Why the engine is dead; None while it lives."""
        watch = self.scheduler_init_result.watch
        return None if watch is None else watch.failure

    def shutdown(self) -> None:
        """End the HTTP server, the ranks, the detokenizer and an own placement group; nothing else.

        May be called twice, from any thread.
        """
        with self._ended:
            if (stop_server := self.tokenizer_manager._server_stop_hook) is not None:
                stop_server()
            self.scheduler_init_result.parts.end()


def launch_engine(server_args: ServerArgs, *, placement_group: Any | None = None) -> LaunchedEngine:
    """Start an engine: its ranks as Ray actors, its tokenizer in this process. Blocks until every rank is ready.

    May be called on any thread, which may end afterwards. Without a Ray context it connects to a running cluster, or
    starts a local one, in the namespace `server_args.ray_namespace`.

    Args:
        server_args: as for `launch_server`; `use_ray` is implied.
        placement_group: where the ranks go; see `placement.py` for the rule that applies without it.

    Raises:
        ValueError, PlacementError: the placement group can't hold the engine.
        NameTakenError: another engine lives in the same bundles.
        EngineConflictError: this process runs an engine with another configuration.
        LaunchError: a rank could not start. Whatever had been started is gone again.
    """
    from sglang.srt.ray.engine import RayEngine

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


def serve_http(
    engine: LaunchedEngine,
    server_args: ServerArgs,
    *,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Serve the engine's HTTP endpoints. Blocks until the server is stopped, on whichever thread calls it.

    Args:
        on_ready: called once the warm-up request was answered, on a thread of the server's.

    Raises:
        EngineFailedError: the server stopped because a part of the engine died (`RankDiedError`: a rank) or because
            the warm-up request failed (`WarmupFailedError`).
        EngineConflictError: this process serves another engine.
    """
    from sglang.srt.entrypoints.http_server import _setup_and_run_http_server, app
    from sglang.srt.ray.warmup import hosted_warmup
    from sglang.srt.ray.weight_routes import add_weight_routes

    ranks = engine.scheduler_init_result
    assert ranks.watch is not None

    def stop_soon(failure: EngineFailedError) -> None:
        timer = threading.Timer(_LAST_ANSWERS_S, stop)
        timer.daemon = True
        timer.start()

    def stop() -> None:
        if (stop_server := engine.tokenizer_manager._server_stop_hook) is not None:
            stop_server()

    app.add_exception_handler(EngineFailedError, answer_failure)
    add_weight_routes(app, getattr(engine.tokenizer_manager, "weight_fence", None))
    with only_server(engine):
        ranks.watch.on_failure(stop_soon)
        _setup_and_run_http_server(
            server_args,
            engine.tokenizer_manager,
            engine.template_manager,
            engine.port_args,
            ranks.scheduler_infos,
            engine.subprocess_watchdog,
            execute_warmup_func=hosted_warmup(ranks.watch.fail),
            launch_callback=on_ready,
        )
    if ranks.watch.failure is not None:
        raise ranks.watch.failure


async def answer_failure(request: Any, failure: Exception) -> Any:
    from fastapi.responses import JSONResponse

    error = {"type": type(failure).__name__, "message": str(failure), "code": 503}
    return JSONResponse({"error": error}, status_code=503)


def shutdown_ray_engine(engine: Any) -> None:
    """What `RayEngine.shutdown` does: as upstream's, but it never touches a process that the engine did not start."""
    atexit.unregister(engine.shutdown)
    result = getattr(engine, "_scheduler_init_result", None)
    if isinstance(
        result, RankActors
    ):  # else the launch failed, and whatever it had started was ended there
        result.parts.end()
    if (send_to_rpc := getattr(engine, "send_to_rpc", None)) is not None:
        engine.send_to_rpc = None
        send_to_rpc.close(linger=0)
        send_to_rpc.context.term()
    if (loop := getattr(engine, "loop", None)) is not None:
        loop.end()
