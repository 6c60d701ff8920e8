"""Two engines in one driver, on chosen bundles of one group: neither touches the other, and a dead one is told.

The tests follow the two from start to end, in order: share the group, lose a rank, lose a detokenizer. The last one
kills a driver.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from leftovers import engine_processes, local_sockets, shared_memory, wait_for
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from support.local_ray import local_ray
from tiny_qwen import greedy_by_transformers

from sglang.srt.ray.placement import PlacementError, use_placement_group

PROMPT = [5, 17, 300, 22]
SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
TOLD_S = 5.0
INDICES = "SGLANG_RAY_BUNDLE_INDICES"

DRIVER = """
import json, sys, time, ray
from sglang.srt.ray import RayEngine

if __name__ == "__main__":  # the detokenizer's process imports this file again
    address, model = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    options = {"device": "cpu", "dtype": "float32", "max_total_tokens": 4096, "sleep_on_idle": True}
    engine = RayEngine(model_path=model, **options)
    engine.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 2})
    ports = {name: value for name, value in vars(engine.port_args).items() if isinstance(value, str)}
    print(json.dumps(ports), flush=True)
    time.sleep(600)
"""


def arguments(model: Path) -> dict[str, Any]:
    return {
        "model_path": str(model),
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 4096,
        "random_seed": 0,
        "sleep_on_idle": True,
    }


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with local_ray(num_cpus=3) as address:
        yield address


@pytest.fixture(scope="module")
def group(cluster: str) -> Iterator[Any]:
    """All of the cluster: nothing can be placed outside of it."""
    made = placement_group([{"CPU": 1}] * 3)
    assert made.wait(60)
    yield made
    remove_placement_group(made)


@pytest.fixture(scope="module")
def engines(group: Any, tiny_qwen: Path) -> Iterator[list[Any]]:
    """The first on bundle 2, by keyword; the second on bundle 0, by context."""
    from sglang.srt.ray import RayEngine

    started: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        try:
            patch.setenv(INDICES, "2")
            started.append(RayEngine(placement_group=group, **arguments(tiny_qwen)))
            patch.setenv(INDICES, "0")
            with use_placement_group(group):
                started.append(RayEngine(**arguments(tiny_qwen)))
            yield started
        finally:
            for engine in started:
                engine.shutdown()
    wait_for(lambda: not engine_processes(), "the end of the ranks")
    assert ray.get(ray.remote(num_cpus=0)(lambda: 1).remote(), timeout=60) == 1


@pytest.fixture(scope="module")
def expected(tiny_qwen: Path) -> list[int]:
    return greedy_by_transformers(tiny_qwen, [PROMPT], SAMPLING["max_new_tokens"])[0]


def tokens_of(engine: Any) -> list[int]:
    return engine.generate(input_ids=PROMPT, sampling_params=SAMPLING)["output_ids"]


def pid_of_rank(engine: Any) -> int:
    (actor,) = engine._scheduler_init_result.scheduler_actors
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60)


def live_groups() -> int:
    return sum(one["state"] != "REMOVED" for one in placement_group_table().values())


def failure_of_a_long_request(engine: Any, kill: Any) -> tuple[Exception, float]:
    """What a request that was under way when `kill` was called ends with, and how many seconds after."""
    caught: list[Exception] = []

    def ask() -> None:
        try:
            long = {"max_new_tokens": 900, "ignore_eos": True}
            engine.generate(input_ids=PROMPT, sampling_params=long)
        except Exception as error:
            caught.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    time.sleep(1)
    kill()
    killed = time.monotonic()
    waiting.join(60)
    return caught[0], time.monotonic() - killed


def test_both_give_the_tokens_of_transformers(engines, expected):
    assert [tokens_of(engine) for engine in engines] == [expected, expected]


def test_each_is_on_the_bundle_that_was_named_and_no_second_group_exists(engines, group):
    results = [engine._scheduler_init_result for engine in engines]
    assert [place.bundle for result in results for place in result.places] == [2, 0]
    assert [result.chosen_group.source for result in results] == ["keyword", "context"]
    assert len({name for result in results for name in result.names}) == 2
    assert live_groups() == 1
    free = ray.available_resources()
    assert [free.get(f"CPU_group_{i}_{group.id.hex()}", 0) for i in range(3)] == [0, 1, 0]


def test_a_third_engine_on_a_taken_bundle_is_refused(engines, group, tiny_qwen, monkeypatch):
    from sglang.srt.ray import RayEngine

    monkeypatch.setenv(INDICES, "2")
    monkeypatch.setenv("SGLANG_RAY_PLACEMENT_TIMEOUT_S", "2")
    with pytest.raises(PlacementError, match=r"no room within 2 s.*another engine or actor holds"):
        RayEngine(placement_group=group, **arguments(tiny_qwen))
    assert len(engine_processes()) == 4, "two ranks and two detokenizers, those from before"


def test_a_killed_rank_ends_its_own_engine_only_and_the_driver_is_told(engines, expected):
    from sglang.srt.ray import RankDiedError

    first, second = engines
    pid = pid_of_rank(second)
    error, seconds = failure_of_a_long_request(second, lambda: os.kill(pid, signal.SIGKILL))
    assert isinstance(error, RankDiedError), error
    assert str(error).startswith("rank 0 (dp 0, pp 0, tp 0) died: ")
    assert seconds < TOLD_S
    with pytest.raises(RankDiedError):
        second.flush_cache()
    wait_for(lambda: len(engine_processes()) == 2, "the end of its detokenizer, unasked")
    assert tokens_of(first) == expected


def test_a_killed_detokenizer_ends_its_engine_and_the_driver_is_told(engines):
    from sglang.srt.ray.liveness import DetokenizerDiedError

    first, _ = engines
    process = first._scheduler_init_result.parts.detokenizer.process
    error, seconds = failure_of_a_long_request(first, process.kill)
    assert isinstance(error, DetokenizerDiedError), error
    assert f"(pid {process.pid}) died with exit code -9" in str(error)
    assert seconds < TOLD_S
    wait_for(lambda: not engine_processes(), "the end of its rank, unasked")


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing(engines, group, cluster, tiny_qwen, tmp_path):
    for engine in engines:
        engine.shutdown()
    remove_placement_group(group)  # the driver's engine makes a group of its own
    wait_for(lambda: not live_groups(), "the end of the group")
    script, log = tmp_path / "driver.py", tmp_path / "log"
    script.write_text(DRIVER)
    with log.open("wb") as output:
        driver = psutil.Popen(
            [sys.executable, str(script), cluster, str(tiny_qwen)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:

        def ready() -> bool:
            assert driver.poll() is None, log.read_text()[-3000:]
            return "scheduler_input_ipc_name" in log.read_text()

        wait_for(ready, "the driver's engine", 300)
        processes = {*engine_processes(), *driver.children(recursive=True)}
        files = {path for path in sockets_in(log.read_text()) if path.exists()}
        files |= shared_memory([driver, *processes])
        assert len(engine_processes()) == 2
        assert files
        assert live_groups() == 1
    finally:
        if driver.poll() is None:
            driver.kill()
        driver.wait(10)
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
    wait_for(lambda: not any(path.exists() for path in files), f"the end of {files}")
    wait_for(lambda: not live_groups(), "the end of its group")
    assert ray.util.list_named_actors(all_namespaces=True) == []


def sockets_in(printed: str) -> set[Path]:
    import json
    from types import SimpleNamespace

    (line,) = [line for line in printed.splitlines() if "scheduler_input_ipc_name" in line]
    return local_sockets(SimpleNamespace(**json.loads(line)))
