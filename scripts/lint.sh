#!/usr/bin/env bash
# ruff on everything that is ours, mypy on the overlay (as it lies in build/tree) and the tools.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${VENV:-.venv}/bin/python
[[ $python = /* ]] || python=$PWD/$python

"$python" -m ruff check .
PYTHON=$python scripts/fork tree >/dev/null
mapfile -d '' overlay < <(find python -name '*.py' -not -path '*/__pycache__/*' -print0)
"$python" -m mypy build_backend scripts "${overlay[@]/#/build/tree/}"
