"""Weight syncs between a trainer and an engine on one GPU, with CUDA graphs, in bfloat16."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from typing import Any

import pytest
import ray
from one_gpu import DEVICE, WAIT_S, connect, in_rank
from support.engine import RunningEngine
from support.fused import fused_state
from support.models import ENGINE_SEED, new_model
from support.oracle import Generation, gap

from sglang.srt.ray.weight_sync import DigestMismatchError
from sglang.srt.ray.weight_sync.report import PHASES

pytestmark = pytest.mark.gpu

PROMPT = [5, 6, 7, 8, 9, 10]
NEVER_CACHED = [77, *PROMPT]
"""Begins with a token that no other request begins with (health probes send token 0): the whole prompt is computed."""
BF16_GAP = 0.25
"""Between the engine in bfloat16 and a float32 forward of the same rounded weights, in log-probability. A mantissa of 8
bits gives logits of a few units an error of a few hundredths; weights of another seed are off by several units."""
_versions = iter(range(1, 10**9))


@pytest.fixture
def engine(gpu_engine: RunningEngine) -> RunningEngine:
    return gpu_engine


def sync(trainers: dict[str, Any], seed: int, **options: Any) -> Any:
    trainers["synced"] = True
    call = trainers["now"].sync.remote(seed, str(next(_versions)), **options)
    return ray.get(call, timeout=WAIT_S)


def bytes_in_the_rank(actor: Any) -> dict[str, str]:
    """SHA-256 of each live parameter, copied to the host."""
    import torch

    model = actor.scheduler.tp_worker.model_runner.model
    return {
        name: hashlib.sha256(p.detach().cpu().contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, p in model.named_parameters()
    }


def expected_bytes(seed: int) -> dict[str, str]:
    import torch

    state = fused_state(new_model(seed).bfloat16().state_dict())
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, tensor in state.items()
    }


def addresses(actor: Any) -> dict[str, tuple[str, int]]:
    model = actor.scheduler.tp_worker.model_runner.model
    return {name: (p.device.type, p.data_ptr()) for name, p in model.named_parameters()}


def rounded(seed: int) -> Any:
    """Hugging Face's model with the weights that bfloat16 leaves of this seed's, computing in float32."""
    return new_model(seed).bfloat16().float()


def assert_serves(engine: RunningEngine, seed: int) -> Generation:
    answer = engine.generate([seed, *PROMPT], 12)
    found, other = (gap(rounded(each), [seed, *PROMPT], answer) for each in (seed, seed + 1000))
    print("gap to Hugging Face", found, "to other weights", other)
    assert found < BF16_GAP < other, (found, other)
    return answer


def test_outputs_follow_the_weights_while_addresses_stay_and_graphs_run(engine, trainers):
    before = in_rank(engine, addresses)
    if not trainers["synced"]:
        assert in_rank(engine, bytes_in_the_rank) == expected_bytes(ENGINE_SEED), "the checkpoint"
    sync(trainers, ENGINE_SEED)
    fresh = engine.generate(NEVER_CACHED, 12)
    assert {kind for kind, _ in before.values()} == {DEVICE}
    for seed in (11, 12, ENGINE_SEED):
        report = sync(trainers, seed)
        assert report.verified
        assert set(report.phase_seconds) <= set(PHASES)
        assert report.total_bytes == engine.ask("weight_layout").num_bytes
        assert in_rank(engine, bytes_in_the_rank) == expected_bytes(seed)
        answer = assert_serves(engine, seed)
        assert answer.version == report.version
        print(report.to_json())
    again = engine.generate(NEVER_CACHED, 12)
    assert (again.cached, again.tokens) == (fresh.cached, fresh.tokens)
    assert again.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)
    assert in_rank(engine, addresses) == before


@pytest.mark.skipif(DEVICE == "cpu", reason="a rehearsal on the CPU has no graphs")
def test_decoding_replays_captured_graphs(engine):
    def captured(actor: Any) -> tuple[bool, list[int]]:
        runner = actor.scheduler.tp_worker.model_runner
        return runner.decode_cuda_graph_captured, list(runner.decode_cuda_graph_runner.capture_bs)

    found, sizes = in_rank(engine, captured)
    assert found
    assert 1 in sizes


def test_a_second_sync_plans_and_pins_nothing(engine, trainers):
    sync(trainers, 11)

    def count(actor: Any) -> None:
        from sglang.srt.ray.weight_sync import transports

        receiver = actor._weight_receiver()
        receiver.calls = []
        plan, pin = receiver.plan, transports.pin
        receiver.plan = lambda manifest: receiver.calls.append("plan") or plan(manifest)
        transports.pin = lambda tensor: receiver.calls.append("pin") or pin(tensor)
        receiver.undo = lambda: (receiver.__dict__.pop("plan"), setattr(transports, "pin", pin))

    def calls(actor: Any) -> list[str]:
        actor._weight_receiver().undo()
        return actor._weight_receiver().calls

    in_rank(engine, count)
    for seed in (12, 13):
        sync(trainers, seed)
    assert in_rank(engine, calls) == []
    assert_serves(engine, 13)


def test_one_flipped_bit_in_device_memory_is_found_named_and_healed(engine, trainers):
    sync(trainers, 14)

    def damage(actor: Any) -> None:
        receiver = actor._weight_receiver()
        original = receiver._finish

        def finish(read: Any, names: Any, targets: Any, deadline: float) -> None:
            import torch

            original(read, names, targets, deadline)
            targets[-1].view(-1).view(torch.uint8)[-1] ^= 1

        receiver._finish = finish

    in_rank(engine, damage)
    try:
        with pytest.raises(DigestMismatchError, match="sums:" if DEVICE == "cuda" else "xxh3:"):
            sync(trainers, 15)
    finally:
        in_rank(engine, lambda actor: actor._weight_receiver().__dict__.pop("_finish") and None)
    assert engine.get("weight_sync").json()["state"] == "TORN"
    assert engine.post("generate", {"input_ids": PROMPT}).status_code == 503
    sync(trainers, 15)
    assert in_rank(engine, bytes_in_the_rank) == expected_bytes(15)
    assert_serves(engine, 15)


def test_a_sync_from_a_thread_that_never_touched_the_device(engine, trainers):
    """`sync_async` runs on a worker thread, whose current device nobody has set."""

    def on_a_thread(actor: Any, version: str) -> Any:
        import asyncio

        return asyncio.run(actor._publisher.sync_async(actor.state(16), version=version))

    call = trainers["now"].__ray_call__.remote(on_a_thread, str(next(_versions)))
    assert ray.get(call, timeout=WAIT_S).verified
    assert_serves(engine, 16)


def test_weights_that_a_side_stream_is_still_writing_arrive_whole(engine, trainers):
    """An optimizer may run on a stream of its own; the sync takes what it has written, not what was there before."""

    def late(actor: Any, version: str) -> Any:
        import torch

        state, new = actor.state(17), actor.state(18)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(400_000_000)  # about 0.2 s
                for name, tensor in state.items():
                    tensor.copy_(new[name])
        else:
            state = new
        return actor._publisher.sync(state, version=version)

    call = trainers["now"].__ray_call__.remote(late, str(next(_versions)))
    assert ray.get(call, timeout=WAIT_S).verified
    assert in_rank(engine, bytes_in_the_rank) == expected_bytes(18)


def test_weights_that_a_trainer_holds_on_the_cpu_reach_the_gpu(engine, trainers):
    def offloaded(actor: Any, version: str) -> Any:
        state = {name: tensor.cpu() for name, tensor in actor.state(19).items()}
        return actor._publisher.sync(state, version=version)

    call = trainers["now"].__ray_call__.remote(offloaded, str(next(_versions)))
    report = ray.get(call, timeout=WAIT_S)
    print(report.to_json())
    assert in_rank(engine, bytes_in_the_rank) == expected_bytes(19)
    assert_serves(engine, 19)


@pytest.mark.parametrize("delay_s", [0.001, 0.01])
def test_a_trainer_killed_mid_transfer_never_leaves_a_mixture_in_service(
    engine, trainers, make_trainer, delay_s
):
    sync(trainers, 20)
    victim = trainers["now"]
    connect(victim, engine, ttl_s=3.0, deadline_s=20.0)

    def commit_and_die(actor: Any, version: str) -> None:
        import threading

        publisher = actor._publisher
        commit = publisher._commit

        def dying(*arguments: Any, **options: Any) -> Any:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            commit(*arguments, **options)
            time.sleep(30)

        publisher._commit = dying
        publisher.sync(actor.state(21), version=version)

    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(victim.__ray_call__.remote(commit_and_die, str(next(_versions))), timeout=WAIT_S)
    deadline = time.monotonic() + 60
    while (state := engine.get("weight_sync").json())["state"] == "SYNCING":
        assert time.monotonic() < deadline, state
        time.sleep(0.2)
    found = in_rank(engine, bytes_in_the_rank)
    print("killed after", delay_s, "s:", state["state"], found == expected_bytes(20))
    if state["state"] == "SERVING":
        assert found == expected_bytes(20)
        assert_serves(engine, 20)
    else:
        assert state["state"] == "TORN"
        assert engine.post("generate", {"input_ids": PROMPT}).status_code == 503
    trainers["now"] = make_trainer()
    connect(trainers["now"], engine)
    sync(trainers, 22, force=True)
    assert in_rank(engine, bytes_in_the_rank) == expected_bytes(22)
    assert_serves(engine, 22)
