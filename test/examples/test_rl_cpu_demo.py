"""The demo itself, in a process of its own: real Ray, real engine, real transfer."""

from __future__ import annotations

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


def outliving(processes: list[psutil.Process], *, seconds: float) -> list[psutil.Process]:
    """Those of the processes that are still there when the seconds are over."""
    return psutil.wait_procs(processes, timeout=seconds)[1]


@pytest.mark.slow
def test_six_steps_prove_every_sync_and_raise_the_reward(tmp_path: Path):
    demo = demo_process(tmp_path, "--steps", "6", "--seed", "0")
    try:
        output, _ = demo.communicate(timeout=300)
    finally:
        demo.kill()
    assert demo.returncode == 0, output
    written = json.loads((tmp_path / "summary.json").read_text())
    steps = written["steps"]
    assert written["outcome"] == "completed"
    assert [step["engine_version"] for step in steps] == [str(n) for n in range(1, 7)]
    assert all(step["update"]["gap"] < GAP_TOLERANCE for step in steps), output
    assert written["evaluation"]["gap"] < GAP_TOLERANCE < written["control_gap"]
    assert written["evaluation"]["reward"] > steps[0]["reward"]
    assert output.count("\nstep ") == 6, output


@pytest.mark.slow
@pytest.mark.parametrize("sign_of_life", ["starting the engine", "step   2/"])
def test_ctrl_c_leaves_nothing_running(tmp_path: Path, sign_of_life: str):
    demo = demo_process(tmp_path, "--steps", "1000")
    try:
        seen = []
        for line in demo.stdout:
            seen.append(line)
            if sign_of_life in line:
                break
        if sign_of_life.startswith("starting"):
            time.sleep(8)  # into the launch of the ranks
        children = psutil.Process(demo.pid).children(recursive=True)
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
        rest, _ = demo.communicate(timeout=90)
    finally:
        demo.kill()
    output = "".join(seen) + rest
    assert demo.returncode == 130, output
    assert len(children) > 2, output
    assert not outliving(children, seconds=5), output
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "interrupted"
