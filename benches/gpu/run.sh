#!/usr/bin/env bash
# Runs what scripts/gpu-bundle.sh has packed, on this machine's first GPU: tests, sanitizers, NCCL, benches.
#
# One stage after the other, each under a limit and all within BUDGET_S. A stage that fails, is late, lacks something or
# runs no test has failed, and stops no other; the exit status is the worst stage's. Leaves run.log (everything, as it
# comes), record.json and table.txt (written anew after each stage) in $OUT, else ./out. Must turn nothing that did not
# run into a pass.
set -uo pipefail
cd "$(dirname "$0")" || exit 1
OUT=${OUT:-$PWD/out}
BUDGET_S=480
ABSENT=3 # exit status of a stage that lacks what it is to run
export OUT ABSENT INSTEP_REQUIRE_GPU=1 INSTEP_REQUIRE_NCCL=1 PYTHONUNBUFFERED=1 CARGO_TARGET_DIR=$PWD
export INSTEP_GPU_CONVERSIONS=$PWD/conversions.fatbin
mkdir -p "$OUT"
: >"$OUT/run.log"
names=() statuses=() seconds=() limits=() worst=0
started=$(date -u +%FT%TZ)

say() { printf '%s\n' "$@" | tee -a "$OUT/run.log"; }

# What the GPU says of itself, as the members of a JSON object.
gpu_facts() {
    local query=name,driver_version,compute_cap,memory.total,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw
    local value key k=0 keys=(${query//,/ })
    timeout 5 nvidia-smi --id=0 --query-gpu=$query --format=csv,noheader 2>/dev/null | sed 's/["\\]/\\&/g; s/, /\n/g' |
        while read -r value; do
            key=${keys[k]} && k=$((k + 1))
            printf '%s"%s": "%s"' "$([ $k -gt 1 ] && echo ', ')" "$key" "$value"
        done
}

write_record() {
    local k verdict
    {
        printf '{\n  "commit": "%s",\n  "started": "%s",\n  "seconds": %d,\n' "$(cat commit)" "$started" "$SECONDS"
        printf '  "gpu_before": {%s},\n  "gpu_now": {%s},\n' "$facts_before" "$(gpu_facts)"
        printf '  "nccl": "%s",\n  "worst": %d,\n  "stages": [' "$nccl_from" "$worst"
        for k in "${!names[@]}"; do
            printf '%s\n    {"name": "%s", "exit": %d, "seconds": %d, "limit_seconds": %d}' \
                "$([ "$k" -gt 0 ] && echo ,)" "${names[k]}" "${statuses[k]}" "${seconds[k]}" "${limits[k]}"
        done
        printf '\n  ]\n}\n'
    } >"$OUT/record.json"
    {
        printf '%-12s %6s %8s  %s\n' stage exit seconds verdict
        for k in "${!names[@]}"; do
            case ${statuses[k]} in
                0) verdict=passed ;;
                "$ABSENT") verdict="FAILED: absent, or nothing ran" ;;
                124 | 137) verdict="FAILED: did not end within ${limits[k]} s" ;;
                *) verdict=FAILED ;;
            esac
            printf '%-12s %6d %8d  %s\n' "${names[k]}" "${statuses[k]}" "${seconds[k]}" "$verdict"
        done
    } >"$OUT/table.txt"
}

# NAME LIMIT_S COMMAND...
stage() {
    local name=$1 limit=$2 left=$((BUDGET_S - SECONDS - 5)) status=124 since=$SECONDS
    shift 2
    [ "$limit" -le "$left" ] || limit=$((left > 0 ? left : 0))
    say "" "== $name (at $SECONDS s, at most $limit s): $*"
    if [ "$limit" -gt 0 ]; then
        timeout --kill-after=5 "$limit" bash -c '"$@"' _ "$@" 2>&1 | tee -a "$OUT/run.log"
        status=${PIPESTATUS[0]}
    fi
    [ "$status" -eq 0 ] || say "== $name FAILED with status $status"
    [ "$status" -le "$worst" ] || worst=$status
    names+=("$name") statuses+=("$status") seconds+=($((SECONDS - since))) limits+=("$limit")
    write_record
}

