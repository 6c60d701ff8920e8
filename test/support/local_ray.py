"""A local Ray of two CPUs that the tests own, whose workers can import `support`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import ray

TESTS = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def local_ray(num_cpus: int = 2) -> Iterator[str]:
    """Start a Ray, yield its address, shut it down."""
    before = os.environ.get("PYTHONPATH")
    # Ray's workers inherit it; they unpickle the actors of `support` by name.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), before]))
    try:
        started = ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=256 << 20,
            include_dashboard=False,
            log_to_driver=False,
            _system_config={"worker_niceness": 0},  # 15 by default: any other load starves them
        )
        yield started.address_info["gcs_address"]
    finally:
        ray.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
