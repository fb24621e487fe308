#!/usr/bin/env bash
# Runs what scripts/gpu-bundle.sh has packed, on this machine's first GPU: run.sh [STAGE|PART]...
#
# Without names it runs part1 to part5; the first bundle has what part1 needs. Each stage has a limit, and the limits of a part
# fit its budget. A stage that fails, is late, lacks something or runs no test has failed, and stops no other; the exit status
# is the worst stage's. `run.sh list` prints the stages; `run.sh count` counts the tests of each, without a GPU.
# results.sh says what lies in $OUT (else ./out) at every moment. A second call with the same OUT goes on where the first
# ended. A stage that did not run is never reported as passed.
#
# `bash run.sh` works if modes of files were lost on the way, and without nvidia-smi. PYTHON names another python3.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
export PYTHON=${PYTHON:-python3}
# Where containers have the driver and CUDA's tools.
export PATH=$PATH:/usr/local/nvidia/bin:/usr/local/cuda/bin
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64
export ABSENT=3 # exit status of a stage that lacks what it is to run

# Seconds of each part, and each stage with its part and its limit in seconds, in the order in which they run.
declare -A budgets=([part1]=240 [part2]=540 [part3]=540 [part4]=480 [part5]=480)
all_parts="part1 part2 part3 part4 part5"
stages="
part1 info 10
part1 bucket 15
part1 adamw 25
part1 torch 40
part1 overlap 30
part1 handover 15
part1 zeros 20
part1 shares 60
part2 bits 35
part2 kernels 90
part2 steppers 60
part2 conversions 40
part2 precisions 80
part2 launches 40
part2 large 60
part2 memcheck 120
part3 sizes 40
part3 step 120
part3 blocks 50
part3 ncu 50
part3 torch_all 80
part3 ddp 45
part3 nccl 95
part3 initcheck 45
part4 python_buckets 90
part4 python_training 120
part4 python_cases 260
part5 nccl_groups 200
part5 python_offload 120
part5 racecheck 140
"

# --- What each stage runs: run_STAGE, in a shell of its own, with its files in $RESULTS. ---

run_info() {
    local facts
    nvidia-smi || echo "nvidia-smi is absent or failed: no clocks are recorded"
    facts=$(./instep info) || return
    echo "$facts"
    grep -q "^GPU kernels" <<<"$facts"
}
run_bucket() { step --optimizer adamw -b 25M -e 25M; }
run_adamw() { step --optimizer adamw -b 1G -e 1G; }
run_torch() { torch --optimizer adamw --shape bucket --shape 256Mi; }
run_overlap() {
    bench --only overlap --json "$RESULTS/overlap.json" --picture "$RESULTS/pass.svg" --trace "$RESULTS/trace.json"
}
run_handover() { bench --only handover --json "$RESULTS/handover.json"; }

# Where the dividend and both states of AdamW are 0, a division takes its slow path.
run_zeros() { step --optimizer adamw --precision f32,bf16 --zeros -b 1G -e 1G; }
run_shares() { step --optimizer adamw -b 1G -e 1G --max-blocks all,16x,4294967295; }

run_bits() { tests cuda::bitexact::every_optimizer; }
run_kernels() { tests host_run::; }
run_steppers() {
    tests cuda::bitexact:: cuda::training::digits cuda::failures::a_machine cuda::failures::borrowed cuda::gpu::captures:: \
        cuda::gpu::cudarc:: kernels::shared_launches::
}
run_conversions() { tests cuda::gpu::conversions::; }
run_precisions() {
    step --optimizer adamw --precision bf16,bf16-stochastic,master,remainder16,f32-moments8bit,remainder16-moments8bit \
        -b 32M -f 16
}
run_launches() {
    bench --only norm,control,graph --precision f32,bf16 -b 4M -f 16 --json "$RESULTS/launches.json"
}
run_large() { tests cuda::gpu::large::; }
short=(cuda::bitexact::a_global_norm cuda::bitexact::what_is_left_out cuda::bitexact::micro_batches)
run_memcheck() {
    sanitized memcheck host_run::many_segments host_run::every_optimizer host_run::precisions::what_is \
        cuda::bitexact::every "${short[@]}"
}

