#!/usr/bin/env bash
# Builds what could be released, into dist/, and checks each from a clean folder: scripts/release.sh [PART]...
#
# PART is `wheel`, `wheel-aarch64`, `sdist` or `crates`. A wheel is for any CPython from 3.10 on (abi3), on Linux with glibc 2.17
# or later; by maturin, with zig's C++ compiler. It has the GPU kernels too, by NVCC or the compiler that cuda-toolchain.sh
# installs. Both must give the recorded bits: that of x86-64, which must have the kernels of every instruction set, where no
# compiler is on the path and on the software GPU; that of aarch64 under qemu, if a Python for it can be had. `sdist`: sources.
# `crates`: `cargo package` of the library and the command, the latter against the unpacked library.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
work=$target/release-check
dist=$PWD/dist
LEAST_ZMM=5000 # instructions on 512-bit registers; without AVX-512's kernels there are none
MOST_BYTES=8000000 # of a wheel
mkdir -p "$work" "$dist"

tools() {
    [ -x "$work/tools/bin/maturin" ] && return
    python3 -m venv "$work/tools"
    "$work/tools/bin/pip" install -q 'maturin>=1.9,<2' ziglang
}

# PYTHON: the first step, and the wheel's own numbers.
first_step() {
    "$1" - <<'PY'
import instep
assert len(instep.OPTIMIZERS) == 13, instep.OPTIMIZERS
try:
    import torch
except ModuleNotFoundError:
    print("instep", instep.__version__, "without torch")
else:
    import instep.torch
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    instep.torch.AdamW([weight], lr=0.1, weight_decay=0.0).step()
    assert torch.allclose(weight, torch.full((1000,), 0.9))
    print("instep", instep.__version__, "steps with torch", torch.__version__)
PY
}

