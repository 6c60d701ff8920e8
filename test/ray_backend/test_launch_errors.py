"""What a user sees when a Ray server can't start."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.ray.launch_errors import check_before_launch, reported_in_one_line


def arguments(**changes: Any) -> SimpleNamespace:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    fields = {"use_ray": True, "enable_rdt_weight_sync": False, "model_path": "org/model"}
    fields |= {"device": "cuda", "log_level": "info", "launch_command": "launch_server --ray"}
    return SimpleNamespace(**(fields | {"port": port} | changes))


def failing(_: Any) -> None:
    raise RuntimeError("the rank is gone")


def test_a_failed_start_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        reported_in_one_line(failing)(arguments())
    assert ended.value.code == 1
    assert capsys.readouterr().err == "sglang: RuntimeError: the rank is gone\n"


def test_a_variable_brings_the_traceback_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_RAY_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="the rank is gone"):
        reported_in_one_line(failing)(arguments())


def test_without_ray_nothing_changes():
    with pytest.raises(RuntimeError, match="the rank is gone"):
        reported_in_one_line(failing)(arguments(use_ray=False, model_path="/no/such/model"))


def test_a_start_that_works_is_passed_through():
    seen: list[Any] = []
    given = arguments()
    reported_in_one_line(seen.append)(given)
    assert seen == [given]


def test_weight_sync_implies_the_ray_backend():
    seen: list[Any] = []
    reported_in_one_line(seen.append)(arguments(use_ray=False, enable_rdt_weight_sync=True))
    assert seen[0].use_ray is True
    with pytest.raises(SystemExit):
        reported_in_one_line(failing)(arguments(use_ray=False, enable_rdt_weight_sync=True))


@pytest.mark.parametrize("path", ["/no/such/model", "./nowhere", "~/nowhere/model", "a/b/c"])
def test_a_path_that_does_not_exist_is_refused_by_name(path: str):
    with pytest.raises(ValueError, match=f"model path '{path}' does not exist"):
        check_before_launch(arguments(model_path=path))


@pytest.mark.parametrize("name", ["org/model", "gpt2"])
def test_a_name_on_the_hub_is_no_path(name: str):
    check_before_launch(arguments(model_path=name))


def test_a_path_that_exists_and_a_free_port_pass(tmp_path: Path):
    check_before_launch(arguments(model_path=tmp_path))


def test_a_port_in_use_is_refused_with_the_way_out():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is in use.*--port"):
            check_before_launch(arguments(port=port))


@pytest.mark.parametrize(
    ("device", "typed", "level"),
    [
        ("cpu", "launch_server --ray --device cpu", "warning"),
        ("cpu", "launch_server --ray --device cpu --log-level info", "info"),
        ("cuda", "launch_server --ray", "info"),
    ],
)
def test_a_cpu_server_warns_only_unless_a_level_was_typed(device: str, typed: str, level: str):
    seen: list[str] = []
    given = arguments(device=device, launch_command=typed)
    reported_in_one_line(lambda server_args: seen.append(server_args.log_level))(given)
    assert seen == [level]