# Tests by filters; UNDER is a program to run them under.
run_tests() {
    local count
    count=$(./tests --include-ignored --list "$@" | grep -c ': test$')
    if [ "$count" -eq 0 ]; then
        echo "NO TEST is called $*"
        return "$ABSENT"
    fi
    # One after the other: the last line of a run that hangs or breaks the device names the test.
    $UNDER ./tests --include-ignored --test-threads 1 --show-output "$@"
}

# TOOL FILTERS...
sanitized() {
    local tool=$1 program
    shift
    program=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer) || {
        echo "compute-sanitizer is ABSENT"
        return "$ABSENT"
    }
    # What the driver's calls answer is the tests' business.
    UNDER="$program --tool $tool --error-exitcode 86 --report-api-errors no --print-limit 20" run_tests "$@"
}

info() {
    ./instep info | tee /dev/stderr | grep -q "^GPU kernels" || return 1
}

# FILE COMMAND...: a command that the bundle may lack
with_file() {
    if [ ! -e "$1" ]; then
        echo "$1 is ABSENT from this bundle"
        return "$ABSENT"
    fi
    "${@:2}"
}
export UNDER=
export -f run_tests sanitized info with_file

# The library that is named, or else the bundle's, which permits several ranks per GPU, or else PyTorch's.
nccl_from=environment
if [ -z "${INSTEP_NCCL:-}" ]; then
    if [ -e libnccl.so.2.xz ]; then
        nccl_from=bundle
        xz -dc libnccl.so.2.xz >libnccl.so.2 2>/dev/null ||
            python3 -c 'import lzma, shutil; shutil.copyfileobj(lzma.open("libnccl.so.2.xz"), open("libnccl.so.2", "wb"))'
        INSTEP_NCCL=$PWD/libnccl.so.2
    else
        nccl_from=python
        INSTEP_NCCL=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/lib/libnccl.so.2")' 2>/dev/null)
    fi
    export INSTEP_NCCL
fi
facts_before=$(gpu_facts)

short=(cuda::bitexact::a_global_norm cuda::bitexact::what_is_left_out cuda::bitexact::micro_batches)
stage facts 20 nvidia-smi
stage info 20 info
stage kernels 90 run_tests host_run::
stage steppers 60 run_tests cuda::bitexact:: cuda::training::digits cuda::failures::a_machine cuda::failures::borrowed
stage conversions 40 run_tests cuda::gpu::conversions::
stage large 60 run_tests cuda::gpu::large::
stage memcheck 60 sanitized memcheck host_run::many_segments host_run::every_optimizer host_run::precisions::what_is \
    cuda::bitexact::every "${short[@]}"
stage racecheck 40 sanitized racecheck host_run::many_segments host_run::precisions::what_is "${short[@]}"
stage initcheck 40 sanitized initcheck "${short[@]}"
stage nccl 90 run_tests cuda::gpu::nccl:: --skip rank_of_two
bench=(./instep bench --device cuda:0 --kernels bench-kernels.fatbin)
stage step 90 "${bench[@]}" --only step --json "$OUT/step.json" --svg "$OUT/share.svg"
stage overlap 45 "${bench[@]}" --only overlap --json "$OUT/overlap.json" --picture "$OUT/pass.svg" --trace "$OUT/trace.json"
stage handover 20 "${bench[@]}" --only handover --json "$OUT/handover.json"
stage torch 90 with_file torch_gpu.py python3 torch_gpu.py --csv "$OUT/torch.csv"
stage blocks 45 "${bench[@]}" --only step --optimizer adamw,sgd --max-elements 64Mi --max-blocks all,8x,4x,2x,1x \
    --json "$OUT/blocks.json"
# Few files come back from some machines.
(cd "$OUT" && tar -czf more.tar.gz --remove-files ./trace.json ./handover.json ./blocks.json 2>/dev/null)

say "" "$(cat "$OUT/table.txt")"
say "record: $OUT/record.json; worst status: $worst; $SECONDS s"
exit "$worst"
