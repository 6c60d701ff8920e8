#!/usr/bin/env bash
# scripts/test.sh MARKER [pytest arguments]: the tests in a few processes, one after the other.
#
# A process can be connected to one Ray cluster only, and groups of tests need clusters of different shapes. With a path
# among the arguments it is one plain pytest.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${VENV:-.venv}/bin/python
marker=$1
shift

groups=(
    "test/packaging test/examples test/parallelism"
    "test/client test/ray_backend test/weight_sync test/ui test/docs --ignore=test/weight_sync/test_two_ranks.py"
    "test/weight_sync/test_two_ranks.py"
    "test/topology"
    "test/serve"
    "test/gpu"
)
for argument in "$@"; do
    [[ -e ${argument%%::*} ]] && groups=("")
done

failed=()
for group in "${groups[@]}"; do
    # shellcheck disable=SC2086  # a group is several arguments
    "$python" -m pytest $group -m "$marker" --durations=25 --durations-min=4 "$@"
    status=$?
    # 5: no test of this group has the marker
    ((status == 0 || status == 5)) || failed+=("$group")
done
((${#failed[@]} == 0)) && exit 0
echo "failed: ${failed[*]}" >&2
exit 1
