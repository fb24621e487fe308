#!/usr/bin/env bash
# Builds what could be released, into dist/, and checks each from a clean folder: scripts/release.sh [wheel|sdist|crates]...
#
# `wheel`: for any CPython from 3.10 on (abi3), on x86-64 Linux with glibc 2.17 or later; by maturin, with zig's C++ compiler. It
# must have the kernels of every instruction set, and is installed and stepped where no compiler is on the path. `sdist`: the
# same as sources. `crates`: `cargo package` of the library and the command, the latter against the unpacked library.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
work=$target/release-check
dist=$PWD/dist
LEAST_ZMM=5000 # instructions on 512-bit registers; without AVX-512's kernels there are none
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

wheel() {
    tools
    rm -f "$dist"/instep-*.whl
    env -u CC -u CXX PATH="$work/tools/bin:$PATH" maturin build -q --release --zig --compatibility manylinux2014 \
        --target x86_64-unknown-linux-gnu -m python/Cargo.toml --out "$dist"
    local found wheel
    wheel=$(echo "$dist"/instep-*.whl)
    rm -rf "$work/wheel" && mkdir "$work/wheel"
    python3 -m zipfile -e "$wheel" "$work/wheel"
    found=$(objdump -d "$work"/wheel/instep/_native*.so | grep -c '%zmm' || true)
    [ "$found" -ge $LEAST_ZMM ] || { echo "release: $found instructions on zmm registers, fewer than $LEAST_ZMM" >&2; exit 1; }
    ls "$work"/wheel/instep-*.dist-info/licenses/* "$work/wheel/instep/py.typed" >/dev/null
    # An environment of its own, and no program but Python on the path. torch is the caller's, if it has one.
    rm -rf "$work/venv" && python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install -q --no-index "$wheel"
    [ -z "${TORCH_SITE:-}" ] || echo "$TORCH_SITE" >"$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
    (cd "$work/venv" && PATH=$work/venv/bin first_step "$work/venv/bin/python")
    echo "wheel: $(basename "$wheel"), $(stat -c %s "$wheel") bytes, $found instructions on zmm registers"
}

sdist() {
    tools
    rm -f "$dist"/instep-*.tar.gz
    "$work/tools/bin/maturin" sdist -q -m python/Cargo.toml --out "$dist"
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
    wheel | sdist | crates) "$part" ;;
    *) echo "release: $part: unknown; use wheel, sdist, crates" >&2 && exit 2 ;;
    esac
done
