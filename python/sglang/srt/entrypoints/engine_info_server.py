"""The bootstrap server of an engine: what its ranks told about themselves, for whoever asks.

It takes the place of upstream's `EngineInfoBootstrapServer` with the same endpoints, which knows transfer-engine
records only, keeps one per TP rank, and binds on a thread that can't report a taken port. It runs on a thread of the
process that hosts the engine; `rank_registration.py` is the ranks' side, `parallelism_info.py` the engine's own port.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse

from sglang.srt.arg_groups import engine_info
from sglang.srt.distributed.rank_parallelism import RankParallelismConfig

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
_ACTOR_TIMEOUT_S = 60.0
_RETRY_AFTER = {"Retry-After": "1"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankKey:
    """Which rank of an engine a record is about."""

    dp_rank: int
    """Replica; 0 without data parallelism. Attention DP is inside the TP group and has no replicas."""
    pp_rank: int
    tp_rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineShape:
    """How many ranks an engine has, and their order: replicas outside, then pipeline stages, then TP ranks."""

    dp_size: int
    pp_size: int
    tp_size: int

    @property
    def num_ranks(self) -> int:
        return self.dp_size * self.pp_size * self.tp_size

    def key(self, rank: int) -> RankKey | None:
        """The rank with this index, in the order of `scheduler_actors`; None if there is none."""
        if not 0 <= rank < self.num_ranks:
            return None
        replica, within = divmod(rank, self.pp_size * self.tp_size)
        return RankKey(
            dp_rank=replica, pp_rank=within // self.tp_size, tp_rank=within % self.tp_size
        )

    def check(self, key: RankKey) -> None:
        """Raises ValueError if this engine has no such rank."""
        if not (
            0 <= key.dp_rank < self.dp_size
            and 0 <= key.pp_rank < self.pp_size
            and 0 <= key.tp_rank < self.tp_size
        ):
            raise ValueError(f"{key!r} is no rank of {self!r}")


class EngineInfoServer:
    """Listens from construction until `close`. Thread-safe.

    Raises:
        OSError: the address can't be bound.
    """

    def __init__(self, *, host: str, port: int, shape: EngineShape) -> None:
        self.shape = shape
        self._parallelism: dict[RankKey, RankParallelismConfig] = {}
        self._seeds: dict[RankKey, tuple[Any, Any]] = {}
        self._lock = threading.Lock()
        self._socket = _bound_socket(host, port)
        self.host, self.port = host, self._socket.getsockname()[1]
        config = uvicorn.Config(self._app(), log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="sglang-engine-info", daemon=True
        )
        self._thread.start()
        self._wait_until_started()
        logger.info("engine info bootstrap server listens on %s:%d", self.host, self.port)

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._socket.close()

    def register_parallelism(self, key: RankKey, config: RankParallelismConfig) -> None:
        """Store what a rank told about itself. The same record may come again, another one may not.

        Raises ValueError if there is no such rank, or it has told something else before.
        """
        self.shape.check(key)
        with self._lock:
            known = self._parallelism.setdefault(key, config)
        if known != config:
            raise ValueError(f"{key!r} registered {known!r} before and {config!r} now")

    def parallelism_config(self, rank: int) -> RankParallelismConfig | None:
        """What the rank with this index told; None while it has not yet. Raises KeyError if there is no such rank."""
        if (key := self.shape.key(rank)) is None:
            raise KeyError(rank)
        return self._parallelism.get(key)

    def get_transfer_engine_info(self, rank: int) -> tuple[Any, Any] | None:
        """Session id and memory regions of the rank with this index, as upstream's server answers."""
        key = self.shape.key(rank)
        return None if key is None else self._seeds.get(key)

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.get("/health")(lambda: PlainTextResponse("OK"))
        app.put("/register_parallelism_config")(self._put_parallelism)
        app.get("/parallelism_config")(self._get_parallelism)
        app.put("/register_transfer_engine_info")(self._put_seed)
        app.get("/get_transfer_engine_info")(self._get_seed)
        return app

    def _put_parallelism(self, data: dict[str, Any]) -> JSONResponse:
        try:
            config = RankParallelismConfig.from_dict(data["parallelism_config"])
            self.register_parallelism(_key_in(data), config)
        except (KeyError, TypeError, ValueError) as error:
            return _refusal(400, f"not a registration: {type(error).__name__}: {error}")
        return JSONResponse({"registered": True})

    def _get_parallelism(self, rank: int) -> JSONResponse:
        try:
            config = self.parallelism_config(rank)
        except KeyError:
            return _refusal(404, f"there is no rank {rank}; this engine has {self.shape.num_ranks}")
        if config is None:
            return _refusal(503, f"rank {rank} has not registered yet; ask again", _RETRY_AFTER)
        return JSONResponse(config.to_dict())

    def _put_seed(self, data: dict[str, Any]) -> JSONResponse:
        try:
            key, info = _key_in(data), data["transfer_engine_info"]
            self.shape.check(key)
            self._seeds[key] = (info["session_id"], info["weights_info_dict"])
        except (KeyError, TypeError, ValueError) as error:
            return _refusal(400, f"not a registration: {type(error).__name__}: {error}")
        return JSONResponse({"registered": True})

    def _get_seed(self, rank: int) -> JSONResponse:
        if (info := self.get_transfer_engine_info(rank)) is None:
            return _refusal(404, f"rank {rank} has registered no memory to seed from")
        return JSONResponse({"rank": rank, "remote_instance_transfer_engine_info": list(info)})

    def _wait_until_started(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(
                    f"the engine info bootstrap server on {self.host}:{self.port} did not start within "
                    f"{_START_TIMEOUT_S:g} s"
                )
            time.sleep(0.01)


def _key_in(data: Mapping[str, Any]) -> RankKey:
    return RankKey(
        dp_rank=data.get("dp_rank", 0), pp_rank=data.get("pp_rank", 0), tp_rank=data["tp_rank"]
    )


def _refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=status, headers=headers)


