"""The doctor: its judgement over machines that are told to it, and its report of the real one."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.ray.doctor import CHECKS, cluster, lane, machine
from sglang.srt.ray.doctor.cluster_child import RANK_PREFIX
from sglang.srt.ray.doctor.findings import Finding, Place, examined, worst
from sglang.srt.ray.identity import get_scheduler_actor_name
from sglang.srt.ray.weight_sync.lane_probe import Loopback
from sglang.srt.ray.weight_sync.lanes import HostLoopback

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m sglang.srt.ray.doctor"
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
FAST = Loopback(lane="zero-copy cuda_ipc/cuda", gigabytes_per_second=1000.0)
SLOW = Loopback(lane="software emulation tcp/lo", gigabytes_per_second=0.5)


def place(environment: dict[str, str] | None = None, address: str | None = None) -> Place:
    return Place(environment={} if environment is None else environment, address=address)


def statuses(findings: Any) -> list[str]:
    return [finding.status for finding in findings]


# The list of checks


def test_a_check_that_raises_is_one_failed_line_with_its_cause_and_the_others_go_on():
    def breaks(_place: Place) -> Iterator[Finding]:
        yield Finding(check="half", status="ok", text="so far")
        raise OSError("no such\nthing")

    def works(_place: Place) -> Iterator[Finding]:
        yield Finding(check="whole", status="warn", text="well")

    found = list(examined({"half": breaks, "whole": works}, place()))
    assert statuses(found) == ["ok", "fail", "warn"]
    assert (
        found[1].line.partition("half")[2].strip() == "the check ended with OSError: no such thing"
    )
    assert worst(found) == "fail"
    assert worst(found[2:]) == "warn"
    assert worst([]) == "ok"


# Judgement


def test_versions_are_held_against_what_the_package_asks_for():
    requirements = [
        'ray[default,serve]>=2.60; extra == "ray"',
        'nixl; extra == "ray"',
        "torch==2.14.1",
    ]
    there = {"ray": "2.55.1", "torch": "2.14.1+cpu", "nixl": None}
    found = {f.text.split()[0]: f for f in machine.version_findings(requirements, there.get)}
    assert {name: f.status for name, f in found.items()} == {
        "ray": "warn",
        "nixl": "fail",
        "torch": "ok",
    }
    assert ">=2.60" in found["ray"].text


def test_another_sglang_than_the_installed_one_is_named():
    assert machine.sglang_finding("1", "1", "/a").status == "ok"
    found = machine.sglang_finding("0.5.23+rdt.2", "0.5.23+rdt.1", "/tree")
    assert found.status == "warn"
    assert "'/tree'" in found.text


@pytest.mark.parametrize(
    ("names", "files", "visible", "status", "said"),
    [
        ([], [], None, "ok", "--device cpu"),
        (["H200"] * 2, ["nvidia0", "nvidia1"], None, "ok", "2 x H200"),
        (["H200"], ["nvidia0", "nvidia1"], "1", "ok", "CUDA_VISIBLE_DEVICES='1'"),
        (["H200"], ["nvidia0", "nvidia1"], "0,7", "fail", "names 2 GPU(s), torch sees 1"),
        ([], ["nvidia0"], None, "fail", "driver"),
        ([], ["nvidia0"], "", "warn", "hidden"),
        ([], ["nvidia0"], "-1", "warn", "hidden"),
    ],
)
def test_devices(names, files, visible, status, said):
    found = machine.device_finding(names, files, visible)
    assert found.status == status
    assert said in found.text


def test_expandable_segments_are_harmful_to_a_gpu_only():
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert statuses(machine.environment_findings(environment, "cuda")) == ["warn"]
    assert statuses(machine.environment_findings(environment, "cpu")) == ["ok"]


def test_the_switch_of_a_gpu_is_explained_and_the_users_own_stays():
    ours = lane.settings_finding({}, "cuda")
    assert ours.facts["set_for_ranks"] == {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}
    theirs = lane.settings_finding({"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n"}, "cuda")
    assert theirs.facts["set_for_ranks"] == {}
    assert "'n' is yours and stays" in theirs.text


@pytest.mark.parametrize(
    ("chosen", "where", "status"),
    [(FAST, "cuda", "ok"), (SLOW, "cuda", "fail"), (SLOW, "cpu", "warn")],
)
def test_a_lane_below_what_a_publisher_takes_fails(chosen, where, status):
    found = lane.loopback_finding(HostLoopback(chosen=chosen, untouched=FAST), where)
    assert found.status == status
    assert chosen.lane in found.text


def test_a_container_says_who_shares_its_lanes():
    assert "container" in machine.pid_namespace_finding("pid:[4026533333]").text
    assert "container" not in machine.pid_namespace_finding(machine.HOST_PID_NAMESPACE).text


CLUSTER = {
    "ray": "2.60.0", "address": "a:1", "total": {"GPU": 8.0}, "free": {}, "placement_groups": {"PENDING": 1},
    "nodes": [
        {"address": "a", "alive": True, "resources": {"GPU": 8.0}},
        {"address": "b", "alive": False, "resources": {}},
    ],
    "ranks_by_namespace": {"mine": 8},
}  # fmt: skip


def test_a_cluster_is_told_in_devices_groups_and_namespaces():
    found = cluster.placement_finding(CLUSTER, "GPU")
    assert found.status == "warn"
    assert "1 node(s): 0 of 8 GPU free, at most 8 on one node, 1 former" in found.text
    assert "1 placement group(s) wait" in found.text
    assert "no node offers any CPU" in cluster.placement_finding(CLUSTER, "CPU").text
    assert "8 in 'mine'" in cluster.namespace_finding(CLUSTER).text


def test_the_prefix_by_which_ranks_are_counted_is_that_of_their_names():
    name = get_scheduler_actor_name(
        "g", node_ip="a", dp_rank=0, pp_rank=0, tp_rank=0, bundle_index=0
    )
    assert name.startswith(RANK_PREFIX)


# The real machine


def test_the_report_of_this_machine_is_as_the_page_shows_it():
    """In a process of its own, with a real transfer and no Ray: the same checks in the same order, and all is well."""
    command, shown = re.findall(
        rf"```bash\n({COMMAND})\n```.*?```text\n(.*?)```",
        (ROOT / "docs/operations.md").read_text(),
        re.S,
    )[0]
    environment = PLAIN | {"RAY_ADDRESS": "local"}
    done = subprocess.run(
        [sys.executable, *command.split()[1:], "--json"], env=environment, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    shown_checks = [re.split(r"\s{2,}", line)[1] for line in shown.splitlines()]
    assert [finding["check"] for finding in told["findings"]] == shown_checks
    facts = {finding["check"]: finding["facts"] for finding in told["findings"]}
    assert facts["loop-back"]["gigabytes_per_second"] > 0
    assert re.fullmatch(r"[\d.]+", facts["version"]["ucx"])


def test_a_lane_that_the_environment_takes_away_is_a_warning_with_its_price():
    checks = {name: CHECKS[name] for name in ("environment", "lane settings", "loop-back")}
    found = list(examined(checks, place(PLAIN | {"UCX_TLS": "tcp"})))
    assert statuses(found) == ["warn", "ok", "warn"]
    assert "UCX_TLS='tcp'" in found[0].text
    assert "tcp/" in found[2].facts["lane"]
    assert "zero-copy" in found[2].facts["lane_of_ucx_left_alone"]


def test_a_running_ray_is_asked_for_its_room_and_its_ranks(ray_address: str):
    found = list(cluster.cluster(place(dict(os.environ), ray_address)))
    assert [finding.check for finding in found] == ["placement", "Ray namespace"]
    assert found[0].facts["address"] == ray_address
    assert found[0].facts["total"]["CPU"] == 2


def test_a_ray_that_does_not_answer_costs_a_deadline():
    with pytest.raises(TimeoutError, match=r"'127\.0\.0\.1:1' did not answer within 0\.5 s"):
        cluster.asked_cluster(place(PLAIN, "127.0.0.1:1"), timeout_s=0.5)


def test_everything_that_names_the_doctor_names_a_command_that_exists():
    assert importlib.util.find_spec(COMMAND.split()[-1] + ".__main__") is not None
    for page in ("docs/operations.md", ".github/ISSUE_TEMPLATE/bug.md"):
        assert re.search(rf"^(\| .*`)?{re.escape(COMMAND)}\b", (ROOT / page).read_text(), re.M), (
            page
        )
    assert "the doctor" in (ROOT / "deploy/grafana-weight-sync.json").read_text()
