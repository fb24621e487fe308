#!/usr/bin/env bash
# Packs the GPU's tests and benches into one folder, for a machine that has a driver, CUDA's tools and
# PyTorch, and neither Rust nor a C++ compiler: `scripts/gpu-bundle.sh [FOLDER]`, then there `FOLDER/run.sh`.
#
# Test binary, `instep`, the peers' library, the Python package, the tests' own kernels, NCCL, run.sh, the commit; GPU code for
# one architecture.
# A bundle above LIMIT_BYTES is refused, since it has to be sent. run.sh records the device and the commit that it ran.
set -euo pipefail
cd "$(dirname "$0")/.."

LIMIT_BYTES=60000000
NEWEST_GLIBC=2.35 # of Ubuntu 22.04; a program built on a newer system does not start on an older one
architecture=${INSTEP_GPU_ARCHITECTURE:-90}
bundle=${1:-target/gpu-bundle}
rm -rf "$bundle"
mkdir -p "$bundle/release"
bundle=$(cd "$bundle" && pwd)

NVCC=$(scripts/cuda-toolchain.sh --nccl)
export NVCC INSTEP_CUDA_ARCHS=$architecture # four programs carry the kernels
cargo build --release -p instep-cli -p instep-peers -p instep-python \
    --features instep-cli/cuda,instep-peers/cuda,instep-python/cuda
tests=$(cargo test --release -p instep --features cuda --test main --no-run --message-format=json | python3 -c '
import json, sys
made = [json.loads(line) for line in sys.stdin]
print(*(m["executable"] for m in made if m.get("executable") and m["target"]["kind"] == ["test"]))')
built=${CARGO_TARGET_DIR:-target}/release
cp "$tests" "$bundle/tests"
cp "$built/instep" "$bundle/instep"
cp "$built/libinstep_peers.so" "$bundle/release/"
strip "$bundle/tests" "$bundle/instep" "$bundle/release/libinstep_peers.so"
"$bundle/instep" info | grep "GPU kernels"
scripts/pack-python.sh "$built/libinstep_python.so" "$bundle/python"

for source in tests/cuda/gpu/compare.cu:conversions kernels/gpu/naive.cu:naive; do
    "$NVCC" -fatbin -optf kernels/nvcc.flags -I kernels -gencode="arch=compute_$architecture,code=sm_$architecture" \
        "${source%:*}" -o "$bundle/${source#*:}.fatbin"
done
nccl=$(dirname "$NVCC")/../../nccl/lib/libnccl.so.2
scripts/one-architecture.py "$nccl" "$architecture" "$bundle/libnccl.so.2"
strip "$bundle/libnccl.so.2"
xz -4 "$bundle/libnccl.so.2"
scripts/bench-kernels.sh "$bundle/bench-kernels.fatbin"
cp benches/gpu/run.sh benches/gpu/results.sh benches/peers/*.py "$bundle/"
git describe --always --dirty --abbrev=12 >"$bundle/commit"

"$bundle/run.sh" count

glibc=$(objdump -T "$bundle/tests" "$bundle/instep" "$bundle"/release/*.so \
    "$built/libinstep_python.so" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)
if [ "$(printf '%s\n' "${glibc#GLIBC_}" $NEWEST_GLIBC | sort -V | tail -1)" != $NEWEST_GLIBC ]; then
    echo "gpu bundle: needs $glibc, newer than $NEWEST_GLIBC: build it on an older system" >&2
    exit 1
fi
bytes=$(du -sb "$bundle" | cut -f1)
ls -l "$bundle" "$bundle/release"
echo "gpu bundle: $bundle, $((bytes / 1000)) KB, needs $glibc, for sm_$architecture"
if [ "$bytes" -gt $LIMIT_BYTES ]; then
    echo "gpu bundle: more than $((LIMIT_BYTES / 1000)) KB" >&2
    exit 1
fi
