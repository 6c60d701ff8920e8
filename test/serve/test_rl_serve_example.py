"""The reference driver in a process of its own: a few steps, every replica at the last version, caches used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

MAIN = Path(__file__).resolve().parents[2] / "examples" / "rl_serve" / "main.py"


@pytest.mark.slow
def test_it_learns_over_sessions_and_ends_clean():
    done = subprocess.run(
        [sys.executable, str(MAIN), "--steps", "12"], capture_output=True, text=True, timeout=540
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-5000:]
    first = re.search(r"step +1/12 .*? reward ([0-9.]+)", text)
    final = re.search(r"final policy: reward ([0-9.]+)", text)
    assert first is not None, text[-5000:]
    assert final is not None, text[-5000:]
    assert float(first.group(1)) < 0.2 < float(final.group(1)), text[-5000:]
    assert "replicas serve ['13', '13']" in re.sub(r"\s+", " ", text), text[-3000:]
    cached = re.search(r"(\d+) prompt tokens came from session caches", re.sub(r"\s+", " ", text))
    assert cached is not None
    assert int(cached.group(1)) > 0