run_sizes() { step --optimizer adamw; }
run_step() { step -b 4M -f 16; }
run_blocks() { step --optimizer adamw,sgd -b 4M -e 256M -f 8 --max-blocks all,8x,4x,2x,1x; }
# Two launches of each after the two that are compared: reports for Nsight Compute, and their text.
run_ncu() {
    local program what kernel
    program=$(tool ncu) || return
    for what in step norm; do
        kernel=regex:instep_norm
        [ $what = norm ] || kernel=regex:instep_step_adam
        "$program" --clock-control none --set full --kernel-name "$kernel" --launch-skip 2 --launch-count 2 --force-overwrite \
            --export "$RESULTS/$what" ./instep bench --device cuda:0 --quick --rounds 1 --only $what --optimizer adamw \
            -b 64M -e 64M || return
        "$program" --import "$RESULTS/$what.ncu-rep" --page details >"$RESULTS/$what.txt" || return
    done
}
run_torch_all() { torch; }
# Two ranks on one GPU, which only the bundle's NCCL permits. cudarc opens NCCL by this name.
run_ddp() {
    local folder
    folder=$(dirname "$INSTEP_NCCL")
    [ -e cuda_ddp ] || tool cuda_ddp || return
    if [ ! -e "$folder/libnccl.so" ]; then # nothing is written beside a library that is not the bundle's
        folder=$PWD/nccl
        mkdir -p "$folder"
        ln -sfn "$(realpath -m "$INSTEP_NCCL")" "$folder/libnccl.so" || return
    fi
    export LD_LIBRARY_PATH=$folder:$LD_LIBRARY_PATH NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=2 DEVICE=0 WORLD_SIZE=2
    ./cuda_ddp && ./cuda_ddp --instep-nccl
}
run_nccl() {
    export NCCL_DEBUG=WARN NCCL_DEBUG_FILE=${RESULTS:-.}/nccl.%p
    tests cuda::gpu::nccl:: cuda::gpu::shards:: --skip rank_of_several --skip three_ranks --skip four_ranks --skip of_another_group
}
run_nccl_groups() { tests shards::three_ranks shards::four_ranks shards::a_rank_that_dies_ends_the_calls_of_another_group; }
run_racecheck() { sanitized racecheck host_run::many_segments host_run::precisions::what_is "${short[@]}"; }
run_initcheck() { sanitized initcheck "${short[@]}"; }

# PyTorch with the Python package: figures first, as in each part.
run_python_buckets() { python_package benches/buckets.py --device cuda --rounds 101; }
run_python_training() {
    python_package benches/training.py --device cuda --rounds 51 --width 1024 --layers 12
}
run_python_offload() { python_package benches/offload.py --device cuda --rounds 21 --elements 16777216 --threads 8; }
run_python_cases() { python_package tests/on_device.py --device cuda; }

# --- What stages have in common. ---

# FILTER...: tests by parts of their names; UNDER is a program to run them under.
tests() {
    local count
    count=$(./tests --include-ignored --list "$@" | grep -c ': test$')
    if [ "$count" -eq 0 ]; then
        echo "NO TEST is called $*"
        return "$ABSENT"
    fi
    if [ -n "${COUNT_ONLY:-}" ]; then
        echo "$count tests: $*"
        return
    fi
    # One after the other: the last line of a run that hangs or breaks the device names the test. A failure prints at once,
    # because a stage may be cut off before the end.
    ${UNDER:-} ./tests --include-ignored --test-threads 1 --nocapture "$@"
}

# PROGRAM: where it is, or a failure that says that it is absent.
tool() {
    command -v "$1" || {
        echo "$1 is ABSENT" >&2
        return "$ABSENT"
    }
}

# TOOL FILTER...
sanitized() {
    local tool=$1 program=
    shift
    [ -n "${COUNT_ONLY:-}" ] || program=$(tool compute-sanitizer) || return
    # What the driver's calls answer is the tests' business.
    UNDER="$program --tool $tool --error-exitcode 86 --report-api-errors no --print-limit 20" tests "$@"
}

# COMMAND...: with the GPU's clocks, power and temperature beside it, five times a second.
clocked() {
    local logger status
    nvidia-smi --id=0 --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv -lms 200 \
        >"$RESULTS/clocks.csv" 2>&1 &
    logger=$!
    "$@"
    status=$?
    kill $logger 2>/dev/null
    return $status
}

# QUICK=1 checks that benches run, by one round of the smallest size, where no figure means anything.
bench() {
    local options=()
    while [ $# -gt 0 ]; do
        case ${QUICK:-}$1 in
        1-b | 1-e | 1-f) shift 2 ;;
        *) options+=("$1") && shift ;;
        esac
    done
    [ -z "${QUICK:-}" ] || options+=(--quick --rounds 1 -b 64K -e 64K)
    clocked ./instep bench --device cuda:0 --kernels bench-kernels.fatbin "${options[@]}"
}
step() { bench --only step --json "$RESULTS/step.json" --svg "$RESULTS/share.svg" "$@"; }

torch() {
    if [ ! -e torch_gpu.py ]; then
        echo "torch_gpu.py is ABSENT from this bundle"
        return "$ABSENT"
    fi
    clocked "$PYTHON" torch_gpu.py --csv "$RESULTS/torch.csv" "$@"
}

# SCRIPT OPTIONS...: a program of the Python package as one rank, with the native half that was built elsewhere.
python_package() {
    local native=python/instep/_native.abi3.so script=python/$1
    shift
    if [ ! -e $native ] || [ ! -e "$script" ]; then
        echo "$script or $native is ABSENT from this bundle"
        return "$ABSENT"
    fi
    MASTER_ADDR=127.0.0.1 MASTER_PORT=29533 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 PYTHONPATH=$PWD/python \
        clocked "$PYTHON" "$script" "$@"
}