# ARCHITECTURE: builds its wheel with kernels for all GPUs, and unpacks it.
build_wheel() {
    local fatbin
    tools
    rm -f "$dist"/instep-*"_$1.whl"
    env -u CC -u CXX -u INSTEP_CUDA_ARCHS NVCC="${NVCC:-$(scripts/cuda-toolchain.sh)}" PATH="$work/tools/bin:$PATH" \
        maturin build -q --release --zig --compatibility manylinux2014 --target "$1-unknown-linux-gnu" -m python/Cargo.toml \
        --features cuda --out "$dist"
    wheel=$(echo "$dist"/instep-*"_$1.whl")
    rm -rf "$work/wheel" && mkdir "$work/wheel"
    python3 -m zipfile -e "$wheel" "$work/wheel"
    ls "$work"/wheel/instep-*.dist-info/licenses/* "$work/wheel/instep/py.typed" >/dev/null
    fatbin=$(find "$target/$1-unknown-linux-gnu/release/build" -name kernels.fatbin -size +0 -printf '%T@ %p\n' | sort -n | tail -1)
    python3 - "${fatbin#* }" "$work"/wheel/instep/_native*.so <<'PY'
import pathlib, sys
kernels, library = (pathlib.Path(path).read_bytes() for path in sys.argv[1:])
sys.exit(None if kernels in library else "release: the GPU kernels are not in the wheel")
PY
    [ "$(stat -c %s "$wheel")" -le $MOST_BYTES ] || { echo "release: a wheel of more than $MOST_BYTES bytes" >&2; exit 1; }
}

wheel() {
    local wheel found built wanted
    build_wheel x86_64
    found=$(objdump -d "$work"/wheel/instep/_native*.so | grep -c '%zmm' || true)
    [ "$found" -ge $LEAST_ZMM ] || { echo "release: $found instructions on zmm registers, fewer than $LEAST_ZMM" >&2; exit 1; }
    # An environment of its own, and no program but Python on the path. torch is the caller's, if it has one.
    rm -rf "$work/venv" && python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install -q --no-index "$wheel"
    [ -z "${TORCH_SITE:-}" ] || echo "$TORCH_SITE" >"$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
    (cd "$work/venv" && PATH=$work/venv/bin first_step "$work/venv/bin/python")
    built=$("$work/venv/bin/python" -c 'import instep; print(*instep.GPU_ARCHITECTURES)')
    read -ra wanted <kernels/architectures.txt
    [ "$built" = "${wanted[*]/#/sm_} compute_${wanted[0]}" ] || { echo "release: kernels for $built alone" >&2; exit 1; }
    INSTEP_CUDA=$(scripts/software-gpu.sh)/libcuda.so "$work/venv/bin/python" python/tests/native_bits.py --gpu
    echo "wheel: $(basename "$wheel"), $(stat -c %s "$wheel") bytes, $found instructions on zmm registers, kernels for $built"
}

# Debian's Python for aarch64, unpacked and not installed: its folder. Fails where apt has none.
aarch64_python() {
    local home=$work/aarch64 version package
    [ -x "$home/python" ] && return
    command -v apt-get qemu-aarch64-static >/dev/null || return
    rm -rf "$home" && mkdir -p "$home"/{lists/partial,cache/archives/partial}
    cat >"$home/apt.conf" <<END
APT { Architecture "arm64"; Architectures { "arm64"; }; Sandbox::User "root"; };
Dir { State "$home"; State::status "$home/status"; Cache "$home/cache"; };
END
    touch "$home/status"
    local -x APT_CONFIG=$home/apt.conf
    apt-get update -qq 2>/dev/null || true # sources without this architecture fail
    version=$(apt-cache show python3-minimal | sed -n 's/^[A-Z].*Depends:.*\(python3\.[0-9]*\)-minimal.*/\1/p' | head -1)
    [ -n "$version" ] || return
    (cd "$home/cache" && apt-get download -qq "$version-minimal" "lib$version-minimal" "lib$version-stdlib" \
        libc6 libgcc-s1 libexpat1 zlib1g libffi8 libssl3) || return
    for package in "$home"/cache/*.deb; do
        dpkg -x "$package" "$home/root"
    done
    printf '#!/bin/sh\nexec qemu-aarch64-static -L "%s" "%s" "$@"\n' "$home/root" "$home/root/usr/bin/$version" >"$home/python"
    chmod +x "$home/python"
}

wheel_aarch64() {
    local wheel bits
    build_wheel aarch64
    readelf -h "$work"/wheel/instep/_native*.so | grep -q 'Machine:.*AArch64' || { echo "release: not for aarch64" >&2; exit 1; }
    if aarch64_python; then
        bits=$(PYTHONPATH=$work/wheel "$work/aarch64/python" python/tests/native_bits.py)
    else
        bits="NOT RUN: there is no Python for aarch64 here"
    fi
    echo "wheel: $(basename "$wheel"), $(stat -c %s "$wheel") bytes; $bits"
}

sdist() {
    tools
    rm -f "$dist"/instep-*.tar.gz
    "$work/tools/bin/maturin" sdist -m python/Cargo.toml --out "$dist"
    rm -rf "$work/sdist" && python3 -m venv "$work/sdist"
    "$work/sdist/bin/pip" install -q "$(echo "$dist"/instep-*.tar.gz)"
    (cd "$work/sdist" && first_step "$work/sdist/bin/python")
    echo "sdist: $(basename "$dist"/instep-*.tar.gz), built and stepped"
}

crates() {
    cargo package -q --allow-dirty -p instep -p instep-cli --target-dir "$work/crates"
    cp "$work"/crates/package/*.crate "$dist/"
    ls -l "$dist"/*.crate
}

for part in "${@:-wheel}"; do
    case $part in
    wheel | wheel-aarch64 | sdist | crates) "${part//-/_}" ;;
    *) echo "release: $part: unknown; use wheel, wheel-aarch64, sdist, crates" >&2 && exit 2 ;;
    esac
done
