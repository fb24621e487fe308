#!/usr/bin/env bash
# Installs a pinned CUDA compiler under the target directory and prints the path of its nvcc.
#
# Wheels only: seconds, no root, no driver, nothing on PATH. An nvcc on PATH would be picked up by every build script of
# the tree; use this one as `NVCC=$(scripts/cuda-toolchain.sh) cargo build --features cuda`. `--nccl` adds the
# communication library. The pins are the oldest 13.x, which the widest range of drivers runs; the two disassemblers
# have no wheels that old, and read everything older than themselves.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(
    nvidia-cuda-nvcc==13.0.88
    nvidia-cuda-crt==13.0.88
    nvidia-nvvm==13.0.88
    nvidia-cuda-runtime==13.0.96
    nvidia-cuda-cccl==13.0.85
    nvidia-cuda-cuobjdump==13.2.86
    nvidia-cuda-nvdisasm==13.2.86
)
[ "${1:-}" = --nccl ] && packages+=(nvidia-nccl-cu13==2.32.3)

home=${CARGO_TARGET_DIR:-target}/cuda-toolchain
stamp=$home/packages
wanted=$(printf '%s\n' "${packages[@]}")
# Installed already, perhaps with more than is asked for now.
if [ ! -f "$stamp" ] || grep -qvxFf "$stamp" <<<"$wanted"; then
    if command -v uv >/dev/null; then
        install=(uv pip install --quiet)
    else
        install=(python3 -m pip install --quiet --disable-pip-version-check)
    fi
    rm -rf "$home"
    "${install[@]}" --no-deps --target "$home" "${packages[@]}" >&2
    printf '%s\n' "$wanted" >"$stamp"
fi
nvcc=$(cd "$home/nvidia/cu13/bin" && pwd)/nvcc
"$nvcc" --version >/dev/null
echo "$nvcc"
