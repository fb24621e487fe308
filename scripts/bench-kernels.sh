#!/usr/bin/env bash
# Compiles the kernels of the GPU benches, a copy and what stands for backward and all-reduce: scripts/bench-kernels.sh OUT.fatbin
#
# With NVCC, or the compiler that cuda-toolchain.sh installs. Name the result to the bench: --kernels OUT.fatbin.
set -euo pipefail
out=$(realpath -m "${1:?usage: scripts/bench-kernels.sh OUT.fatbin}")
cd "$(dirname "$0")/.."
nvcc=${NVCC:-$(scripts/cuda-toolchain.sh)}
read -ra codes <kernels/architectures.txt
mkdir -p "$(dirname "$out")"
"$nvcc" -fatbin -O3 -std=c++17 "${codes[@]/#/-gencode=arch=compute_${codes[0]},code=sm_}" \
    -gencode="arch=compute_${codes[0]},code=compute_${codes[0]}" benches/gpu/bench.cu -o "$out"
