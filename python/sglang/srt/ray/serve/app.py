"""The application: for each model its replicas and their fleet, and one ingress in front of all.

Made of Ray's public parts (`build_llm_deployment`, `serve.ingress`); `ray[llm]` is not needed. Ray's own
`build_openai_app` can serve `SGLangServer` too, but knows no fleet, and its ingress breaks with FastAPI 0.137.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.llm import LLMConfig

_DIRECT_STREAMING = "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING"


def build_app(
    config: LLMConfig | Sequence[LLMConfig] | Mapping[str, Any],
    *,
    ingress_options: Mapping[str, Any] | None = None,
) -> Application:
    """What `serve.run` takes.

    Args:
        config: one model, several, or `{"llm_configs": [...]}` as in a Serve configuration file
            (`import_path: sglang.srt.ray.serve:build_app`).
        ingress_options: options of the ingress deployment, such as `num_replicas`.

    Raises:
        ValueError: two models of one id, direct streaming, or a configuration that can't be honoured.
    """
    from ray import serve
    from ray.serve.llm import build_llm_deployment

    from sglang.srt.ray.serve import fleet, ingress
    from sglang.srt.ray.serve.server import SGLangServer

    if os.environ.get(_DIRECT_STREAMING, "0") not in ("", "0"):
        raise ValueError(
            f"{_DIRECT_STREAMING} is set: direct streaming goes around the ingress, which holds sessions to their "
            f"replica and answers for every replica of the fleet; unset it"
        )
    models: dict[str, ingress.ModelHandles] = {}
    for llm_config in _configs(config):
        if llm_config.model_id in models:
            raise ValueError(f"model id {llm_config.model_id!r} is given twice")
        control = serve.deployment(
            fleet.FleetControl, name=fleet.deployment_name(llm_config.model_id), **fleet.OPTIONS
        ).bind()
        server_cls = llm_config.server_cls or SGLangServer
        replicas = build_llm_deployment(
            llm_config,
            name_prefix="SGLangServer:",
            bind_kwargs={"fleet": control},
            deployment_cls=server_cls,
        )
        models[llm_config.model_id] = ingress.ModelHandles(
            replicas=replicas, fleet=control, keys=ingress.Keys.of(llm_config.engine_kwargs)
        )
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": 10**6}
    return serve.deployment(ingress.SGLangIngress, **(options | dict(ingress_options or {}))).bind(
        models
    )


def _configs(config: Any) -> list[LLMConfig]:
    from ray.serve.llm import LLMConfig

    if isinstance(config, Mapping):
        unknown = sorted(set(config) - {"llm_configs"})
        if unknown:
            raise ValueError(f"unknown key(s) {unknown!r}; there is 'llm_configs'")
        config = config["llm_configs"]
    given = [config] if isinstance(config, LLMConfig) else list(config)
    if not given:
        raise ValueError("there is no model: llm_configs is empty")
    return [
        each if isinstance(each, LLMConfig) else LLMConfig.model_validate(each) for each in given
    ]
