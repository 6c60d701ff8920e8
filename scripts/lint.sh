#!/usr/bin/env bash
# ruff and codespell on everything that is ours, mypy on the overlay and the tools.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/in_venv ruff check .
git ls-files -z -- . ':!patches' ':!LICENSE' | xargs -0 scripts/in_venv codespell_lib
scripts/mypy.sh
