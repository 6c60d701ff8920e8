"""A local Ray of two CPUs that the tests own, whose workers can import `support` and the test files themselves."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import ray

TESTS = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def local_ray(num_cpus: int = 2) -> Iterator[str]:
    """Start a Ray, yield its address, shut it down."""
    before = os.environ.get("PYTHONPATH")
    # Ray's workers inherit it and unpickle actors by the names of their modules. pytest has put the folders of all
    # collected tests on the path by the time a fixture runs.
    folders = [folder for folder in sys.path if Path(folder).is_relative_to(TESTS)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [before])])
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
