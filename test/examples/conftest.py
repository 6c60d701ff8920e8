"""The demo is a folder of scripts, not a package: put it on the path as running main.py does."""

import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "examples" / "rl_cpu"
sys.path.insert(0, str(DEMO))
