"""The fault table, executed: every cell on a live engine of two ranks under load, against what the state machine says.

All cells are slow tests; the quick ones have `test_two_ranks.py` and `test_faults_of_a_live_engine.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support.chaos_proxy import ChaosProxy
from support.engine import RunningEngine, running_engine
from support.models import new_model
from support.oracle import assert_serves
from support.trainer import start_trainer

from sglang.srt.ray.weight_sync import WeightSyncError
from sglang.srt.ray.weight_sync.fault_table import STEPS_OF, Outcome, cells

PROMPT = list(range(5, 17))
OLD_SEED, NEW_SEED = 1, 2
TTL_S = 6.0
GRID = [
    pytest.param(
        staging,
        step,
        fault,
        found,
        id=f"{staging}-{step}-{fault.replace(' ', '-')}",
        marks=[pytest.mark.slow],
    )
    for staging in STEPS_OF
    for step, fault, found in cells(staging=staging)
]
IN_THE_TRAINER = ("plan", "stage")
IN_A_RANK = {
    "wire": "_start",
    "verify": "_verify",
    "prefetch": "_start",
    "copy": "_copy_staged",
}
IN_THE_ENGINE = {
    "begin": "begin_session",
    "end": "end_session",
    "flush": "try_flush_cache",
    "version": "move_version_label",
}
PATHS = {"begin": "/open", "resume": "/seal"}
_versions = itertools.count(1)


@pytest.fixture(scope="module")
def engines(ray_address: str, tiny_model: Path) -> Iterator[Callable[[], RunningEngine]]:
    """The engine of two ranks; another one once a test has killed it."""
    started: list[Any] = []

    def current() -> RunningEngine:
        if started and _alive(started[-1][1]):
            return started[-1][1]
        context = running_engine(tiny_model, tp_size=2)
        started.append((context, context.__enter__()))
        return started[-1][1]

    yield current
    context, last = started[-1]
    if _alive(last):
        context.__exit__(None, None, None)


def _alive(engine: RunningEngine) -> bool:
    try:
        return engine.get("health", timeout_s=10).status_code == 200
    except OSError:
        return False


class Load:
    """One request after the other until it is stopped; every one must end."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine
        self._stop = threading.Event()
        self.statuses: list[int] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def _run(self) -> None:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        while not self._stop.is_set():
            try:
                self.statuses.append(self._engine.post("generate", body, 60).status_code)
            except OSError:
                self.statuses.append(0)  # the engine is gone
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=90)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"


# What is done to whom


def _strike(fault: str, trainer_pid: int) -> Callable[[], None]:
    """What happens at the step, in whichever process that step runs."""

    def strike() -> None:
        if fault == "exception":
            raise RuntimeError("struck")
        if fault == "rank killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(trainer_pid, signal.SIGKILL if fault == "trainer killed" else signal.SIGSTOP)
        if os.getpid() == trainer_pid:
            signal.pause()

    return strike


def _strike_in_the_trainer(trainer: Any, step: str, strike: Callable[[], None]) -> None:
    def install(actor: Any, name: str, act: Callable[[], None]) -> None:
        method = {"plan": "_plan", "stage": "_distinct_buckets"}[name]
        setattr(actor._publisher, method, lambda *_, **__: act())

    ray.get(trainer.__ray_call__.remote(install, step, strike), timeout=30)


def _strike_in_a_rank(engine: RunningEngine, step: str, fault: str, strike: Any) -> None:
    def install(actor: Any, name: str, what: str, act: Callable[[], None]) -> None:
        receiver = actor._weight_receiver()
        original = getattr(receiver, name)
        struck: list[bool] = []

        def replaced(*arguments: Any) -> Any:
            if not struck:
                struck.append(True)
                if what == "byte corrupted":
                    return _flipped(original, arguments)
                act()
            return original(*arguments)

        def _flipped(call: Any, arguments: Any) -> Any:
            import torch

            read = call(*arguments)
            wait = read.wait

            def wait_and_flip(**options: Any) -> Any:
                arrived = wait(**options)
                arrived[0].view(-1).view(torch.uint8)[0] ^= 4
                return arrived

            read.wait = wait_and_flip
            return read

        setattr(receiver, name, replaced)

    call = engine.actors[1].__ray_call__.options(concurrency_group="control")
    ray.get(call.remote(install, IN_A_RANK[step], fault, strike), timeout=30)


def _strike_in_the_engine(engine: RunningEngine, step: str, strike: Any) -> None:
    def install(host: Any, name: str, act: Callable[[], None]) -> None:
        manager = host._engine.tokenizer_manager
        original = getattr(manager, name)

        async def replaced(*arguments: Any) -> Any:
            delattr(manager, name)
            act()
            return await original(*arguments)

        setattr(manager, name, replaced)

    ray.get(engine.host.__ray_call__.remote(install, IN_THE_ENGINE[step], strike), timeout=30)


def _kill_rank_1(engine: RunningEngine) -> Callable[[], None]:
    ask = engine.actors[1].__ray_call__.options(concurrency_group="control")
    pid = ray.get(ask.remote(lambda _: os.getpid()), timeout=30)

    def strike() -> None:
        os.kill(pid, signal.SIGKILL)

    return strike


