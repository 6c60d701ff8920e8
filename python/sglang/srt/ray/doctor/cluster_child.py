"""The throw-away process of `cluster.py`, run by path: joins a Ray cluster, says what it has, and leaves.

Imports nothing of sglang. Prints `TOLD {...}`, or `NONE` when there is no cluster to join.
"""

from __future__ import annotations

import collections
import json
import logging
import sys
from typing import Any

import ray

RANK_PREFIX = "sglang_scheduler_"
"""As in `identity.get_scheduler_actor_name`, which this file can't import."""


def _told() -> dict[str, Any]:
    from ray.util import list_named_actors
    from ray.util.placement_group import placement_group_table

    ranks = collections.Counter(
        actor["namespace"]
        for actor in list_named_actors(all_namespaces=True)
        if actor["name"].startswith(RANK_PREFIX)
    )
    groups = collections.Counter(group["state"] for group in placement_group_table().values())
    return {
        "ray": ray.__version__,
        "address": ray.get_runtime_context().gcs_address,
        "nodes": [
            {
                "address": node["NodeManagerAddress"],
                "alive": node["Alive"],
                "resources": {
                    name: amount
                    for name, amount in node["Resources"].items()
                    if name in ("CPU", "GPU")
                },
            }
            for node in ray.nodes()
        ],
        "total": ray.cluster_resources(),
        "free": ray.available_resources(),
        "placement_groups": groups,
        "ranks_by_namespace": ranks,
    }


def main() -> None:
    """`cluster_child.py ADDRESS`, where `auto` looks for a running cluster."""
    address = sys.argv[1]
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        if address != "auto":
            raise
        print("NONE", flush=True)
        return
    print("TOLD " + json.dumps(_told()), flush=True)


if __name__ == "__main__":
    main()
