#!/usr/bin/env bash
# Builds what could be released, into dist/, and checks each from a clean folder: scripts/release.sh [PART]...
#
# PART is `wheel` (unless told), `wheel-aarch64`, `sdist` or `crates`:
#
# wheel          For CPython from 3.10 on (abi3), on Linux with glibc 2.17 or later. maturin links it with zig. CXX, or g++, compiles
#                the CPU's kernels, so they are as fast as those of a build from source. NVCC, or the nvcc of cuda-toolchain.sh,
#                builds the GPU kernels. The wheel is installed where only Python is on the path, beside the PyTorch of the site-packages folder
#                TORCH_SITE if that is set. It must give the recorded bits, also on the software GPU.
# wheel-aarch64  zig compiles it too. It must give the recorded bits under qemu, if a Python for aarch64 can be had.
# sdist          Sources that build, and that name what is missing where there is no Rust, no linker or no C++ compiler.
# crates         `cargo package` of every crate that users take. The library and the command are built from their packages. CI's
#                lane `integrations` builds the packages for candle and burn.
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

# WHY: ends the release
refuse() {
    echo "release: $1" >&2
    exit 1
}

# ARCHITECTURE: builds its wheel with kernels for all GPUs, and unpacks it. Sets `out` to the folder of the compiled kernels.
build_wheel() {
    local fatbin
    tools
    rm -f "$dist"/instep-*"_$1.whl"
    env -u CC -u CXX -u INSTEP_CUDA_ARCHS NVCC="${NVCC:-$(scripts/cuda-toolchain.sh)}" PATH="$work/tools/bin:$PATH" \
        CXX_x86_64_unknown_linux_gnu="${CXX:-g++}" \
        maturin build -q --release --zig --compatibility manylinux2014 --target "$1-unknown-linux-gnu" -m python/Cargo.toml \
        --features cuda --out "$dist"
    wheel=$(echo "$dist"/instep-*"_$1.whl")
    rm -rf "$work/wheel" && mkdir "$work/wheel"
    python3 -m zipfile -e "$wheel" "$work/wheel"
    ls "$work"/wheel/instep-*.dist-info/licenses/LICENSE-{MIT,APACHE} "$work/wheel/instep/py.typed" >/dev/null
    [ -z "$(find "$work/wheel" -name '*.pyc')" ] || refuse "the wheel has compiled Python files"
    fatbin=$(find "$target/$1-unknown-linux-gnu/release/build" -name kernels.fatbin -size +0 -printf '%T@ %p\n' | sort -n | tail -1)
    out=$(dirname "${fatbin#* }")
    python3 - "$out/kernels.fatbin" "$work"/wheel/instep/_native*.so <<'PY'
import pathlib, sys
kernels, library = (pathlib.Path(path).read_bytes() for path in sys.argv[1:])
sys.exit(None if kernels in library else "release: the GPU kernels are not in the wheel")
PY
    [ "$(stat -c %s "$wheel")" -le $MOST_BYTES ] || refuse "a wheel of more than $MOST_BYTES bytes"
}

# FILE: how many instructions use 512-bit registers
count_zmm() {
    objdump -d "$1" | grep -c '%zmm' || true
}

wheel() {
    local wheel out found built wanted start installed stepped
    build_wheel x86_64
    # Nothing else in the wheel uses these registers, so the count is that of the AVX-512 kernels.
    found=$(count_zmm "$work"/wheel/instep/_native*.so)
    [ "$found" -ge $LEAST_ZMM ] || refuse "$found instructions on zmm registers, fewer than $LEAST_ZMM"
    [ "$found" = "$(count_zmm "$out"/avx512/*-kernels.o)" ] || refuse "zmm registers are used outside of the AVX-512 kernels"
    # An environment of its own, and no program but Python and pip on the path. An instep beside the caller's torch is not used.
    rm -rf "$work/venv" && python3 -m venv "$work/venv"
    [ -z "${TORCH_SITE:-}" ] || echo "$TORCH_SITE" >"$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
    start=${EPOCHREALTIME/[.,]/}
    PATH=$work/venv/bin pip install -q --no-index --ignore-installed "$wheel"
    installed=${EPOCHREALTIME/[.,]/}
    (cd "$work/venv" && PATH=$work/venv/bin first_step python)
    stepped=${EPOCHREALTIME/[.,]/}
    built=$("$work/venv/bin/python" -c 'import instep; print(*instep.GPU_ARCHITECTURES)')
    read -ra wanted <kernels/architectures.txt
    [ "$built" = "${wanted[*]/#/sm_} compute_${wanted[0]}" ] || refuse "kernels for $built alone"
    INSTEP_CUDA=$(scripts/software-gpu.sh)/libcuda.so "$work/venv/bin/python" python/tests/native_bits.py --gpu
    echo "wheel: $(basename "$wheel"), $(stat -c %s "$wheel") bytes, $found instructions on zmm registers, kernels for $built"
    echo "wheel: pip took $(((installed - start) / 1000)) ms, and a program with one step $(((stepped - installed) / 1000)) ms"
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
    local wheel out bits
    build_wheel aarch64
    readelf -h "$work"/wheel/instep/_native*.so | grep -q 'Machine:.*AArch64' || refuse "not for aarch64"
    if aarch64_python; then
        bits=$(PYTHONPATH=$work/wheel "$work/aarch64/python" python/tests/native_bits.py)
    else
        bits="NOT RUN: there is no Python for aarch64 here"
    fi
    echo "wheel: $(basename "$wheel"), $(stat -c %s "$wheel") bytes; $bits"
}