def _mend(engine: RunningEngine) -> None:
    """Whatever a cell left installed is taken out again."""

    def undo(actor: Any) -> None:
        for name in ("_start", "_verify", "_copy_staged", "pull"):
            actor._weight_receiver().__dict__.pop(name, None)

    for actor in engine.actors:
        call = actor.__ray_call__.options(concurrency_group="control")
        ray.get(call.remote(undo), timeout=30)

    def undo_host(host: Any) -> None:
        for name in IN_THE_ENGINE.values():
            host._engine.tokenizer_manager.__dict__.pop(name, None)

    ray.get(engine.host.__ray_call__.remote(undo_host), timeout=30)


def _repeat_a_call(trainer: Any, method: str) -> None:
    def install(actor: Any, name: str) -> None:
        once = getattr(actor._publisher, name)

        def twice(*arguments: Any, **options: Any) -> Any:
            once(*arguments, **options)
            return once(*arguments, **options)

        setattr(actor._publisher, name, twice)

    ray.get(trainer.__ray_call__.remote(install, method), timeout=30)


# The grid


@pytest.mark.parametrize(("staging", "step", "fault", "expected"), GRID)
def test_a_fault_ends_as_the_table_says(
    engines, staging: str, step: str, fault: str, expected: Outcome
):
    engine = engines()
    medic, victim = start_trainer(), start_trainer()
    with ChaosProxy(engine.url).running() as proxy:
        try:
            _mend(engine)
            _connect(medic, engine, engine.url)
            _sync(medic, OLD_SEED, force=True)
            _connect(victim, engine, proxy.url, ttl_s=TTL_S)
            victim_pid = ray.get(victim.__ray_call__.remote(lambda _: os.getpid()), timeout=30)
            _install(engine, proxy, victim, step, fault, victim_pid)
            with Load(engine):
                new = next(_versions)
                raised = _run(victim, str(new), staging)
                _settle(engine, expected, str(new if expected.version == "new" else new - 1))
            assert raised or not expected.raises or fault.startswith("trainer")
            if fault in ("reply lost", "call repeated") and step in PATHS:
                assert proxy.met == 1
            _check_served(engine, expected)
            _end(victim_pid)
            if expected.state != "gone":
                _mend(engine)
                # A new owner takes over, and mends what was torn. It has to have met the engine after the victim.
                _connect(medic, engine, engine.url)
                _sync(medic, OLD_SEED, force=True)
                assert_serves(new_model(OLD_SEED), PROMPT, engine.generate(PROMPT, 4))
        finally:
            ray.kill(medic)
            ray.kill(victim)


def _end(pid: int) -> None:
    """A frozen process does not follow Ray's request to end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _install(
    engine: RunningEngine, proxy: ChaosProxy, victim: Any, step: str, fault: str, pid: int
) -> None:
    if fault in ("reply lost", "call repeated"):
        if step in PATHS:
            proxy.chaos, proxy.path = fault, PATHS[step]  # type: ignore[assignment]
        else:  # an actor call: Ray delivers its reply or fails it, so only the repeated call is left
            _repeat_a_call(victim, "_stage" if step == "prefetch" else "_commit")
        return
    strike = _strike(fault, pid)
    if fault == "rank killed" and step not in IN_A_RANK:
        strike = _kill_rank_1(engine)
    if step in IN_THE_TRAINER:
        _strike_in_the_trainer(victim, step, strike)
    elif step in IN_A_RANK:
        _strike_in_a_rank(engine, step, fault, strike)
    elif step in IN_THE_ENGINE:
        _strike_in_the_engine(engine, step, strike)
    else:
        assert (step, fault) == ("resume", "rank killed")
        _strike_in_the_engine(engine, "version", strike)


def _connect(trainer: Any, engine: RunningEngine, url: str, **options: Any) -> None:
    options = {"deadline_s": 8.0} | options
    ray.get(trainer.connect.remote([(url, engine.actors, "engine")], **options), timeout=120)


def _sync(trainer: Any, seed: int, **options: Any) -> None:
    ray.get(trainer.sync.remote(seed, str(next(_versions)), **options), timeout=120)


def _run(victim: Any, version: str, staging: str) -> BaseException | None:
    """The victim's sync; a frozen victim is not waited for."""
    call = victim.sync.remote(NEW_SEED, version, staging=staging)
    ready, _ = ray.wait([call], timeout=10)
    if not ready:
        return None
    try:
        ray.get(call)
    except (WeightSyncError, ray.exceptions.RayError, RuntimeError) as error:
        return error
    return None


def _settle(engine: RunningEngine, expected: Outcome, version: str) -> None:
    """Wait until nothing is being synced any more, and hold what then is against the table."""
    deadline = time.monotonic() + TTL_S + 30
    while time.monotonic() < deadline:
        if expected.state == "gone":
            if not _alive(engine):
                return
        else:
            status = engine.get("weight_sync").json()
            if status["state"] != "SYNCING":
                assert (status["state"], status["version"]) == (expected.state, version)
                return
        time.sleep(0.2)
    raise TimeoutError(f"the engine did not become {expected.state!r}")


def _check_served(engine: RunningEngine, expected: Outcome) -> None:
    if expected.state == "SERVING":
        seed = OLD_SEED if expected.version == "old" else NEW_SEED
        assert_serves(new_model(seed), PROMPT, engine.generate(PROMPT, 4))
    elif expected.state == "TORN":
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        assert engine.post("generate", body).status_code == 503
        assert engine.post("continue_generation", {}).status_code != 200
