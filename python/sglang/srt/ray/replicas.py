"""Data parallelism under Ray: which sockets each rank gets, and the thread that shares requests out to the replicas.

Upstream's controller is kept for its routing and sockets; making actors is taken out of it, because it places them by
its own rules, starts the replicas one after the other, and can't start at all with the published configuration. Its
event loop spins on a core and has no end; this one sleeps until a request comes and can be closed.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

import zmq

from sglang.srt.managers.io_struct import sock_recv
from sglang.srt.ray.data_parallel_controller import RayDataParallelController
from sglang.srt.ray.liveness import EngineFailedError, RankSpec
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

_POLL_MS = 200


class RouterFailedError(EngineFailedError):
    """The thread that routes requests to the data-parallel replicas ended."""


class ReplicaRouter(RayDataParallelController):
    """Routes from the tokenizer to the replicas' rank 0, in the launching process.

    Made before the ranks, since it owns the sockets that they connect to; `start` after they are ready.
    """

    def __init__(self, server_args: ServerArgs, port_args: PortArgs, *, engine_ip: str) -> None:
        self._ports: dict[int | None, PortArgs] = {}
        self._worker_ports: list[int] = []
        self._engine_ip = engine_ip
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        super().__init__(
            server_args,
            port_args,
            placement_group=None,
            bundle_for_node=None,
            rank0_node_ip=engine_ip,
        )

    def _launch_ray_tp_group(
        self,
        server_args: ServerArgs,
        port_args: PortArgs,
        dp_rank: int | None,
        worker_ports: list[int] | None = None,
    ) -> None:
        """Where upstream would make a replica's actors: only note the sockets made for it."""
        self._ports[dp_rank] = port_args
        self._worker_ports = worker_ports or []

    def ports_of(self, spec: RankSpec) -> PortArgs:
        """The addresses that a rank is started with."""
        if not get_parallel().attn_dp_enabled:
            return self._ports[spec.dp_rank]
        # One world for all replicas, so one rendezvous; only the inbox is the replica's own.
        inbox = NetworkAddress(self._engine_ip, self._worker_ports[spec.dp_rank])
        return dataclasses.replace(self._ports[None], scheduler_input_ipc_name=inbox.to_tcp())

    @property
    def port_args_of_replicas(self) -> list[PortArgs]:
        return list(self._ports.values())

    def engine_info(self, infos: list[dict[str, Any]]) -> dict[str, Any]:
        """One handshake out of all ranks' handshakes."""
        self._record_scheduler_init_infos(infos)
        return dict(self.get_init_info())

    def start(self, report: Callable[[EngineFailedError], None]) -> None:
        """Route on a daemon thread from now on; `report` is called there if routing breaks."""

        def route() -> None:
            try:
                self.event_loop()
            except Exception as error:
                logger.exception("routing to the data-parallel replicas broke")
                report(RouterFailedError(f"the data-parallel router failed: {error!r}"))
            finally:
                self.context.destroy(linger=0)

        self._thread = threading.Thread(target=route, name="sglang-dp-router", daemon=True)
        self._thread.start()

    def event_loop(self) -> None:
        inbox: Any = self.recv_from_tokenizer
        while not self._closed.is_set():
            self.soft_watchdog.feed()  # type: ignore[no-untyped-call]
            if inbox.poll(_POLL_MS, zmq.POLLIN):
                self._request_dispatcher(sock_recv(inbox))

    def close(self) -> None:
        """Stop routing and close the sockets. May be called twice, and before `start`."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=20 * _POLL_MS / 1000)
        else:
            self.context.destroy(linger=0)