# TEXT VARIABLE=VALUE...: pip does not build the sources with this environment, and says the text
lacks() {
    local text=$1
    shift
    rm -rf "$work/lacks"
    if env -u CC -u CXX "$@" CARGO_TARGET_DIR="$work/lacks" "$work/sdist/bin/pip" install -q --no-deps --force-reinstall \
        "$(echo "$dist"/instep-*.tar.gz)" >"$work/said" 2>&1; then
        refuse "the sources were built without: $text"
    fi
    grep -F "$text" "$work/said" || { cat "$work/said" >&2 && refuse "the sources do not say: $text"; }
}

sdist() {
    local program
    tools
    rm -f "$dist"/instep-*.tar.gz
    "$work/tools/bin/maturin" sdist -m python/Cargo.toml --out "$dist"
    rm -rf "$work/sdist" && python3 -m venv "$work/sdist"
    # What stays on the path: no Rust, then no compiler and linker, then C's alone. With a network maturin would install a Rust.
    lacks "Cargo, the Rust package manager, is not installed" PATH="$work/sdist/bin" MATURIN_NO_INSTALL_RUST=1
    rm -rf "$work/rust" && mkdir "$work/rust"
    for program in cargo rustc; do
        ln -s "$(rustc --print sysroot)/bin/$program" "$work/rust/"
    done
    lacks "linker \`cc\` not found" PATH="$work/sdist/bin:$work/rust"
    printf '#!/bin/sh\nexec "%s" "$@"\n' "$(command -v cc)" >"$work/rust/cc"
    chmod +x "$work/rust/cc"
    lacks "instep needs a C++17 compiler" PATH="$work/sdist/bin:$work/rust"
    "$work/sdist/bin/pip" install -q "$(echo "$dist"/instep-*.tar.gz)"
    (cd "$work/sdist" && first_step "$work/sdist/bin/python")
    echo "sdist: $(basename "$dist"/instep-*.tar.gz), built and stepped"
}

crates() {
    local package crate name licence unpacked
    rm -rf "$work/crates/package"
    unpacked=$(mktemp -d) # not below this workspace, to which Cargo would count them
    cargo package -q --allow-dirty -p instep -p instep-cli --target-dir "$work/crates"
    # Their lock files would name a published library. Until there is one, the unpacked one must fit what they ask for.
    tar -xzf "$work"/crates/package/instep-[0-9]*.crate -C "$unpacked"
    for package in candle burn; do
        cargo package -q --allow-dirty --no-verify --exclude-lockfile --manifest-path "integrations/$package/Cargo.toml" \
            --target-dir "$work/crates"
        tar -xzf "$work/crates/package/instep-$package"-*.crate -C "$unpacked"
        cargo generate-lockfile -q --manifest-path "$(echo "$unpacked/instep-$package"-*)/Cargo.toml" \
            --config "patch.crates-io.instep.path='$(echo "$unpacked"/instep-[0-9]*)'"
    done
    rm -rf "$unpacked"
    rm -f "$dist"/*.crate
    cp "$work"/crates/package/*.crate "$dist/"
    for crate in "$dist"/*.crate; do
        name=$(basename "$crate" .crate)
        for licence in LICENSE-MIT LICENSE-APACHE; do
            tar -xzOf "$crate" "$name/$licence" | cmp -s - "$licence" || refuse "$name has no $licence"
        done
    done
    ls -l "$dist"/*.crate
}

for part in "${@:-wheel}"; do
    case $part in
    wheel | wheel-aarch64 | sdist | crates) "${part//-/_}" ;;
    *) echo "release: $part: unknown; use wheel, wheel-aarch64, sdist, crates" >&2 && exit 2 ;;
    esac
done
