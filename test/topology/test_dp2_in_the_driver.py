"""DP=2 as a RayEngine of the driver's own process: both replicas work, from threads and coroutines alike."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
from leftovers import engine_processes, wait_for
from support.local_ray import local_ray
from tiny_qwen import greedy_by_transformers

SIGQUIT_BEFORE = signal.getsignal(signal.SIGQUIT)
"""Ignored where a shell started the tests in the background."""
PROMPTS = [[5, 17, 300, 22], [8, 9], [100, 101, 102, 103, 104, 105, 7], [44]]
SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tiny_qwen) -> Iterator[Any]:
    from sglang.srt.ray import RayEngine

    with local_ray():
        engine = RayEngine(
            model_path=str(tiny_qwen),
            device="cpu",
            dtype="float32",
            max_total_tokens=4096,
            dp_size=2,
            random_seed=0,
            sleep_on_idle=True,
        )
        yield engine
        engine.shutdown()
        wait_for(lambda: not engine_processes(), "the end of the ranks")
        assert ray.is_initialized()
        assert ray.get(ray.remote(lambda: 1).remote(), timeout=60) == 1  # the driver's Ray lives on


@pytest.fixture(scope="module")
def expected(tiny_qwen) -> list[list[int]]:
    return greedy_by_transformers(tiny_qwen, PROMPTS, SAMPLING["max_new_tokens"])


def test_tokens_are_those_of_transformers(engine, expected):
    answers = engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)
    assert [answer["output_ids"] for answer in answers] == expected


def test_ranks_are_in_dp_major_order(engine):
    specs = engine._scheduler_init_result.specs
    assert [(spec.rank, spec.dp_rank, spec.tp_rank) for spec in specs] == [(0, 0, 0), (1, 1, 0)]


@pytest.mark.parametrize("replica", [0, 1])
def test_a_request_can_ask_for_each_replica(engine, expected, replica):
    answer = engine.generate(input_ids=PROMPTS[0], sampling_params=SAMPLING, routed_dp_rank=replica)
    assert answer["output_ids"] == expected[0]


def test_a_control_verb_reaches_both_replicas(engine):
    assert len(engine.get_server_info()["internal_states"]) == 2
    assert engine.flush_cache().success


def test_many_threads_may_call_at_once(engine, expected):
    def ask(index: int) -> list[int]:
        return engine.generate(input_ids=PROMPTS[index], sampling_params=SAMPLING)["output_ids"]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == expected


def test_a_coroutine_may_await_stream_and_call_synchronous_verbs(engine, expected):
    async def all_ways() -> None:
        awaited = await engine.async_generate(input_ids=PROMPTS[1], sampling_params=SAMPLING)
        assert awaited["output_ids"] == expected[1]
        stream = await engine.async_generate(
            input_ids=PROMPTS[2], sampling_params=SAMPLING, stream=True
        )
        assert [part async for part in stream][-1]["output_ids"] == expected[2]
        assert engine.flush_cache().success

    asyncio.run(all_ways())


def test_the_drivers_signals_and_start_method_are_its_own(engine):
    import multiprocessing

    assert signal.getsignal(signal.SIGQUIT) == SIGQUIT_BEFORE
    assert multiprocessing.get_start_method(allow_none=True) in (None, "fork")


def test_a_second_engine_with_another_configuration_is_refused(engine, tiny_qwen):
    from sglang.srt.ray import RayEngine
    from sglang.srt.ray.caller_process import EngineConflictError

    with pytest.raises(EngineConflictError, match=r"\['max_total_tokens'\].*Ray actor of its own"):
        RayEngine(
            model_path=str(tiny_qwen),
            device="cpu",
            dtype="float32",
            max_total_tokens=8192,  # a smaller one would change the graph sizes derived from it too
            dp_size=2,
            random_seed=0,
            sleep_on_idle=True,
        )
    assert threading.active_count() > 1


def test_the_engine_still_works_after_the_refusal(engine, expected):
    answer = engine.generate(input_ids=PROMPTS[3], sampling_params=SAMPLING)
    assert answer["output_ids"] == expected[3]
