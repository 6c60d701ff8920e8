"""What `sglang.srt.ray` and `sglang.srt.ray.serve` export, imported when first asked for.

A trainer imports `sglang.srt.ray.weight_sync` and must not pay for the engine (about 10 s and a GB of code) that the
package used to import eagerly.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
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
    "take_over": "sglang.srt.ray.weight_sync",
}
EXPORTED = sorted(_HOMES)


def resolver(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The module-level `__getattr__` of a package whose names have their homes elsewhere.

    Args:
        package: its import path.
        homes: exported name -> module that defines it, imported when the name is first asked for.
    """

    def resolve_name(name: str) -> Any:
        if name not in homes:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it exports {sorted(homes)!r}"
            )
        return getattr(importlib.import_module(homes[name]), name)

    return resolve_name


resolve = resolver("sglang.srt.ray", _HOMES)
