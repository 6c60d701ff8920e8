"""Ray Serve: the engine as a deployment that a trainer can steer, with sessions that stay where their cache is.

`app.build_app` builds the application; `server.SGLangServer` is one replica, `fleet.FleetControl` knows all and
`ingress.SGLangIngress` speaks HTTP. `LLMConfig(server_cls="sglang.srt.ray.serve:SGLangServer")` works with Ray's own
builder too, without what needs the fleet. Imported when first asked for: a trainer must not pay for the engine.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "SGLangServer": "sglang.srt.ray.serve.server",
    "FleetControl": "sglang.srt.ray.serve.fleet",
    "ServeEngineControl": "sglang.srt.ray.serve.weights",
    "build_app": "sglang.srt.ray.serve.app",
    "connect_replicas": "sglang.srt.ray.serve.weights",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'sglang.srt.ray.serve' has no attribute {name!r}; it exports {__all__!r}"
        )
    return getattr(importlib.import_module(_HOMES[name]), name)
