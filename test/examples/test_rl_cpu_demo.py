"""The demo itself, in a process of its own: real Ray, real engine, real transfer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from records import GAP_TOLERANCE

MAIN = Path(__file__).resolve().parents[2] / "examples" / "rl_cpu" / "main.py"


def demo_process(out: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, str(MAIN), "--out", str(out), *arguments]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def outliving(session: int, *, seconds: float) -> list[psutil.Process]:
    """Processes of a session that are still there when the seconds are over."""
    return psutil.wait_procs(processes_of(session), timeout=seconds)[1]


def processes_of(session: int) -> list[psutil.Process]:
    """All processes of a session; the demo's, Ray's and the engine's share that of the demo."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == session:
                found.append(process)
    return found


def test_twelve_steps_prove_every_sync_and_raise_the_reward(tmp_path: Path):
    demo = demo_process(tmp_path, "--steps", "12", "--seed", "0")
    try:
        output, _ = demo.communicate(timeout=300)
    finally:
        demo.kill()
    assert demo.returncode == 0, output
    written = json.loads((tmp_path / "summary.json").read_text())
    steps = written["steps"]
    assert written["outcome"] == "completed"
    assert [step["engine_version"] for step in steps] == [str(n) for n in range(1, 13)]
    assert all(step["update"]["gap"] < GAP_TOLERANCE for step in steps), output
    assert written["evaluation"]["gap"] < GAP_TOLERANCE < written["control_gap"]
    assert steps[0]["reward"] < 0.2 < written["evaluation"]["reward"], output
    assert output.count("\nstep ") == 12, output
    assert not outliving(demo.pid, seconds=5), output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign_of_life", "number"),
    [
        pytest.param("starting the engine", signal.SIGINT, id="ctrl-c-in-the-launch"),
        pytest.param("step   2/", signal.SIGINT, id="ctrl-c-in-training"),
        pytest.param("step   2/", signal.SIGTERM, id="a-sigterm-that-ends-ray-as-well"),
    ],
)
def test_an_interrupt_leaves_nothing_running(tmp_path: Path, sign_of_life: str, number: int):
    demo = demo_process(tmp_path, "--steps", "1000")
    try:
        seen = []
        for line in demo.stdout:
            seen.append(line)
            if sign_of_life in line:
                break
        if sign_of_life.startswith("starting"):
            time.sleep(8)  # into the launch of the ranks
        running = processes_of(demo.pid)
        os.killpg(demo.pid, number)  # as a terminal and `timeout` do: the whole group
        rest, _ = demo.communicate(timeout=90)
    finally:
        demo.kill()
    output = "".join(seen) + rest
    assert demo.returncode == 130, output
    assert len(running) > 5, output  # Ray's own and an actor at least, or this proves nothing
    assert not outliving(demo.pid, seconds=5), output
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "interrupted"
