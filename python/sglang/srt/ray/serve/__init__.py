"""Ray Serve: the engine as a deployment that a trainer can steer, with sessions that stay where their cache is.

`app.build_app` builds the application; `server.SGLangServer` is one replica, `fleet.FleetControl` knows all and
`ingress.SGLangIngress` speaks HTTP. `LLMConfig(server_cls="sglang.srt.ray.serve:SGLangServer")` works with Ray's own
builder too, without what needs the fleet. Imported when first asked for: a trainer must not pay for the engine.
"""

from __future__ import annotations

from sglang.srt.ray.exports import resolver

_HOMES = {
    "SGLangServer": "sglang.srt.ray.serve.server",
    "FleetControl": "sglang.srt.ray.serve.fleet",
    "ServeEngineControl": "sglang.srt.ray.serve.weights",
    "build_app": "sglang.srt.ray.serve.app",
    "connect_replicas": "sglang.srt.ray.serve.weights",
}
__all__ = sorted(_HOMES)

__getattr__ = resolver(__name__, _HOMES)
