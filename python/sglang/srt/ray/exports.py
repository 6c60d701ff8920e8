"""What `sglang.srt.ray` exports, imported when first asked for.

A trainer imports `sglang.srt.ray.weight_sync` and must not pay for the engine (about 10 s and a GB of code) that the
package used to import eagerly.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "RayEngine": "sglang.srt.ray.engine",
    "launch_engine": "sglang.srt.ray.launch",
    "serve_http": "sglang.srt.ray.launch",
    "LaunchedEngine": "sglang.srt.ray.launch",
    "EngineFailedError": "sglang.srt.ray.liveness",
    "RankDiedError": "sglang.srt.ray.liveness",
    "get_scheduler_actor_name": "sglang.srt.ray.identity",
    "use_placement_group": "sglang.srt.ray.placement",
    "HttpEngineControl": "sglang.srt.ray.engine_control",
    "LocalEngineControl": "sglang.srt.ray.engine_control",
    "WeightPublisher": "sglang.srt.ray.weight_sync",
    "SyncReport": "sglang.srt.ray.weight_sync",
    "WeightManifest": "sglang.srt.ray.weight_sync",
    "load_object_refs": "sglang.srt.ray.weight_sync",
}
EXPORTED = sorted(_HOMES)


def resolve(name: str) -> Any:
    """Module-level `__getattr__` of `sglang.srt.ray`."""
    if name not in _HOMES:
        raise AttributeError(
            f"module 'sglang.srt.ray' has no attribute {name!r}; it exports {EXPORTED!r}"
        )
    return getattr(importlib.import_module(_HOMES[name]), name)