def _bound_socket(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def start_engine_info_server(server_args: Any) -> EngineInfoServer:
    """Start the server of the engine that these args describe, and write its port into them.

    A port that was asked for is taken or refused; the default one gives way to a free one.

    Raises:
        RuntimeError: the port that was asked for is taken.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view

    server_args.resolve_once()
    cfg = resolving_view(server_args)
    shape = EngineShape(dp_size=cfg.dp_size, pp_size=cfg.pp_size, tp_size=cfg.tp_size)
    host = engine_info.address_of_args(server_args).bind_host
    asked_for = server_args.engine_info_bootstrap_port
    try:
        server = EngineInfoServer(host=host, port=asked_for, shape=shape)
    except OSError as error:
        if asked_for != engine_info.DEFAULT_PORT:
            raise RuntimeError(
                f"engine_info_bootstrap_port={asked_for} can't be bound on {host!r}: {error}; choose another one, or "
                f"leave it out and a free one is taken"
            ) from error
        server = EngineInfoServer(host=host, port=0, shape=shape)
    if server.port != cfg.engine_info_bootstrap_port:
        _declare_port(server_args, server.port)
    return server


def _declare_port(server_args: Any, port: int) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.runtime_context import ParallelContext, RuntimeContext, use_context

    # Args that an earlier launch published refuse declarations, which would come too late for that publication. The
    # launch that is beginning publishes them again, so they are declared as if nothing were published.
    nothing_published = RuntimeContext(parallel=ParallelContext())  # type: ignore[no-untyped-call]
    with use_context(nothing_published):
        declare_resolution(server_args, "engine_info_server", engine_info_bootstrap_port=port)


def with_engine_info_server(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates `Engine._launch_subprocesses`: the server is there before the first rank, and gone if the launch fails.

    The launch's result (`scheduler_init_result.engine_info_bootstrap_server`) owns it from then on.
    """

    @functools.wraps(launch)
    def launch_with_server(cls: type, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        if not engine_info.needs_engine_info_bootstrap(server_args) or server_args.node_rank != 0:
            return launch(cls, server_args, *args, **kwargs)
        from sglang.srt.utils import configure_logger

        configure_logger(server_args)
        server = start_engine_info_server(server_args)
        try:
            launched = launch(cls, server_args, *args, **kwargs)
            launched[3].engine_info_bootstrap_server = server
            _ask_actors(server, getattr(launched[3], "scheduler_actors", []))
        except BaseException:
            server.close()
            raise
        return launched

    return launch_with_server


def close_engine_info_server(launched: Any) -> None:
    """What `Engine.shutdown` calls with the launch's fourth value: the server ends with its engine."""
    if (server := launched.engine_info_bootstrap_server) is not None:
        server.close()


def _ask_actors(server: EngineInfoServer, actors: list[Any]) -> None:
    """Ray's ranks are asked through their handles: they may run on nodes that can't reach a server on this one."""
    if not actors:
        return
    import ray

    refs = [actor.rank_registration.remote() for actor in actors]
    try:
        records = ray.get(refs, timeout=_ACTOR_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError as error:
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        silent = [rank for rank, ref in enumerate(refs) if ref not in done]
        raise RuntimeError(
            f"ranks {silent!r} did not say what they hold within {_ACTOR_TIMEOUT_S:g} s"
        ) from error
    for key, config in records:
        server.register_parallelism(key, config)
