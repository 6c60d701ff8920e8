"""A trainer of its own process: an actor without a CPU that holds models by seed and publishes them.

Its models come from seeds, never from an engine's checkpoint, so the test can make the same ones as an oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from .fused import fused_state
from .models import checkpoint_of, new_model


class Trainer:
    """Either drives a `WeightPublisher`, or calls the verbs itself as existing trainers do."""

    def __init__(self, config: Any = None, device: str = "cpu", dtype: str = "float32") -> None:
        import torch

        torch.set_num_threads(1)
        self._config = config
        self._place = {"device": device, "dtype": getattr(torch, dtype)}
        self._publisher: Any = None
        self._held: list[Any] = []

    def state(self, seed: int) -> dict[str, Any]:
        state = checkpoint_of(new_model(seed, self._config))
        return {name: tensor.to(**self._place) for name, tensor in state.items()}

    def connect(self, controls: Sequence[tuple[str, list[Any], str]], **options: Any) -> None:
        """`controls`: URL, actor handles and name of each engine."""
        from sglang.srt.ray import HttpEngineControl, WeightPublisher

        engines = [HttpEngineControl(url, actors, name=name) for url, actors, name in controls]
        self._publisher = WeightPublisher.connect(engines, **options)

    def sync(
        self,
        seed: int,
        version: str,
        pause: str = "retract",
        *,
        drop: Sequence[str] = (),
        rename: dict[str, str] | None = None,
        reshape: dict[str, tuple[int, ...]] | None = None,
        extra: dict[str, tuple[int, ...]] | None = None,
        **options: Any,
    ) -> Any:
        """Publish the weights of `seed`; the rest damages them on the way, for tests of refusals."""
        state = {name: t for name, t in self.state(seed).items() if name not in drop}
        for old, new in (rename or {}).items():
            state[new] = state.pop(old)
        for name, shape in {**(reshape or {}), **(extra or {})}.items():
            state[name] = next(iter(state.values())).new_zeros(shape)
        return self._publisher.sync(state, version=version, pause=pause, **options)

    def load_through_loaders(
        self, controls: Sequence[tuple[str, list[Any], str]], seed: int, version: str
    ) -> Any:
        """Bring the engines to the weights of `seed` through their own loaders, out of two refs."""
        from sglang.srt.ray import HttpEngineControl
        from sglang.srt.ray.weight_sync.loading import load_object_refs

        engines = [HttpEngineControl(url, actors, name=name) for url, actors, name in controls]
        refs, manifest = self._in_two_refs(seed, "nixl")
        return load_object_refs(engines, refs, version=version, manifest=manifest)

    def _in_two_refs(self, seed: int, transport: str | None) -> tuple[list[Any], Any]:
        from sglang.srt.ray import WeightManifest

        items = list(self.state(seed).items())
        half = len(items) // 2
        self._held = [dict(items[:half]), dict(items[half:])]
        options = {} if transport is None else {"_tensor_transport": transport}
        return [ray.put(part, **options) for part in self._held], WeightManifest.of(items)

    def close(self) -> None:
        self._publisher.close()

    def pull_into(
        self, actor: Any, seed: int, groups: Sequence[Sequence[str]], timeout_s: float = 60.0
    ) -> list[Any]:
        """One `pull_weights` call for each group of parameter names, filled by hand."""
        state = fused_state(self.state(seed))
        answers = []
        for names in groups:
            ref = ray.put([state[name] for name in names], _tensor_transport="nixl")
            answers.append(
                ray.get(actor.pull_weights.remote([ref], list(names)), timeout=timeout_s)
            )
        return answers


def start_trainer(
    config: Any = None, device: str = "cpu", dtype: str = "float32", **options: Any
) -> Any:
    """The actor, with Ray's `options` for it; the caller kills it."""
    actor_class = ray.remote(**{"num_cpus": 0, "enable_tensor_transport": True} | options)(Trainer)
    return actor_class.remote(config, device, dtype)


class ServeTrainer(Trainer):
    """Publishes to the replicas of a Serve application."""

    def connect_serve(self, app_name: str, model_id: str, **options: Any) -> None:
        from sglang.srt.ray import WeightPublisher
        from sglang.srt.ray.serve import connect_replicas

        self._publisher = WeightPublisher.connect(connect_replicas(app_name, model_id), **options)

    def connect_fleets(self, app_name: str, model_ids: Sequence[str]) -> None:
        """To the replicas of several models with equal weights."""
        from sglang.srt.ray import WeightPublisher
        from sglang.srt.ray.serve import connect_replicas

        fleets = [connect_replicas(app_name, model_id) for model_id in model_ids]
        self._publisher = WeightPublisher.connect([each for fleet in fleets for each in fleet])

    def connect_one(self, app_name: str, model_id: str, replica: str) -> None:
        """To one replica only, as a publisher that connected before the others started."""
        from sglang.srt.ray import WeightPublisher
        from sglang.srt.ray.serve import connect_replicas

        chosen = [
            control
            for control in connect_replicas(app_name, model_id)
            if control.name.endswith(replica)
        ]
        self._publisher = WeightPublisher.connect(chosen)

    def sync_only(
        self, seed: int, version: str, names: Sequence[str], pause: str = "retract"
    ) -> Any:
        """Publish these tensors of `seed` alone."""
        state = self.state(seed)
        return self._publisher.sync(
            {name: state[name] for name in names},
            version=version,
            partial=list(names),
            pause=pause,
        )

    def load_through_a_replica(
        self, app_name: str, deployment: str, seed: int, version: str, transport: str | None
    ) -> Any:
        """Call `update_weights_from_object_ref` on one replica, by its deployment's handle."""
        from ray import serve

        refs, manifest = self._in_two_refs(seed, transport)
        handle = serve.get_deployment_handle(deployment, app_name)
        call = handle.update_weights_from_object_ref.remote(
            refs, version=version, manifest=manifest
        )
        return call.result(timeout_s=120)

    def put_everything(self) -> list[Any]:
        """An RDT ref of all weights, in a list so that Ray hands it over unresolved."""
        self._held = [list(self.state(0).values())]
        return [ray.put(self._held[0], _tensor_transport="nixl")]


def start_serve_trainer(config: Any = None) -> Any:
    """The actor; the caller kills it."""
    actor_class = ray.remote(num_cpus=0, enable_tensor_transport=True)(ServeTrainer)
    return actor_class.remote(config)
