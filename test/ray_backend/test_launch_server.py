"""`python -m sglang.launch_server --ray` as a user starts, asks and stops it: nothing is left behind in any case."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import ray
import requests
from support.engine import HOST
from support.models import ENGINE_SEED, new_model, tokenizer
from support.oracle import greedy
from support.server_process import ServerProcess, launched_server

STOP_S = 15.0
FAIL_S = 240.0
MODEL = "default"


def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


def expected_text(prompt: list[int], length: int) -> str:
    return tokenizer().decode(greedy(new_model(ENGINE_SEED), prompt, length).tokens)


def assert_answers(server: ServerProcess) -> None:
    """Completions and chat, streamed and not, give the text that Hugging Face gives."""
    api, length = client(server), 8
    options: dict[str, Any] = {"model": MODEL, "max_tokens": length, "temperature": 0}
    options["extra_body"] = {"ignore_eos": True, "skip_special_tokens": False}
    prompt = "baba dede"
    expected = expected_text(tokenizer()(prompt)["input_ids"], length)
    assert api.completions.create(prompt=prompt, **options).choices[0].text == expected
    parts = api.completions.create(prompt=prompt, stream=True, **options)
    assert "".join(part.choices[0].text for part in parts) == expected

    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    expected = expected_text(ids, length)
    answer = api.chat.completions.create(messages=messages, **options)
    assert answer.choices[0].message.content == expected
    chunks = api.chat.completions.create(messages=messages, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def assert_stops(server: ServerProcess, number: signal.Signals) -> None:
    seconds = server.stop(number)
    assert server.returncode == 0, server.output()[-3000:]
    assert seconds < STOP_S, server.output()[-3000:]
    assert not server.left_behind()
    assert "Traceback" not in server.output(), server.output()[-5000:]
    with socket.socket() as probe:
        assert probe.connect_ex((HOST, server.port)) != 0, "somebody still listens"


def live_groups() -> list[str]:
    table = ray.util.placement_group_table()
    return [group for group, entry in table.items() if entry["state"] != "REMOVED"]


# With a Ray of its own


def test_it_serves_the_openai_endpoints_and_sigterm_leaves_nothing(tiny_model: Path):
    with launched_server(tiny_model, ray_address="local") as server:
        server.wait_until_healthy()
        assert_answers(server)
        assert_stops(server, signal.SIGTERM)


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_also_while_a_request_runs(tiny_model: Path):
    with launched_server(tiny_model, "--use-ray", ray_address="local") as server:
        server.wait_until_healthy()
        stream = client(server).completions.create(
            model=MODEL,
            prompt="baba",
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        assert next(iter(stream)).choices
        assert_stops(server, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_launch_leaves_nothing(tiny_model: Path, number: signal.Signals):
    with launched_server(tiny_model, ray_address="local") as server:
        with pytest.raises(TimeoutError):
            server.wait(25.0)  # into the launch: Ray runs, the rank is being made
        assert server.stop(number) < STOP_S + 5, server.output()[-3000:]
        assert not server.left_behind()


# In a running cluster, without --enable-rdt-weight-sync


@pytest.fixture(scope="module")
def joined(ray_address: str, tiny_model: Path) -> Iterator[ServerProcess]:
    groups = live_groups()
    with launched_server(tiny_model, ray_address=ray_address) as server:
        server.wait_until_healthy()
        yield server
        assert_stops(server, signal.SIGTERM)
        assert ray.is_initialized()
        assert ray.get(ray.remote(num_cpus=0)(lambda: 1).remote(), timeout=60) == 1
        assert live_groups() == groups, "the server's placement group is left"


def scheduler_of_the_server() -> Any:
    named = ray.util.list_named_actors(all_namespaces=True)
    mine = ray.get_runtime_context().namespace
    (found,) = [
        entry
        for entry in named
        if "sglang_scheduler" in entry["name"] and entry["namespace"] != mine
    ]
    return ray.get_actor(found["name"], namespace=found["namespace"])


def test_it_joins_a_running_cluster_and_answers_there(joined: ServerProcess):
    assert_answers(joined)
    assert len(live_groups()) >= 1


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("weight_layout", ()),
        ("register_weight_for_rdt", ()),
        ("pull_weights", ([], [])),
        ("plan_weights", ([],)),
        ("commit_weights", ("t", "layout", [], [], {})),
        ("weight_status", ()),
        ("verify_weights", ({},)),
    ],
)
def test_without_the_flag_every_verb_refuses_by_its_name(
    joined: ServerProcess, verb: str, arguments: tuple[Any, ...]
):
    from sglang.srt.ray.weight_sync import WeightSyncDisabledError

    actor = scheduler_of_the_server()
    with pytest.raises(WeightSyncDisabledError, match="--enable-rdt-weight-sync"):
        ray.get(getattr(actor, verb).remote(*arguments), timeout=60)


def test_without_the_flag_the_default_pause_stays_upstreams_and_never_reaches_the_scheduler(
    joined: ServerProcess,
):
    actor = scheduler_of_the_server()

    def paused() -> bool:
        call = actor.__ray_call__.remote(lambda self: self.scheduler._engine_paused)
        return ray.get(call, timeout=60)

    requests.post(f"{joined.url}/pause_generation", json={}, timeout=60).raise_for_status()
    assert paused() is False
    requests.post(
        f"{joined.url}/continue_generation", json={"torch_empty_cache": False}, timeout=60
    ).raise_for_status()
    requests.post(
        f"{joined.url}/pause_generation", json={"mode": "retract"}, timeout=60
    ).raise_for_status()
    assert paused() is True
    requests.post(
        f"{joined.url}/continue_generation", json={"torch_empty_cache": False}, timeout=60
    ).raise_for_status()
    assert_answers(joined)


IN_A_CONTEXT = """
import os, sys, ray
from ray.util.placement_group import placement_group
from sglang.launch_server import run_server
from sglang.srt.ray import use_placement_group
from sglang.srt.server_args import prepare_server_args

