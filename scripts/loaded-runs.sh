#!/usr/bin/env bash
# Runs all tests but the doc tests N times (20 unless told) beside busy loops: scripts/loaded-runs.sh [N [LOOPS [FILTER...]]]
#
# A test that depends on time passes on a quiet machine and fails here. There are as many loops as cores unless told.
# It goes on after a failure, prints the output of each failed run, and exits 1 if there was one.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
runs=${1:-20} loops=${2:-$(nproc)}
shift $(($# < 2 ? $# : 2))

cargo test --tests --no-run || exit
log=$(mktemp) hogs=() failed=0
trap 'kill "${hogs[@]}" 2>/dev/null; rm -f "$log"' EXIT
for ((loop = 0; loop < loops; loop++)); do
    while :; do :; done &
    hogs+=($!)
done
for ((run = 1; run <= runs; run++)); do
    if cargo test -q --tests --no-fail-fast -- "$@" >"$log" 2>&1; then
        echo "run $run of $runs: passed ($SECONDS s)"
    else
        failed=$((failed + 1))
        cat "$log"
        echo "run $run of $runs: FAILED ($SECONDS s)"
    fi
done
echo "$failed of $runs runs failed beside $loops busy loops"
exit $((failed > 0))
