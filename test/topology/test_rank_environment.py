"""The environment that a rank's actor is started with."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from sglang.srt.ray import rank_environment
from sglang.srt.ray.rank_environment import cpu_shares, rank_environments


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
    assert environment == {"NCCL_CUMEM_ENABLE": "0"}


@pytest.mark.parametrize("asked", [True, False])
def test_only_engines_that_sleep_get_the_memory_savers_preload(monkeypatch, asked):
    monkeypatch.setattr(rank_environment, "memory_saver_preload", lambda: "/lib/saver.so")
    environments = rank_environments(["n", "n"], device="cuda", memory_saver=asked, environment={})
    expected = {"LD_PRELOAD": "/lib/saver.so"} if asked else {}
    assert environments == [expected, expected]


@pytest.mark.usefixtures("local_ray")
def test_an_actor_of_an_engine_that_sleeps_is_started_with_the_library_on_disk(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    (environment,) = rank_environments(["n"], device="cuda", memory_saver=True)

    @ray.remote(num_cpus=0)
    def started_with() -> str:
        variables = Path("/proc/self/environ").read_bytes().split(b"\0")
        (preload,) = [one for one in variables if one.startswith(b"LD_PRELOAD=")]
        return preload.partition(b"=")[2].decode()

    preload = ray.get(started_with.options(runtime_env={"env_vars": environment}).remote())
    assert Path(preload).is_file()
    assert "torch_memory_saver" in Path(preload).name
