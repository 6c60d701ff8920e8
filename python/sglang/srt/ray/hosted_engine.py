"""What RayEngine overrides of upstream's Engine so that it can live in anybody's process, on any thread.

One method starts an engine (`_launch_subprocesses`, for `RayEngine(...)` and `launch_engine` alike): inside it the
caller's process settings are kept, and whatever had been started is ended if the launch fails. The other methods hand
calls over to the engine's own event loop.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.ray import caller_process
from sglang.srt.ray.cluster import connect_ray, namespace_of
from sglang.srt.ray.detokenizer import DetokenizerProcess, instance_files, remove_files
from sglang.srt.ray.engine_loop import EngineLoop
from sglang.srt.ray.hosted_tokenizer import EngineStoppedError
from sglang.srt.runtime_context import restore_context, snapshot_context
from sglang.srt.server_args import PortArgs, ServerArgs


@dataclasses.dataclass(eq=False)
class EngineParts:
    """Everything that one launch started, in the order in which it is started; `end` is the one way to end it."""

    ranks: Any = None
    """`rank_actors.RankActors`"""
    detokenizer: DetokenizerProcess | None = None
    tokenizer_manager: Any = None
    weight_caches: Sequence[Any] = ()
    _ending: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def end(self) -> None:
        """End what was started, and only that. May be called twice, from any thread.

        Upstream's shutdown kills every child of the process, those that Ray started included.
        """
        caller_process.note_ended(self)
        manager, self.tokenizer_manager = self.tokenizer_manager, None
        if manager is not None:
            manager.fail(EngineStoppedError("the engine was shut down"))
        self._end_processes()
        if manager is not None:
            _close_manager(manager)
        Engine._terminate_weight_cache_daemons(self.weight_caches)
        if self.ranks is not None:
            remove_files(instance_files(self.ranks.port_args))

    def _end_processes(self) -> None:
        """End ranks, router, detokenizer, bootstrap server and an own group."""
        with self._ending:
            if self.ranks is not None:
                self.ranks.end()
                if (bootstrap := self.ranks.engine_info_bootstrap_server) is not None:
                    bootstrap.close()
            if self.detokenizer is not None:
                self.detokenizer.end()

    def _end_after_a_failure(self, _: Any) -> None:
        """Let go of devices at once, also when nobody calls `end`; the tokenizer stays to tell the cause.

        On a thread of its own: the one that found the failure may be the router's, which is waited for here.
        """
        threading.Thread(target=self._end_processes, name="sglang-engine-end", daemon=True).start()

    def connect(self, launched: Sequence[Any]) -> None:
        """Have every part report its end to the watch, and the watch tell the tokenizer. `launched`: the six values."""
        self.tokenizer_manager, self.weight_caches = launched[0], launched[5] or ()
        watch = self.ranks.watch
        if self.detokenizer is not None:
            self.detokenizer.watch(watch.fail)
        self.tokenizer_manager.report_failure = watch.fail
        watch.on_failure(self.tokenizer_manager.fail)
        watch.on_failure(self._end_after_a_failure)
        self.ranks.parts = self


def _close_manager(manager: Any) -> None:
    if (processor := getattr(manager, "mm_processor", None)) is not None:
        processor.shutdown()
    manager.cuda_vmm_feature_transport.shutdown()
    manager.close()


_launching: contextvars.ContextVar[EngineParts | None] = contextvars.ContextVar(
    "sglang_ray_launching", default=None
)


@contextlib.contextmanager
def _parts_of_a_launch() -> Iterator[EngineParts]:
    """Parts that are ended, and a published configuration that is put back, if the launch fails."""
    parts = EngineParts()
    token = _launching.set(parts)
    published = snapshot_context()
    try:
        yield parts
    except BaseException:
        parts.end()
        restore_context(published)
        raise
    finally:
        _launching.reset(token)


def parts_being_launched() -> EngineParts:
    """The parts of the launch that this thread is in."""
    parts = _launching.get()
    assert parts is not None, "called outside RayEngine._launch_subprocesses"
    return parts


def _resolved(server_args: ServerArgs) -> dict[str, Any]:
    """Field names and decided values."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    record: Any = server_args
    record.resolve_once()
    view = resolving_view(record)
    return {name: getattr(view, name) for name in record.__struct_fields__}


