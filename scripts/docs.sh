#!/usr/bin/env bash
# scripts/docs.sh [build|serve]: the documentation site, strictly, into site/ (or live at 127.0.0.1:8000).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The API reference is read out of our own files alone, as text. They are new files inside upstream's packages, so the
# copy that is read gets the empty packages around them.
rm -rf build/api
mkdir -p build/api
cp -r python/sglang build/api/sglang
find build/api -name __pycache__ -prune -exec rm -rf {} +
find build/api -type d -exec touch {}/__init__.py ';'

export NO_MKDOCS_2_WARNING=1  # mkdocs-material's notice about another project
case ${1:-build} in
build) scripts/in_venv mkdocs build --strict --quiet && echo "site/index.html" ;;
serve) scripts/in_venv mkdocs serve --strict ;;
*) echo "error: scripts/docs.sh build or serve, got '$1'" >&2; exit 2 ;;
esac
