# The steps of .ci/run, one by one; `just` lists them.

default:
    @just --list

# Everything that CI runs, or only these lanes of it
ci *lanes:
    bash .ci/run {{lanes}}

# Format, lint, document
check:
    cargo fmt --all -- --check
    cargo clippy --workspace --all-targets -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --no-deps

test:
    cargo test

# All tests N times beside busy loops: none may depend on time
loaded-runs *flags:
    scripts/loaded-runs.sh {{flags}}

digits *flags:
    cargo run --release --example digits -- {{flags}}

# What a step costs here, against what memory allows; see benches/README.md
bench *flags:
    cargo bench -- {{flags}}

# Pack what checks and measures instep on a machine with a GPU; see benches/README.md
gpu-bundle *folder:
    scripts/gpu-bundle.sh {{folder}}

# Write src/abi.rs from kernels/abi.h, and the bindings of NCCL from its header (needs libclang)
bless:
    scripts/cuda-toolchain.sh --nccl
    cargo run -p bindings

# Break input files of `instep replay`, a million times
fuzz *flags:
    cargo run --release -p fuzz -- {{flags}}

# Judge the GPU kernels' machine code (installs nvcc under the target directory)
kernels *flags:
    NVCC=$(scripts/cuda-toolchain.sh) scripts/compiler-lane.py {{flags}}

# Run the GPU kernels on the CPU, each thread a fiber, and compare every bit (--sanitize: under sanitizers)
host-run *flags:
    scripts/host-run-lane.py {{flags}}
