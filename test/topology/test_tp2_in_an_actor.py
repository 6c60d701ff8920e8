"""TP=2 hosted by somebody's own threaded actor, on chosen bundles of their group: its life, one death of each kind.

The tests follow one engine from start to end, in order: serve, lose a rank, lose the host, start again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import requests
from leftovers import engine_processes, free_port, port_is_open, shared_memory, wait_for
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from support.local_ray import local_ray
from tiny_qwen import greedy_by_transformers

from sglang.srt.ray import get_scheduler_actor_name

pytestmark = pytest.mark.slow

PROMPTS = [[5, 17, 300, 22], [8, 9], [100, 101, 102, 103, 104, 105, 7], [44]]
NEW_TOKENS = 12
NAMESPACE = "their-engines"
START_TIMEOUT_S = 300


@ray.remote(num_cpus=0, max_concurrency=4)
class Host:
    """What a user's own actor does; everything it needs is imported inside, since workers lack this module."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.outcome: list[str] = []

    def start(self, arguments: dict[str, Any], group: Any) -> list[Any]:
        import multiprocessing
        import signal
        import threading

        from sglang.srt.ray.http_server import launch_engine, serve_http
        from sglang.srt.server_args import ServerArgs

        server_args = ServerArgs(**arguments)
        before = (
            signal.getsignal(signal.SIGQUIT),
            multiprocessing.get_start_method(allow_none=True),
        )

        def launch() -> None:
            self.engine = launch_engine(server_args, placement_group=group)

        # On a thread that ends: a child that is bound to its parent's thread would go with it.
        launcher = threading.Thread(target=launch)
        launcher.start()
        launcher.join()
        assert self.engine is not None, "the launch failed; its thread printed why"
        after = (
            signal.getsignal(signal.SIGQUIT),
            multiprocessing.get_start_method(allow_none=True),
        )
        assert before == after, (before, after)

        def serve() -> None:
            try:
                serve_http(self.engine, server_args)
                self.outcome.append("returned")
            except Exception as error:
                self.outcome.append(f"{type(error).__name__}: {error}")

        threading.Thread(target=serve, daemon=True).start()
        return list(self.engine.scheduler_actors)

    def served(self) -> list[str]:
        return self.outcome

    def pid(self) -> int:
        import os

        return os.getpid()

    def stop(self) -> None:
        self.engine.shutdown()


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    with local_ray(num_cpus=3):
        group = placement_group([{"CPU": 1}] * 3)
        assert group.wait(60)
        yield group
        remove_placement_group(group)


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


