"""A rank without an engine: the real `WeightReceiver` in a Ray actor, over a fake scheduler around a small module.

The fake has exactly what the receiver reads of a `Scheduler`; whether it is paused and in a session is set by the test.
"""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import ray
import torch

from .toy_model import Fused


class FakeScheduler:
    def __init__(self, model: torch.nn.Module) -> None:
        self._engine_paused = True
        self.weight_updater = SimpleNamespace(_session="open")
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.waiting_queue: list[Any] = []

    def _add_request_to_queue(self, req: Any) -> None:
        self.waiting_queue.append(req)

    def _record_scheduler_state_for_paused_engine(self) -> None:
        pass


def plain_model(shapes: Mapping[str, tuple[int, ...]]) -> torch.nn.Module:
    """Float32 parameters by name, filled (so that their pages exist); `strided` is the one that is not contiguous."""
    model = torch.nn.Module()
    for name, shape in shapes.items():
        data = torch.zeros(shape).T if name == "strided" else torch.full(shape, -1.0)
        model.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
    return model


class ReceivingRank:
    """The engine's side."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        from sglang.srt.ray.weight_sync.receiver import WeightReceiver

        torch.set_num_threads(1)
        self.model = Fused() if shapes is None else plain_model(shapes)
        self.scheduler = FakeScheduler(self.model)
        self.receiver = WeightReceiver(self.scheduler, rank=5)

    def pid(self) -> int:
        return os.getpid()

    def set_state(self, *, paused: bool, session: bool) -> None:
        self.scheduler._engine_paused = paused
        self.scheduler.weight_updater._session = "open" if session else None

    def layout(self) -> Any:
        return self.receiver.layout()

    def plan(self, manifest: Any) -> Any:
        return self.receiver.plan(manifest)

    def register(self, *, pins_allowed: bool = True) -> dict[str, Any]:
        if not pins_allowed:
            from sglang.srt.ray.weight_sync.receiver import WeightReceiver

            return WeightReceiver(self.scheduler, rank=6, pins_allowed=False).register()
        return self.receiver.register()

    def pull(self, refs: Sequence[Any], names: Sequence[str], **options: Any) -> Any:
        return self.receiver.pull(refs, names, **options)

    def pull_under_collection(self, refs: Sequence[Any], names: Sequence[str]) -> Any:
        """A pull while another thread collects garbage without a break."""
        stop = threading.Event()

        def collect() -> None:
            while not stop.is_set():
                gc.collect()

        collector = threading.Thread(target=collect)
        collector.start()
        try:
            return self.receiver.pull(refs, names)
        finally:
            stop.set()
            collector.join()

    def pull_with_lost_targets(self, refs: Sequence[Any], names: Sequence[str]) -> Any:
        """A pull in which the targets that Ray was given die at once: Ray then delivers elsewhere, and succeeds."""
        from ray.experimental import set_target_for_ref

        from sglang.srt.ray.weight_sync import transports

        class LostRead:
            def __init__(self, ref: Any, targets: Sequence[Any]) -> None:
                set_target_for_ref(ref, [buffer.view_as(buffer) for buffer in targets])
                gc.collect()
                self._ref = ref

            def wait(self, *, timeout_s: float) -> list[torch.Tensor]:
                return list(ray.get(self._ref, timeout=timeout_s))

            def is_over(self) -> bool:
                return True

        real, transports.Read = transports.Read, LostRead  # type: ignore[misc, assignment]
        try:
            return self.receiver.pull(refs, names)
        finally:
            transports.Read = real  # type: ignore[misc]

    def pull_and_measure(self, refs: Sequence[Any], names: Sequence[str]) -> tuple[int, int]:
        """Bytes by which this process's peak of resident memory grew, and how many objects Ray's RDT store keeps."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.receiver.pull(refs, names)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        store = ray._private.worker.global_worker.rdt_manager.rdt_store
        return grown * 1024, store.get_num_objects()

    def values(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def addresses(self) -> dict[str, int]:
        return {name: p.data_ptr() for name, p in self.model.named_parameters()}


class Source:
    """The trainer's side: publishes tensors that the test names by shape, dtype and seed."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._held: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def put(self, tensors: Sequence[torch.Tensor]) -> list[ray.ObjectRef]:
        """The ref in a list, so that Ray hands it over unresolved."""
        mine = [tensor.clone() for tensor in tensors]
        self._held.append(mine)
        return [ray.put(mine, _tensor_transport="nixl")]

    def put_with_a_release_between(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[Any]:
        """One ref for each group; between two puts another registration of this process is given back."""
        from sglang.srt.ray.weight_sync import transports

        refs = []
        for tensors in groups:
            other = torch.zeros(1000)
            transports.pin(other)
            transports.unpin(other)
            refs += self.put(tensors)
        return refs

    def put_filled(self, shape: tuple[int, ...], value: float) -> list[ray.ObjectRef]:
        return self.put([torch.full(shape, value)])

    def plain_put(self, tensors: Sequence[torch.Tensor]) -> list[ray.ObjectRef]:
        return [ray.put(list(tensors))]

    def publish(
        self, layout: Any, plan: Any, sources: Sequence[torch.Tensor], bucket_bytes: int
    ) -> Any:
        """Through `RankBuckets`, as a `WeightPublisher` does."""
        from sglang.srt.ray.weight_sync.buckets import RankBuckets

        buckets = RankBuckets(layout=layout, plan=plan, bucket_bytes=bucket_bytes)
        self._held.append(buckets)
        buckets.fill(sources)
        return buckets.publish()


def start(actor_class: type, *arguments: Any, **options: Any) -> Any:
    """An actor that may put and pull, without a CPU; the caller kills it."""
    remote = ray.remote(num_cpus=0, enable_tensor_transport=True, max_concurrency=2)(actor_class)
    return remote.remote(*arguments, **options)


def wait_until(condition: Any, *, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {timeout_s:g} s")
        time.sleep(0.05)
