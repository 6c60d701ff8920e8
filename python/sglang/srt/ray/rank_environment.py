"""Environment variables that a rank's process is started with, on top of the caller's runtime environment.

Forked schedulers inherit what upstream's launcher sets in its own process; an actor inherits nothing of that, so it
travels in `runtime_env`, which Ray merges with the caller's (the caller's other variables stay). Also here: the memory
saver's preload library, without which sleeping frees nothing, and each CPU rank's share of the cores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from sglang.srt.ray.weight_sync.lanes import chosen_environment

CPU_BIND_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"
LAUNCHER_VARIABLES = (
    "NCCL_CUMEM_ENABLE",
    "NCCL_MNNVL_ENABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_GRAPH_MIXING_SUPPORT",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "TRTLLM_ENABLE_PDL",
    "CUTE_DSL_LOG_LEVEL",
    "CUTE_DSL_LOG_TO_CONSOLE",
    "SGLANG_RUN_ID",
    "PROMETHEUS_MULTIPROC_DIR",
)
"""What `_set_envs_and_config` and its callees set in the launching process for the schedulers to inherit."""


def rank_environments(
    nodes: Sequence[str],
    *,
    device: str,
    memory_saver: bool,
    environment: Mapping[str, str] | None = None,
    cpus: Sequence[int] | None = None,
) -> list[dict[str, str]]:
    """`env_vars` of each rank, in rank order.

    Args:
        nodes: node id of each rank.
        memory_saver: whether the engine was asked to be able to sleep.
        environment: what the ranks inherit: the launching process's own and its job's when None.
        cpus: cores to share among the ranks of a node; this process's when None. Nodes are taken to be alike.

    Raises:
        ValueError: `SGLANG_CPU_OMP_THREADS_BIND` has too few entries.
    """
    environment = _inherited_environment() if environment is None else environment
    common = {
        name: environment[name] for name in LAUNCHER_VARIABLES if environment.get(name) is not None
    }
    common |= chosen_environment(device, environment)
    if memory_saver and device != "cpu":
        common["LD_PRELOAD"] = memory_saver_preload()
    shares: list[str | None] = [None] * len(nodes)
    if device == "cpu":
        shares = cpu_shares(nodes, environment.get(CPU_BIND_VARIABLE), cpus)
    return [common | ({} if share is None else {CPU_BIND_VARIABLE: share}) for share in shares]


def cpu_shares(
    nodes: Sequence[str], asked: str | None, cpus: Sequence[int] | None = None
) -> list[str | None]:
    """Cores of each rank, as `SGLANG_CPU_OMP_THREADS_BIND` spells them for one rank; None leaves upstream's choice.

    Upstream's default is one NUMA node a rank, and it refuses more ranks than NUMA nodes. What the user set is split,
    one entry a rank; otherwise the ranks of a node share its cores evenly, and take turns when there are too few.
    """
    if asked is not None and asked != "all":
        entries = asked.split("|")
        if len(entries) < len(nodes):
            raise ValueError(
                f"{CPU_BIND_VARIABLE}={asked!r} has {len(entries)} entries, needed {len(nodes)} (one per rank, "
                f"separated by '|'); unset it to share the cores evenly"
            )
        return list(entries[: len(nodes)])
    if len(nodes) == 1:
        return [None]
    cores = sorted(os.sched_getaffinity(0)) if cpus is None else list(cpus)
    shares: list[str | None] = []
    for rank, node in enumerate(nodes):
        place, ranks_here = list(nodes[:rank]).count(node), list(nodes).count(node)
        width = max(len(cores) // ranks_here, 1)
        start = place * width % len(cores)
        shares.append(",".join(str(core) for core in cores[start : start + width]))
    return shares


def memory_saver_preload() -> str:
    """`LD_PRELOAD` with which a process can release its GPU memory while it sleeps."""
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    with TorchMemorySaverAdapter.create(enable=True).configure_subprocess():
        return os.environ.get("LD_PRELOAD", "")


def _inherited_environment() -> dict[str, str]:
    """This process's variables, and those that its job gives every actor (a driver does not have them itself)."""
    import ray

    if not ray.is_initialized():  # asking for its context would start one
        return dict(os.environ)
    return os.environ | ray.get_runtime_context().runtime_env.get("env_vars", {})