def arguments(model: Any, port: int) -> dict[str, Any]:
    return {
        "model_path": str(model),
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 4096,
        "tp_size": 2,
        "port": port,
        "random_seed": 0,
        "sleep_on_idle": True,
        "log_level": "warning",
        "ray_namespace": NAMESPACE,
        "enable_rdt_weight_sync": True,
    }


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Path:
    """A folder with an installed plugin, which notes the process that loads it."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "noting_plugin.py").write_text(
        "import os, pathlib\n"
        "def note():\n"
        "    pathlib.Path(__file__).with_name(f'loaded-{os.getpid()}').touch()\n"
    )
    metadata = folder / "noting_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: noting-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nnoting = noting_plugin:note\n"
    )
    return folder


def start_host(model: Any, port: int, group: Any, plugin: Path) -> tuple[Any, list[Any]]:
    path = os.pathsep.join([str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"env_vars": {"SGLANG_RAY_BUNDLE_INDICES": "2,0", "PYTHONPATH": path}}
    host = Host.options(runtime_env=environment).remote()
    actors = ray.get(host.start.remote(arguments(model, port), group), timeout=START_TIMEOUT_S)

    def up() -> bool:
        outcome = ray.get(host.served.remote(), timeout=60)
        assert not outcome, f"serving ended: {outcome!r}"
        return healthy(port)

    wait_for(up, "the server's health", START_TIMEOUT_S)
    return host, actors


def healthy(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=30).status_code == 200
    except requests.ConnectionError:
        return False


@pytest.fixture(scope="module")
def hosted(tiny_qwen, group, port, plugin) -> Iterator[tuple[Any, list[Any]]]:
    host, actors = start_host(tiny_qwen, port, group, plugin)
    yield host, actors
    ray.kill(host)


def generated(port: int, **more: Any) -> list[list[int]]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    answer = requests.post(
        f"http://127.0.0.1:{port}/generate",
        json={"input_ids": PROMPTS, "sampling_params": sampling} | more,
        timeout=120,
    )
    answer.raise_for_status()
    return [one["output_ids"] for one in answer.json()]


def name_of(group: Any, tp_rank: int, bundle: int) -> str:
    return get_scheduler_actor_name(
        group,
        node_ip=ray.util.get_node_ip_address(),
        dp_rank=0,
        pp_rank=0,
        tp_rank=tp_rank,
        bundle_index=bundle,
    )


def test_tokens_are_those_of_transformers(hosted, port, tiny_qwen):
    assert generated(port) == greedy_by_transformers(tiny_qwen, PROMPTS, NEW_TOKENS)


def test_the_ranks_hold_the_chosen_bundles_and_no_second_group_exists(hosted, group):
    _, actors = hosted
    for tp_rank, bundle in enumerate((2, 0)):
        named = ray.get_actor(name_of(group, tp_rank, bundle), namespace=NAMESPACE)
        assert named._actor_id == actors[tp_rank]._actor_id
    assert len(placement_group_table()) == 1


def test_a_rank_answers_while_its_loop_runs(hosted):
    _, actors = hosted
    layouts = ray.get([actor.weight_layout.remote() for actor in actors], timeout=30)
    assert [len(layout.entries) > 0 for layout in layouts] == [True, True]


def test_a_prompt_without_tokens_is_refused_and_ends_nothing(hosted, port):
    answer = requests.post(f"http://127.0.0.1:{port}/generate", json={"text": ""}, timeout=60)
    assert answer.status_code == 400
    assert "no tokens" in answer.text
    assert healthy(port)


def pid_of(actor: Any) -> int:
    from ray._private import state

    return state.actors(actor._actor_id.hex())["Pid"]


def test_the_callers_runtime_environment_and_its_plugins_reach_the_ranks(hosted, plugin):
    _, actors = hosted
    loaded = {int(note.name.partition("-")[2]) for note in plugin.glob("loaded-*")}
    assert {pid_of(actor) for actor in actors} <= loaded


def test_a_killed_rank_is_told_to_everybody_within_five_seconds(hosted, port):
    host, actors = hosted
    answers: list[Any] = []

    def wait_long() -> None:
        sampling = {"max_new_tokens": 900, "ignore_eos": True}
        answers.append(
            requests.post(
                f"http://127.0.0.1:{port}/generate",
                json={"input_ids": [5], "sampling_params": sampling},
                timeout=120,
            )
        )

    waiting = threading.Thread(target=wait_long)
    waiting.start()
    time.sleep(1)
    killed = time.monotonic()
    os.kill(pid_of(actors[1]), signal.SIGKILL)
    waiting.join(60)
    assert time.monotonic() - killed < 5
    assert answers[0].status_code == 503
    assert "rank 1 (dp 0, pp 0, tp 1) died" in answers[0].text
    assert not healthy(port)
    wait_for(lambda: ray.get(host.served.remote()), "the end of serve_http", 5)
    (outcome,) = ray.get(host.served.remote())
    assert outcome.startswith("RankDiedError: rank 1 (dp 0, pp 0, tp 1) died")
    assert ray.get(host.pid.remote())  # the host itself goes on
    wait_for(lambda: not port_is_open(port), "the end of the port")
    wait_for(lambda: not engine_processes(), "the end of the other rank, unasked")


def test_a_killed_host_leaves_nothing_and_its_place_is_free_within_a_second(
    hosted, port, group, tiny_qwen, plugin
):
    host, _ = hosted
    os.kill(ray.get(host.pid.remote()), signal.SIGKILL)
    again, _ = start_host(
        tiny_qwen, port, group, plugin
    )  # at once, in the same bundles, on the same port
    try:
        assert generated(port) == greedy_by_transformers(tiny_qwen, PROMPTS, NEW_TOKENS)
        titles = [" ".join(process.cmdline()) for process in engine_processes()]
        assert len([title for title in titles if "detokenizer" in title]) == 1, titles
        assert len([title for title in titles if "detokenizer" not in title]) == 2, titles
        memory = shared_memory(engine_processes())
        assert memory  # the ranks publish their load there
    finally:
        os.kill(ray.get(again.pid.remote()), signal.SIGKILL)
    wait_for(lambda: not engine_processes(), "the end of all processes")
    wait_for(lambda: not port_is_open(port), "the end of the port")
    wait_for(lambda: not any(path.exists() for path in memory), f"the end of {memory}")
    assert len(placement_group_table()) == 1