if __name__ == "__main__":  # the detokenizer's process imports this file again
    ray.init(log_to_driver=False)
    os.environ["SGLANG_RAY_BUNDLE_INDICES"] = "1"
    with use_placement_group(placement_group([{"CPU": 0.5}, {"CPU": 1}])) as group:
        print("group", group.id.hex(), flush=True)
        run_server(prepare_server_args(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_server_takes_the_group_of_its_context_and_no_other(
    ray_address: str, tiny_model: Path, tmp_path: Path
):
    script = tmp_path / "server.py"
    script.write_text(IN_A_CONTEXT)
    before = live_groups()
    with launched_server(tiny_model, ray_address=ray_address, program=(str(script),)) as server:
        server.wait_until_healthy()
        (group,) = [one for one in live_groups() if one not in before]
        assert f"group {group}" in server.output()
        assert ray.available_resources().get(f"CPU_group_1_{group}", 0) == 0, "not on bundle 1"
        assert_stops(server, signal.SIGTERM)
    assert live_groups() == before


# Mistakes: one clear error, non-zero, nothing left, no hang


def assert_failed_clearly(server: ServerProcess, *texts: str) -> None:
    status = server.wait(FAIL_S)
    output = server.output()
    assert status not in (0, None), output[-3000:]
    assert "Traceback" not in output, output[-5000:]
    errors = [line for line in output.splitlines() if line.startswith("sglang: ")]
    assert len(errors) == 1, output[-5000:]
    report = output[output.index(errors[0]) :]
    for text in texts:
        assert text in report, report
    assert not server.left_behind()


def test_a_model_path_that_does_not_exist_is_one_error(tmp_path: Path):
    missing = tmp_path / "no" / "model"
    with launched_server(missing, ray_address="local") as server:
        assert_failed_clearly(server, repr(str(missing)), "does not exist")


def test_a_model_path_without_a_model_is_one_error(tmp_path: Path):
    with launched_server(tmp_path, ray_address="local") as server:
        assert_failed_clearly(server, str(tmp_path))


def test_a_port_in_use_is_one_error(tiny_model: Path):
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with launched_server(tiny_model, ray_address="local", port=port) as server:
            assert_failed_clearly(server, str(port), "in use", "--port")


def test_a_cluster_without_room_is_one_error_that_says_what_is_missing(
    ray_address: str, tiny_model: Path
):
    groups = live_groups()
    short = {"SGLANG_RAY_PLACEMENT_TIMEOUT_S": "5"}
    with launched_server(
        tiny_model, "--tp-size", "4", ray_address=ray_address, environment=short
    ) as server:
        assert_failed_clearly(
            server, "not ready within 5 s", "[{'CPU': 4.0}]", "cluster:   {'CPU': 2.0}"
        )
    assert live_groups() == groups


@pytest.mark.slow
def test_a_rank_that_dies_takes_the_server_down_with_its_name(tiny_model: Path):
    with launched_server(tiny_model, ray_address="local") as server:
        server.wait_until_healthy()
        (rank,) = server.descendants("scheduler")
        rank.kill()
        assert server.wait(60) != 0
        assert "rank 0 (dp 0, pp 0, tp 0) died" in server.output()
        assert not server.left_behind()
