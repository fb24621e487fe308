#!/usr/bin/env bash
# Compiles the kernels of the GPU benches, a copy and what stands for backward and all-reduce: scripts/bench-kernels.sh OUT.fatbin
#
# With NVCC, or the compiler that cuda-toolchain.sh installs. Name the result to the bench: --kernels OUT.fatbin. The compiler
# chooses how many registers the all-reduce has. If a block of a step would fit beside one of its blocks, no file is made.
set -euo pipefail
out=$(realpath -m "${1:?usage: scripts/bench-kernels.sh OUT.fatbin}")
cd "$(dirname "$0")/.."
nvcc=${NVCC:-$(scripts/cuda-toolchain.sh)}
read -ra codes <kernels/architectures.txt
mkdir -p "$(dirname "$out")"
trap 'rm -f "$out.new"' EXIT
"$nvcc" -fatbin -O3 -std=c++17 "${codes[@]/#/-gencode=arch=compute_${codes[0]},code=sm_}" \
    -gencode="arch=compute_${codes[0]},code=compute_${codes[0]}" benches/gpu/bench.cu -o "$out.new"

# A block of a step has 256 threads, and at most 64 registers for each (kernels/gpu/step.cu). Threads get registers by eights.
threads=$(sed -n 's/^const REDUCE_THREADS: u32 = \([0-9]*\);$/\1/p' src/bench/load.rs)
"$(dirname "$(command -v "$nvcc")")/cuobjdump" -res-usage "$out.new" |
    awk -v threads="$threads" -v architectures=${#codes[@]} -v multiprocessor=65536 -v step=$((256 * 64)) '
    $1 == "arch" { architecture = $3 }
    $1 == "Function" { name = $2 }
    name == "bench_reduce:" && match($0, /REG:[0-9]+/) {
        registers = substr($0, RSTART + 4, RLENGTH - 4)
        left = multiprocessor - threads * 8 * int((registers + 7) / 8)
        checked += 1
        if (left < step) next
        printf "bench kernels: bench_reduce on %s: %d threads of %d registers leave %d of %d; a block of a step needs %d, " \
            "and must not fit, as beside NCCL\n", architecture, threads, registers, left, multiprocessor, step
        failed = 1
    }
    END {
        if (checked != architectures) printf "bench kernels: bench_reduce is in %d of %d architectures\n", checked, architectures
        exit failed || checked != architectures
    }' >&2
mv "$out.new" "$out"
