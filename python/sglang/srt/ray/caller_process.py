"""What a launch must not change in the process that it is called from, which may be anybody's actor or driver.

Upstream's launcher takes the process over: it installs a SIGQUIT handler that kills the process and all its children,
and changes the start method of `multiprocessing` for good. Both are put back here. Its published configuration is one
a process, so a second engine is accepted only where the two agree on it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

_TAKEN_OVER = (signal.SIGQUIT, signal.SIGTERM, signal.SIGINT)
_PER_ENGINE = frozenset(
    {
        "base_gpu_id",
        "dist_init_addr",
        "enable_metrics",
        "engine_info_bootstrap_port",
        "grpc_port",
        "host",
        "nccl_port",
        "port",
        "random_seed",
        "ray_namespace",
    }
)
"""Fields that two engines of a process may differ in: each is read once, while its engine is launched or served."""


class EngineConflictError(RuntimeError):
    """Two engines can't share a process, because the process publishes one configuration."""


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Put signal handlers and the start method back after a launch inside the `with` block."""
    start_method = multiprocessing.get_start_method(allow_none=True)
    on_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _TAKEN_OVER} if on_main else {}
    try:
        yield
    finally:
        multiprocessing.set_start_method(start_method, force=True)
        for number, handler in handlers.items():
            if (
                handler is not None
            ):  # None: not installed from Python, and so not replaceable from it
                signal.signal(number, handler)


class _Running:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.engines: weakref.WeakKeyDictionary[Any, Mapping[str, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self.serving: weakref.ref[Any] | None = None


_running = _Running()


@contextlib.contextmanager
def one_launch_at_a_time() -> Iterator[None]:
    """Launches of one process run one after the other: they publish, set signal handlers and read ports."""
    with _running.lock:
        yield


def check_agrees(config: Mapping[str, Any]) -> None:
    """Refuse a configuration that would change a running engine's. `config`: field names and resolved values.

    Raises:
        EngineConflictError: naming the fields.
    """
    for other in _running.engines.values():
        different = sorted(
            name
            for name in config.keys() | other.keys()
            if name not in _PER_ENGINE and _differ(config.get(name), other.get(name))
        )
        if different:
            shown = {name: (other.get(name), config.get(name)) for name in different[:5]}
            raise EngineConflictError(
                f"this process runs an engine whose configuration differs in {different!r} ({shown!r}: running, new), "
                f"and SGLang keeps one configuration a process. Shut that engine down first, or launch this one in a "
                f"Ray actor of its own."
            )


def _differ(one: Any, other: Any) -> bool:
    return one != other and repr(one) != repr(other)  # some values have no equality of their own


def note_running(engine: Any, config: Mapping[str, Any]) -> None:
    """Remember a launched engine until `note_ended` or until nobody refers to it any more."""
    _running.engines[engine] = config


def note_ended(engine: Any) -> None:
    _running.engines.pop(engine, None)


@contextlib.contextmanager
def only_server(engine: Any) -> Iterator[None]:
    """Be the process's only HTTP server: upstream's application is a module global.

    Raises:
        EngineConflictError: another engine of this process is being served.
    """
    with _running.lock:
        other = _running.serving() if _running.serving is not None else None
        if other is not None:
            raise EngineConflictError(
                "this process serves an engine over HTTP already; serve this one from a Ray actor of its own"
            )
        _running.serving = weakref.ref(engine)
    try:
        yield
    finally:
        _running.serving = None
