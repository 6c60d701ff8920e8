"""Notice that a part of a running engine died, and tell everybody who has to know, once.

An engine has ranks (Ray actors), a detokenizer (a process) and, with data parallelism, a router (a thread); whichever
ends first is the engine's failure. Upstream answers a death by killing the process that hosts the engine; here the
host may be anybody's actor or driver, so it is told through callbacks and typed errors and never signalled.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence

import ray

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_SIBLINGS_S = (
    1.0  # a killed rank makes the others fail too; the wait tells the cause from its echoes
)


class EngineFailedError(RuntimeError):
    """A part of a running engine died; the engine answers nothing any more and has to be shut down."""


class RankDiedError(EngineFailedError):
    """A rank's event loop ended while the engine was in use."""


class DetokenizerDiedError(EngineFailedError):
    """The detokenizer process ended while the engine was in use."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSpec:
    """One rank: its index in the engine (and in `scheduler_actors`), and its coordinates."""

    rank: int
    dp_rank: int
    pp_rank: int
    tp_rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} (dp {self.dp_rank}, pp {self.pp_rank}, tp {self.tp_rank})"


class EngineWatch:
    """Awaits the ranks' event loops on a daemon thread; other watchers report through `fail`.

    The first failure counts. Callbacks run on the thread that found it.
    """

    def __init__(self, specs: Sequence[RankSpec], loops: Sequence[ray.ObjectRef]) -> None:
        self._specs = dict(zip(loops, specs, strict=True))
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._callbacks: list[Callable[[EngineFailedError], None]] = []
        self._lock = threading.Lock()
        self.failure: EngineFailedError | None = None
        self._thread = threading.Thread(target=self._run, name="sglang-engine-watch", daemon=True)
        self._thread.start()

    def on_failure(self, callback: Callable[[EngineFailedError], None]) -> None:
        """Have `callback` called once, on the thread that finds a failure (or here, if there was one already)."""
        with self._lock:
            if self.failure is None:
                self._callbacks.append(callback)
                return
        callback(self.failure)

    def fail(self, failure: EngineFailedError) -> None:
        """Report a failure, from any thread. Does nothing after `stop` or after an earlier failure."""
        with self._lock:
            if self.failure is not None or self._stopped.is_set():
                return
            self.failure = failure
            callbacks = list(self._callbacks)
        logger.error("the engine failed: %s", failure)
        try:
            for callback in callbacks:
                callback(failure)
        finally:
            self._ended.set()

    def stop(self) -> None:
        """Stop watching: what happens to the engine from now on was asked for."""
        self._stopped.set()
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10 * _POLL_S)

    def wait(self) -> None:
        """Block until the engine fails or the watch is stopped.

        Raises:
            EngineFailedError: naming the part and the cause.
        """
        self._ended.wait()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        loops = list(self._specs)
        while not self._stopped.is_set() and self.failure is None:
            ready, _ = ray.wait(loops, num_returns=1, timeout=_POLL_S)
            if ready and not self._stopped.is_set():
                ready, _ = ray.wait(loops, num_returns=len(loops), timeout=_SIBLINGS_S)
                self.fail(RankDiedError(_first_cause({self._specs[ref]: ref for ref in ready})))


def _first_cause(ended: dict[RankSpec, ray.ObjectRef]) -> str:
    """Which rank died of itself: a process that is gone rather than a rank whose collective broke because of it."""
    causes: dict[RankSpec, str] = {}
    gone: list[RankSpec] = []
    for spec, loop in ended.items():
        try:
            ray.get(loop)
            causes[spec] = "its event loop returned"
        except ray.exceptions.RayActorError as error:
            gone.append(spec)
            causes[spec] = cause_of(error)
        except ray.exceptions.RayError as error:
            causes[spec] = cause_of(error)
    first = (gone or list(causes))[0]
    text = f"{first} died: {causes[first]}"
    if others := [str(spec) for spec in causes if spec is not first]:
        text += f"; with it {', '.join(others)}"
    return text


def cause_of(error: ray.exceptions.RayError) -> str:
    """The line that says what went wrong on the rank, out of Ray's long report."""
    cause = getattr(error, "cause", None)
    if cause is not None and not isinstance(cause, ray.exceptions.RayError):
        # The first line says it; torch appends dozens, such as every backend that an operator exists for.
        first_line = str(cause).strip().partition("\n")[0]
        return f"{type(cause).__name__}: {first_line}{_where(error)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return (errors or lines or [repr(error)])[-1]


def _where(error: ray.exceptions.RayError) -> str:
    """The innermost line of the rank's own traceback; an error such as NotImplementedError says nothing without it."""
    frames = [
        line.strip()
        for line in str(error).splitlines()  # Ray puts the rank's traceback there
        if line.lstrip().startswith("File ")
    ]
    return f" [{frames[-1]}]" if frames else ""
