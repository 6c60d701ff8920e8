"""What the tests of this folder share besides fixtures: the device, shares, and calls into trainer and rank."""

from __future__ import annotations

import os
from typing import Any

import ray
from support.engine import RunningEngine

DEVICE = os.environ.get("SGLANG_TEST_DEVICE", "cuda")
DTYPE = "bfloat16"
TRAINER_SHARE, RANK_SHARE = 0.4, 0.6
WAIT_S = 180.0


def connect(trainer: Any, engine: RunningEngine, **options: Any) -> None:
    """Buckets of 1 MB, so that a sync has several."""
    controls = [(engine.url, engine.actors, "e0")]
    ray.get(
        trainer.connect.remote(controls, **({"bucket_bytes": 1 << 20} | options)), timeout=WAIT_S
    )


def in_rank(engine: RunningEngine, function: Any, *arguments: Any) -> Any:
    """Run `function(actor_instance, *arguments)` in rank 0's process, beside its event loop."""
    call = engine.actors[0].__ray_call__.options(concurrency_group="control")
    return ray.get(call.remote(function, *arguments), timeout=60)
