#!/usr/bin/env bash
# Make the virtual environment named by $VENV ready: see scripts/provision.py.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-.venv}
# An environment that is there already brings its own Python, so none is needed on the path.
if [[ -z ${PYTHON:-} && -x $venv/bin/python ]] && "$venv/bin/python" -c '' 2>/dev/null; then
    python=$venv/bin/python
else
    python=$("$root/scripts/find-python")
fi
exec "$python" "$root/scripts/provision.py" "$venv"
