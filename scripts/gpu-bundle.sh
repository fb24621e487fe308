#!/usr/bin/env bash
# Packs the GPU's benches and tests for a machine that has a driver, CUDA's tools and PyTorch, and neither Rust nor a C++
# compiler: `scripts/gpu-bundle.sh first|all [FOLDER]`, then there `bash FOLDER/run.sh`.
#
# `first` has what the figures of part1 need: `instep`, the peers' library, the bench's kernels, scripts. `all` also has the
# tests and their kernels, examples/cuda_ddp, the Python package and NCCL. GPU code is for one architecture. Every file is packed
# by xz, and run.sh unpacks it. A bundle above its limit is refused, since it has to be sent.
set -euo pipefail
cd "$(dirname "$0")/.."

declare -A limit_bytes=([first]=15000000 [all]=60000000)
NEWEST_GLIBC=2.35 # of Ubuntu 22.04; a program built on a newer system does not start on an older one
which=${1:-}
if [ -z "${limit_bytes[$which]:-}" ]; then
    echo "usage: scripts/gpu-bundle.sh first|all [FOLDER]" >&2
    exit 2
fi
architecture=${INSTEP_GPU_ARCHITECTURE:-90}
bundle=${2:-target/gpu-bundle/$which}
rm -rf "$bundle"
mkdir -p "$bundle/release"
bundle=$(cd "$bundle" && pwd)

NVCC=$(scripts/cuda-toolchain.sh --nccl)
export NVCC INSTEP_CUDA_ARCHS=$architecture # five programs carry the kernels
built=${CARGO_TARGET_DIR:-target}/release
cargo build -q --release -p instep-cli -p instep-peers --features instep-cli/cuda,instep-peers/cuda
strip -o "$bundle/instep" "$built/instep"
strip -o "$bundle/release/libinstep_peers.so" "$built/libinstep_peers.so"
"$bundle/instep" info | grep "GPU kernels"
scripts/bench-kernels.sh "$bundle/bench-kernels.fatbin"
cp benches/gpu/run.sh benches/gpu/results.sh benches/peers/*.py "$bundle/"
git describe --always --dirty --abbrev=12 >"$bundle/commit"

if [ "$which" = all ]; then
    cargo build -q --release -p instep-python -p cuda_ddp --features instep-python/cuda
    strip -o "$bundle/cuda_ddp" "$built/cuda_ddp"
    tests=$(cargo test -q --release -p instep --features cuda --test main --no-run --message-format=json | python3 -c '
import json, sys
made = [json.loads(line) for line in sys.stdin]
print(*(m["executable"] for m in made if m.get("executable") and m["target"]["kind"] == ["test"]))')
    strip -o "$bundle/tests" "$tests"
    "$bundle/run.sh" count
    scripts/pack-python.sh "$built/libinstep_python.so" "$bundle/python"
    for source in tests/cuda/gpu/compare.cu:conversions kernels/gpu/naive.cu:naive; do
        "$NVCC" -fatbin -optf kernels/nvcc.flags -I kernels -gencode="arch=compute_$architecture,code=sm_$architecture" \
            "${source%:*}" -o "$bundle/${source#*:}.fatbin"
    done
    scripts/one-architecture.py "$(dirname "$NVCC")/../../nccl/lib/libnccl.so.2" "$architecture" "$bundle/libnccl.so.2"
    strip "$bundle/libnccl.so.2"
fi

programs=$(find "$bundle" -name instep -type f -o -name tests -type f -o -name cuda_ddp -type f -o -name '*.so')
glibc=$(echo "$programs" | xargs objdump -T | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)
if [ "$(printf '%s\n' "${glibc#GLIBC_}" $NEWEST_GLIBC | sort -V | tail -1)" != $NEWEST_GLIBC ]; then
    echo "gpu bundle: needs $glibc, newer than $NEWEST_GLIBC: build it on an older system" >&2
    exit 1
fi
find "$bundle" -type f -size +64k -print0 | xargs -0 xz -6 -T 0
bytes=$(du -sb "$bundle" | cut -f1)
find "$bundle" -type f -printf '%10s %P\n'
echo "gpu bundle: $bundle, $((bytes / 1000)) KB, needs $glibc, for sm_$architecture"
if [ "$bytes" -gt "${limit_bytes[$which]}" ]; then
    echo "gpu bundle: more than $((limit_bytes[$which] / 1000)) KB" >&2
    exit 1
fi
