"""The environment that a rank's actor is started with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sglang.srt.ray import rank_actors, rank_environment
from sglang.srt.ray.placement import ChosenGroup, Place
from sglang.srt.ray.rank_environment import cpu_shares, rank_environments

GPU_LANE = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}


def test_one_cpu_rank_is_left_to_upstream():
    assert cpu_shares(["n"], None, [0, 1]) == [None]


def test_ranks_of_a_node_share_its_cores_evenly():
    assert cpu_shares(["n", "n"], None, [0, 1, 2, 3]) == ["0,1", "2,3"]


def test_ranks_on_different_nodes_have_a_node_each():
    assert cpu_shares(["a", "b"], None, [0, 1]) == ["0,1", "0,1"]


def test_more_ranks_than_cores_take_turns():
    assert cpu_shares(["n"] * 4, None, [0, 1]) == ["0", "1", "0", "1"]


def test_what_the_user_binds_is_handed_out_one_entry_a_rank():
    assert cpu_shares(["n", "n"], "0-3|4-7", [0, 1]) == ["0-3", "4-7"]


def test_too_few_entries_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"'0-3' has 1 entries, needed 2"):
        cpu_shares(["n", "n"], "0-3", [0, 1])


def test_what_upstreams_launcher_sets_for_its_children_reaches_the_actors():
    (environment,) = rank_environments(
        ["n"],
        device="cuda",
        memory_saver=False,
        environment={"NCCL_CUMEM_ENABLE": "0", "HOME": "/home/me"},
    )
    assert environment == GPU_LANE | {"NCCL_CUMEM_ENABLE": "0"}


def test_a_lane_that_the_user_set_is_left_alone():
    (environment,) = rank_environments(
        ["n"], device="cuda", memory_saver=False, environment={"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n"}
    )
    assert environment == {}


@pytest.mark.parametrize("asked", [True, False])
def test_only_engines_that_sleep_get_the_memory_savers_preload(monkeypatch, asked):
    monkeypatch.setattr(rank_environment, "memory_saver_preload", lambda: "/lib/saver.so")
    environments = rank_environments(["n", "n"], device="cuda", memory_saver=asked, environment={})
    expected = GPU_LANE | ({"LD_PRELOAD": "/lib/saver.so"} if asked else {})
    assert environments == [expected, expected]


def test_the_preload_is_the_memory_savers_library_for_this_torch(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    library = Path(rank_environment.memory_saver_preload())
    assert library.is_file()
    assert library.name.startswith("torch_memory_saver_hook_mode_preload")


def test_a_preload_of_the_users_is_kept(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/theirs.so")
    assert rank_environment.memory_saver_preload().split(":")[1] == "/usr/lib/theirs.so"


@pytest.mark.parametrize("cpu_backup", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_scheduler_actors_are_made_with_the_preload(monkeypatch, asked, cpu_backup):
    """With a configuration, a cluster and an actor class that only write down what they are asked."""
    made: list[dict[str, Any]] = []

    def options(**given: Any) -> SimpleNamespace:
        made.append(given)
        return SimpleNamespace(remote=lambda **_: object())

    features = SimpleNamespace(enable_memory_saver=asked, enable_weights_cpu_backup=cpu_backup)
    node = {"NodeID": "n", "NodeManagerAddress": "10.0.0.1"}
    monkeypatch.setattr(rank_environment, "memory_saver_preload", lambda: "/lib/saver.so")
    monkeypatch.setattr(rank_actors, "SchedulerActor", SimpleNamespace(options=options))
    monkeypatch.setattr(rank_actors, "get_exec", lambda: SimpleNamespace(features=features))
    monkeypatch.setattr(rank_actors, "get_device", lambda: SimpleNamespace(device="cuda"))
    monkeypatch.setattr(rank_actors, "_free_names", lambda *_: ["first", "second"])
    monkeypatch.setattr(rank_actors.ray, "nodes", lambda: [node])
    specs = rank_actors.rank_specs(tp_size=2, pp_size=1)
    ranks = rank_actors.RankActors(
        scheduler_infos=[],
        specs=specs,
        places=[Place(bundle=bundle, node="n") for bundle in range(2)],
        chosen_group=ChosenGroup(group=object(), source="keyword"),
    )
    rank_actors._create_actors(ranks, object(), SimpleNamespace(nccl_port=1), replica_size=2)
    preloads = [given["runtime_env"]["env_vars"].get("LD_PRELOAD") for given in made]
    assert preloads == [("/lib/saver.so" if asked else None)] * 2
    assert [given["num_gpus"] for given in made] == [1, 1]


@pytest.mark.usefixtures("local_ray")
def test_an_actor_is_started_with_the_preload(monkeypatch):
    """With a library that any process can load: the memory saver's own needs a CUDA driver."""
    harmless = next(Path("/lib").glob("*/libm.so.6"), None) or next(Path("/usr").rglob("libm.so.6"))
    monkeypatch.setattr(rank_environment, "memory_saver_preload", lambda: str(harmless))
    (environment,) = rank_environments(["n"], device="cuda", memory_saver=True)

    @ray.remote(num_cpus=0)
    class Rank:
        def environment_at_start(self) -> list[bytes]:
            return Path("/proc/self/environ").read_bytes().split(b"\0")

    rank = Rank.options(runtime_env={"env_vars": environment}).remote()
    started_with = ray.get(rank.environment_at_start.remote(), timeout=120)
    assert f"LD_PRELOAD={harmless}".encode() in started_with
