#!/usr/bin/env bash
# mypy on the overlay, where it meets upstream (build/tree), and on the tools.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv}
[[ $venv = /* ]] || venv=$PWD/$venv
PYTHON=$venv/bin/python scripts/fork tree >/dev/null
mapfile -d '' overlay < <(find python -name '*.py' -not -path '*/__pycache__/*' -print0)
scripts/in_venv mypy build_backend scripts "${overlay[@]/#/build/tree/}"
