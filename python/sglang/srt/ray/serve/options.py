"""From an `LLMConfig` to the engine's ServerArgs and to the options of its Serve deployment.

Only documented keys of `LLMConfig` are read, and those that SGLang can't honour are refused with the reason. A replica
is one engine: it runs in a placement group with one device a bundle, the replica's own process beside rank 0.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.llm import LLMConfig

ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
HEALTH_CHECK_PERIOD_S = 2
"""With the engine's own watch (half a second), a dead rank is seen within 5 s."""
_OURS = ("host", "port", "use_ray", "served_model_name", "model_path")


def server_arguments(llm_config: LLMConfig) -> dict[str, Any]:
    """Keyword arguments of `ServerArgs`, but for those that only the replica knows (port, metric labels).

    Raises:
        ValueError: a key that SGLang doesn't have, or one that can't be honoured.
    """
    from sglang.srt.server_args import ServerArgs

    record: Any = ServerArgs
    kwargs = dict(llm_config.engine_kwargs)
    if taken := sorted(set(kwargs) & set(_OURS)):
        raise ValueError(
            f"engine_kwargs {taken!r} are set by the deployment (the model by model_loading_config); leave them out"
        )
    if unknown := sorted(set(kwargs) - set(record.__struct_fields__)):
        raise ValueError(f"engine_kwargs {unknown!r} are no fields of SGLang's ServerArgs")
    if kwargs.get("nnodes", 1) != 1:
        raise ValueError("nnodes has no meaning here: ranks are spread by placement_group_config")
    if llm_config.lora_config is not None:
        raise ValueError(
            "lora_config (Ray's loading of adapters) is not supported; give adapters to SGLang: "
            "engine_kwargs={'enable_lora': True, 'lora_paths': [...]}"
        )
    loading = _loading(llm_config)
    arguments = {"model_path": loading["source"], "served_model_name": loading["id"]} | kwargs
    if loading["tokenizer"] is not None:
        arguments.setdefault("tokenizer_path", loading["tokenizer"])
    return arguments


def _loading(llm_config: LLMConfig) -> dict[str, Any]:
    loading = llm_config.model_loading_config
    given: Mapping[str, Any] = loading if isinstance(loading, Mapping) else loading.model_dump()
    source = given.get("model_source") or given["model_id"]
    if not isinstance(source, str):
        raise ValueError(
            f"model_source={source!r}: only a path or a Hugging Face id is supported; mount or download the bucket"
        )
    return {"id": given["model_id"], "source": source, "tokenizer": given.get("tokenizer_source")}


def num_ranks(engine_kwargs: Mapping[str, Any]) -> int:
    """How many devices one engine takes.

    Raises:
        ValueError: a size below 1.
    """
    sizes = {name: int(engine_kwargs.get(name) or 1) for name in ("tp_size", "pp_size", "dp_size")}
    if wrong := {name: size for name, size in sizes.items() if size < 1}:
        raise ValueError(f"sizes must be at least 1, got {wrong!r}")
    # With DP attention the replicas share the tensor-parallel ranks.
    replicas = 1 if engine_kwargs.get("enable_dp_attention") else sizes["dp_size"]
    return sizes["tp_size"] * sizes["pp_size"] * replicas


def deployment_options(llm_config: LLMConfig) -> dict[str, Any]:
    """Options of the replica deployment: the user's `deployment_config`, placement, strict session routing.

    Raises:
        ValueError: the placement group can't hold the engine, or an option contradicts the contract.
    """
    server_arguments(llm_config)  # refused while building, not in a replica
    options = copy.deepcopy(llm_config.deployment_config)
    if options.get("max_replicas_per_node") is not None:
        raise ValueError("max_replicas_per_node can't be used with placement groups (Ray Serve)")
    on_cpu = llm_config.engine_kwargs.get("device") == "cpu"
    actor = options.setdefault("ray_actor_options", {})
    if on_cpu:
        actor.setdefault("num_cpus", 0)  # rank 0 has the bundle's CPU
    if actor.get("num_gpus"):
        raise ValueError("ray_actor_options.num_gpus: the ranks take the GPUs, the replica none")
    actor.setdefault("runtime_env", {}).update(llm_config.runtime_env or {})
    bundles, strategy = _bundles(llm_config, actor, on_cpu=on_cpu)
    options["placement_group_bundles"] = bundles
    options["placement_group_strategy"] = strategy
    options.setdefault("health_check_period_s", HEALTH_CHECK_PERIOD_S)
    options.setdefault("request_router_config", strict_session_router())
    return options


def strict_session_router() -> Any:
    """One replica a session, and no other when that one is busy or gone."""
    from ray.serve.config import RequestRouterConfig

    return RequestRouterConfig(
        request_router_class=ROUTER.replace(":", "."),
        request_router_kwargs={"num_fallback_replicas": 0},
    )


def _bundles(
    llm_config: LLMConfig, actor: Mapping[str, Any], *, on_cpu: bool
) -> tuple[list[dict[str, float]], str]:
    ranks, device = num_ranks(llm_config.engine_kwargs), "CPU" if on_cpu else "GPU"
    given = llm_config.placement_group_config or {}
    strategy = given.get("strategy") or "PACK"
    if given.get("bundles"):
        bundles = [dict(bundle) for bundle in given["bundles"]]
        have = sum(bundle.get(device, 0) for bundle in bundles)
        if have < ranks:
            raise ValueError(
                f"placement_group_config has {have:g} {device}(s) in {bundles!r}, and the engine has {ranks} ranks"
            )
        return bundles, strategy
    one = dict(given.get("bundle_per_worker") or {device: 1})
    if not on_cpu and llm_config.accelerator_type:
        one.setdefault(f"accelerator_type:{llm_config.accelerator_type}", 0.001)
    bundles = [dict(one) for _ in range(ranks)]
    cpus = float(actor.get("num_cpus", 1))
    bundles[0]["CPU"] = max(bundles[0].get("CPU", 0), cpus + (1 if on_cpu else 0))
    return bundles, strategy