def _refuse_what_ends_processes(config: Mapping[str, Any]) -> None:
    """Options of upstream's that work by forking this process or by ending it.

    Raises:
        ValueError: naming the option.
    """
    for name, usual in (
        ("tokenizer_worker_num", 1),
        ("detokenizer_worker_num", 1),
        ("debug_tensor_dump_input_file", None),
    ):
        if config[name] != usual:
            raise ValueError(
                f"{name}={config[name]!r} is not supported by the Ray backend: upstream ends the process "
                f"that hosts the engine when that is through or fails; leave it at {usual!r}"
            )


class HostedEngine(Engine):
    """RayEngine's base, between it and upstream's Engine."""

    @classmethod
    def _launch_subprocesses(cls, server_args: ServerArgs, *args: Any, **kwargs: Any) -> Any:
        """As upstream's, whose result it returns; the fourth value gains `.parts`."""
        connect_ray(namespace=namespace_of(server_args))
        with (
            caller_process.one_launch_at_a_time(),
            caller_process.settings_kept(),
            _parts_of_a_launch() as parts,
        ):
            config = _resolved(server_args)
            _refuse_what_ends_processes(config)
            caller_process.check_agrees(config)
            launched = super()._launch_subprocesses(server_args, *args, **kwargs)
            parts.connect(launched)
            caller_process.note_running(parts, config)
        return launched

    @classmethod
    def _launch_detokenizer_subprocesses(
        cls, server_args: ServerArgs, port_args: PortArgs, run_detokenizer_process_func: Any
    ) -> Any:
        """Start the detokenizer; upstream, whose watchdog would kill this process, gets nothing to watch."""
        parts = parts_being_launched()
        parts.detokenizer = DetokenizerProcess(
            server_args, port_args, instance_files(parts.ranks.port_args)
        )
        return [], []

    loop: EngineLoop

    @staticmethod
    def _ensure_event_loop() -> EngineLoop:
        return EngineLoop()

    def update_weights_from_object_ref(self, refs: Any, *, version: str, **options: Any) -> Any:
        """Bring this engine to the weights in `refs`, through its own loader; blocks.

        `refs` and `options` as for `weight_sync.load_object_refs`, which says what is raised and what is then served.
        """
        return load_into_engine(self, refs, version=version, **options)

    async def async_generate(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's, from a coroutine of any loop."""
        if kwargs.get("stream") is True:
            stream: Any = await super().async_generate(*args, **kwargs)
            return self.loop.bridged_stream(stream)
        return await self.loop.bridged(super().async_generate(*args, **kwargs))

    async def async_encode(self, *args: Any, **kwargs: Any) -> Any:
        return await self.loop.bridged(super().async_encode(*args, **kwargs))

    async def async_load_lora_adapter(self, *args: Any, **kwargs: Any) -> Any:
        return await self.loop.bridged(super().async_load_lora_adapter(*args, **kwargs))

    async def async_unload_lora_adapter(self, *args: Any, **kwargs: Any) -> Any:
        return await self.loop.bridged(super().async_unload_lora_adapter(*args, **kwargs))


def load_into_engine(engine: Any, refs: Any, *, version: str, **options: Any) -> Any:
    """`load_object_refs` for one engine of this process: a RayEngine or a LaunchedEngine.

    Raises:
        EngineWithoutActorsError: the engine's ranks are no Ray actors.
    """
    from sglang.srt.ray.engine_control import LocalEngineControl
    from sglang.srt.ray.weight_sync.loading import load_object_refs

    return load_object_refs([LocalEngineControl(engine)], refs, version=version, **options)
