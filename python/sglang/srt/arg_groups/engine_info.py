"""When an engine runs the server that its ranks tell about themselves, and where that server is.

The two predicates are methods of `ServerArgs`. Addresses are computed in one place because three processes need the
same one: the host that binds it, ranks that register, HTTP workers that ask. Everything imports lazily: `server_args`
imports this file.
"""

from __future__ import annotations

import dataclasses
from typing import Any

DEFAULT_PORT = 6789
_WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def registers_parallelism_config(server_args: Any) -> bool:
    """Whether every rank's `RankParallelismConfig` can be asked for at `/parallelism_config`."""
    return server_args.enable_engine_info_bootstrap or server_args.enable_rdt_weight_sync


def needs_engine_info_bootstrap(server_args: Any) -> bool:
    """Whether the host process runs the bootstrap server: for parallelism, or to seed other instances."""
    return (
        registers_parallelism_config(server_args)
        or server_args.remote_instance_weight_loader_start_seed_via_transfer_engine
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BootstrapAddress:
    """Where the bootstrap server of an engine listens, and how this engine's processes reach it."""

    bind_host: str
    connect_host: str
    port: int

    @classmethod
    def of(
        cls, *, host: str, port: int, nnodes: int, dist_init_addr: str | None
    ) -> BootstrapAddress:
        """From resolved arguments: an engine on one node keeps to its own host, ranks on other nodes need node 0's."""
        from sglang.srt.utils.network import NetworkAddress

        if nnodes == 1 or dist_init_addr is None:
            return cls(bind_host=host, connect_host=_WILDCARDS.get(host, host), port=port)
        node0 = NetworkAddress.parse(dist_init_addr).resolved().host
        return cls(bind_host=host if host in _WILDCARDS else node0, connect_host=node0, port=port)

    @property
    def url(self) -> str:
        from sglang.srt.utils.network import NetworkAddress

        return NetworkAddress(self.connect_host, self.port).to_url()


def address_of_args(server_args: Any) -> BootstrapAddress:
    """From server args, resolved or being resolved; the host process has nothing published yet when it asks."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    cfg = resolving_view(server_args)
    return BootstrapAddress.of(
        host=cfg.host,
        port=cfg.engine_info_bootstrap_port,
        nnodes=cfg.nnodes,
        dist_init_addr=cfg.dist_init_addr,
    )


def bootstrap_url(server_args: Any) -> str:
    """Body of `ServerArgs.engine_info_bootstrap_url`."""
    return address_of_args(server_args).url