# FILE: unpacks FILE.xz beside it, in one step, since a run may be killed. Some machines have no xz.
unpack() {
    xz -dc "$1.xz" >"$1.part" 2>/dev/null ||
        "$PYTHON" -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1] + ".xz"), open(sys.argv[1] + ".part", "wb"))' "$1"
    chmod +x "$1.part" && mv -f "$1.part" "$1" && rm -f "$1.xz"
}

# --- The stages by name, one after the other. ---

[ "${BASH_SOURCE[0]}" = "$0" ] || return 0

list() { echo "$stages" | sed '/^$/d'; }
if [ "$*" = list ]; then
    list
    exit 0
fi
if [ "$*" = count ]; then
    # Without a test a stage could only fail, and would say so after its GPU was paid for.
    export COUNT_ONLY=1
    for name in $(list | awk '{ print $2 }'); do
        declare -f "run_$name" | grep -qE '^ *(tests|sanitized) ' || continue
        printf '%s: ' "$name"
        "run_$name" || exit
    done
    exit 0
fi
wanted=()
for name in "${@:-$all_parts}"; do
    for name in $name; do
        found=$(list | awk -v name="$name" '$1 == name || $2 == name { print $2 }')
        if [ -z "$found" ]; then
            echo "run.sh: $name: no such stage or part; use: ${!budgets[*]} $(list | awk '{ print $2 }' | xargs)" >&2
            exit 2
        fi
        wanted+=($found)
    done
done

for packed in *.xz release/*.xz python/instep/*.xz; do
    [ ! -e "$packed" ] || [ "$packed" = libnccl.so.2.xz ] || unpack "${packed%.xz}"
done
chmod +x instep tests cuda_ddp 2>/dev/null # modes may be lost on the way

OUT=$(realpath -m "${OUT:-$PWD/out}")
export OUT INSTEP_REQUIRE_GPU=1 INSTEP_REQUIRE_NCCL=1 PYTHONUNBUFFERED=1 CARGO_TARGET_DIR=$PWD
export INSTEP_GPU_CONVERSIONS=$PWD/conversions.fatbin INSTEP_GPU_NAIVE=$PWD/naive.fatbin
mkdir -p "$OUT"
commit=$(cat commit)
started=$(date -u +%FT%TZ)
source ./results.sh
resume

# The library that is named, or else the bundle's, which permits several ranks per GPU, or else PyTorch's.
nccl_from=environment
if [ -z "${INSTEP_NCCL:-}" ]; then
    if [ -e libnccl.so.2 ] || [ -e libnccl.so.2.xz ]; then
        nccl_from=bundle
        [ -e libnccl.so.2 ] || unpack libnccl.so.2
        INSTEP_NCCL=$PWD/libnccl.so.2
    else
        nccl_from=python
        INSTEP_NCCL=$("$PYTHON" -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/lib/libnccl.so.2")' 2>/dev/null)
    fi
    export INSTEP_NCCL
fi
facts_before=$(gpu_facts)
write_record

# PART NAME LIMIT_S: under its limit, and within what its part has left if the whole part was asked for.
run_stage() {
    local part=$1 name=$2 limit=$3 status since=$SECONDS start
    start=$(date -u +%FT%TZ)
    export RESULTS=$OUT/now/$name
    mkdir -p "$RESULTS"
    say "" "== $name (at $SECONDS s, at most $limit s)"
    # A shell of its own, which reads the functions above from this file.
    timeout --kill-after=5 "$limit" bash -c 'source ./run.sh; "run_$1"' _ "$name" 2>&1 |
        tee -a "$OUT/run.log"
    status=${PIPESTATUS[0]}
    [ "$status" -eq 0 ] || say "== $name FAILED with status $status"
    finish "$name" "$status" $((SECONDS - since)) "$limit" "$start"
}

late=()
declare -A part_started
for name in "${wanted[@]}"; do
    ! has_run "$name" || continue
    read -r part _ limit < <(list | awk -v name="$name" '$2 == name')
    if [[ " ${*:-$all_parts} " == *" $part "* ]]; then
        part_started[$part]=${part_started[$part]:-$SECONDS}
        left=$((part_started[$part] + budgets[$part] - SECONDS))
        if [ "$left" -lt 5 ]; then
            late+=("$name")
            continue
        fi
        [ "$limit" -le "$left" ] || limit=$left
    fi
    run_stage "$part" "$name" "$limit"
done

say "" "$(cat "$OUT/table.txt")"
if [ "${#late[@]}" -gt 0 ]; then
    say "NOT RUN, because the part's time was up: ${late[*]}; call run.sh again with the same OUT"
    [ "$worst" -ge 124 ] || worst=124
fi
rmdir "$OUT/now" 2>/dev/null
say "record: $OUT/record.json; worst status: $worst; $SECONDS s"
exit "$worst"
