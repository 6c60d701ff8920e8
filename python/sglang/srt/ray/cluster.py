"""Which Ray cluster a process uses: the one it is connected to, else a running one, else a local one of its own.

Upstream leaves this to whichever Ray call comes first, which connects under a namespace of its own choosing; here the
launch does it, so that `ray_namespace` holds in a process without a Ray context too.
"""

from __future__ import annotations

import os
from typing import Any

import ray


def namespace_of(server_args: Any) -> str | None:
    """`--ray-namespace`, the namespace in which the engine's actors are named; None means the launching job's."""
    namespace: str | None = server_args.ray_namespace
    return namespace


def connect_ray(*, namespace: str | None) -> bool:
    """Connect unless connected; `namespace` is the job's then. Returns whether a local cluster was started here."""
    if ray.is_initialized():
        return False
    if os.environ.get("RAY_ADDRESS") != "local":  # which asks for a Ray of its own
        try:
            ray.init(address="auto", namespace=namespace, log_to_driver=True)
            return False
        except ConnectionError:
            pass  # there is none to join
    ray.init(address="local", namespace=namespace, include_dashboard=False, log_to_driver=True)
    return True
