#!/usr/bin/env bash
# Builds the software GPU, a driver without a GPU, and prints the folder with its libcuda.so and libnccl.so.2.
#
# `--host-run` adds kernels.so there: the library's kernels compiled for the CPU, for INSTEP_GPU_KERNELS. `--seeds
# FIRST COUNT [TEST]...` runs the tests of a GPU on it instead, once for each order of work. `--tests [TREE TARGET]` builds
# those tests, or those of a copy of the tree, and prints the binary and the kernels in it too, for mutate-calls.py.
# `--capi` runs the C library's program for a GPU. `--ddp` runs examples/cuda_ddp, with both NCCLs, and capi/gpu/ddp.c
# with one to three ranks. `--torch PYTHON [OPTION]...` runs the bench beside PyTorch, once and small, with a PyTorch for
# the CPU. `--bundle FOLDER STAGE...` runs stages of a bundle of gpu-bundle.sh, its benches once and small, and without
# FOLDER's files packs what stages need but PyTorch's and NVIDIA's tools.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
folder=$target/software-gpu
mkdir -p "$folder"
cargo build -q -p software-gpu -p software-gpu-nccl >&2

# A copy that is in use must keep its bytes, so a new file takes its name.
place() {
    cmp -s "$1" "$folder/$2" || { cp "$1" "$folder/$2.new" && mv "$folder/$2.new" "$folder/$2"; }
}
place "$target/debug/libsoftware_gpu.so" libcuda.so
ln -sf libcuda.so "$folder/libcuda.so.1" # the name that other programs open
place "$target/debug/libsoftware_nccl.so" libnccl.so.2
# The name that cudarc looks for.
ln -sfn libnccl.so.2 "$folder/libnccl.so"

# The tests that the bundle runs on a GPU, but the kernels' own, which take minutes, and those that no CPU can serve:
# 2^32 conversions, and 33 GiB. Of them, cuda::gpu::calls:: and cuda::gpu::events:: run here alone: one counts the lines of
# this GPU's trace, the other plays races, which this GPU names.
usual=(cuda:: bucket_step::gpu bucket_step::one_launch kernels::shared_launches --skip cuda::gpu::large --skip cuda::gpu::conversions --skip rank_of_several)

# [TREE TARGET]: builds a tree's tests of a GPU and lets them find this one. A copy's run once, so they are not optimised.
prepare() {
    local made
    NVCC=${NVCC:-$(scripts/cuda-toolchain.sh)}
    export NVCC
    made=$(cargo rustc -q --manifest-path "${1:-.}/Cargo.toml" --target-dir "${2:-$target}" ${1:+--config profile.dev.opt-level=0} \
        -p instep --features cuda --test main --message-format=json-render-diagnostics -- --cfg gpu_only | python3 -c '
import json, sys
made = [json.loads(line) for line in sys.stdin]
print(*(m["executable"] for m in made if m.get("executable")))
print(*(path for m in made for name, path in m.get("env", []) if name == "INSTEP_KERNELS_FATBIN"))')
    { read -r tests; read -r fatbin; } <<<"$made"
    export INSTEP_CUDA=$folder/libcuda.so INSTEP_NCCL=$folder/libnccl.so.2 INSTEP_REQUIRE_GPU=1 INSTEP_REQUIRE_NCCL=1
}

# Builds all programs over one library: built one by one, each would choose other features of its dependencies.
programs() {
    NVCC=${NVCC:-$(scripts/cuda-toolchain.sh)}
    export NVCC
    cargo build -q -p instep-cli -p instep-capi -p instep-peers -p cuda_ddp --features instep-cli/cuda,instep-capi/cuda,instep-peers/cuda
}

case ${1:-} in
--host-run)
    scripts/host-run-lane.py --watched "$folder/kernels.so"
    echo "$folder"
    ;;
--seeds)
    first=$2 count=$3
    shift 3
    [ $# -gt 0 ] || set -- "${usual[@]}"
    prepare
    for seed in $(seq "$first" $((first + count - 1))); do
        echo "software gpu: seed $seed"
        # One thread, so that a seed means one order.
        INSTEP_GPU_SEED=$seed "$tests" -q --test-threads 1 --include-ignored "$@" | tee "$folder/output"
        ! grep -q "ok. 0 passed" "$folder/output" || { echo "software gpu: no test is called $*" >&2; exit 1; }
    done
    ;;
--tests)
    prepare "${@:2}"
    printf '%s\n' "$folder" "$tests" "$fatbin"
    ;;
--capi)
    programs
    capi/install.sh "$folder/capi" "$target/debug"
    ${CC:-cc} -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -g -O1 -I"$folder/capi/include" capi/gpu/device.c -o "$folder/device" \
        -L"$folder/capi/lib" -linstep -ldl -lm -pthread
    INSTEP_CUDA=$folder/libcuda.so LD_LIBRARY_PATH=$folder/capi/lib "$folder/device"
    ;;
--ddp)
    programs
    capi/install.sh "$folder/capi" "$target/debug"
    headers=$(dirname "$(dirname "$(scripts/cuda-toolchain.sh --nccl)")")/include
    ${CC:-cc} -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -g -O1 -I"$folder/capi/include" -isystem "$headers" \
        -isystem "$target/cuda-toolchain/nvidia/nccl/include" capi/gpu/ddp.c -o "$folder/ddp" \
        -L"$folder/capi/lib" -L"$folder" -linstep -lcuda -lnccl -lm
    export LD_LIBRARY_PATH=$folder:$folder/capi/lib
    for ranks in 1 2 3; do
        export INSTEP_GPU_DEVICES=$ranks INSTEP_GPU_SEED=$ranks
        WORLD_SIZE=$ranks "$target/debug/cuda_ddp"
        WORLD_SIZE=$ranks "$target/debug/cuda_ddp" --instep-nccl
        "$folder/ddp" $ranks
    done
    ;;
--torch)
    python=$(realpath -s "$2")
    shift 2
    programs
    mkdir -p "$folder/peers/release"
    ln -sf "$target/debug/libinstep_peers.so" "$folder/peers/release/"
    OMP_NUM_THREADS=1 INSTEP_CUDA=$folder/libcuda.so CARGO_TARGET_DIR=$folder/peers \
        "$python" benches/peers/torch_without_gpu.py --quick --rounds 1 --csv "$folder/peers/torch.csv" "$@"
    ;;
--bundle)
    bundle=$(realpath -m "$2")
    shift 2
    prepare
    if [ ! -e "$bundle/run.sh" ]; then
        mkdir -p "$bundle"
        programs
        cp "$tests" "$bundle/tests"
        scripts/bench-kernels.sh "$bundle/bench-kernels.fatbin"
        cp "$target/debug/instep" "$target/debug/cuda_ddp" benches/gpu/run.sh benches/gpu/results.sh benches/peers/*.py "$bundle/"
        echo "of the software GPU" >"$bundle/commit"
    fi
    LD_LIBRARY_PATH=$folder env -u INSTEP_REQUIRE_GPU QUICK=1 OUT="${OUT:-$folder/out}" bash "$bundle/run.sh" "$@"
    ;;
*) echo "$folder" ;;
esac
