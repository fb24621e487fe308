//! Unsafe code: the files that may contain it, and a reason at each block.
//!
//! A file that no longer needs `unsafe` must leave the list.

use super::{GENERATED, code_lines, files, name, read};

/// The only files that may contain unsafe code, and why is in each one's header.
const UNSAFE: &[&str] = &[
    "benches/peers/entry/src/gpu.rs",
    "benches/peers/entry/src/lib.rs",
    "examples/tcp_ranks/tcp.rs",
    "src/abi.rs",
    "src/bench/alone.rs",
    "src/bench/gpu.rs",
    "src/bench/host.rs",
    "src/bench/load.rs",
    "src/bench/samples.rs",
    "src/bench/trainer.rs",
    "src/bucket_step/gpu.rs",
    "src/bucket_step/host.rs",
    "src/bucket_step/norm.rs",
    "src/bucket_step/scaling.rs",
    "src/bucket_step/tensors.rs",
    "src/collective/conformance/rank.rs",
    "src/collective/mod.rs",
    "src/cuda/bucket.rs",
    "src/cuda/context.rs",
    "src/cuda/custom.rs",
    "src/cuda/device.rs",
    "src/cuda/device_impl.rs",
    "src/cuda/driver.rs",
    "src/cuda/external.rs",
    "src/cuda/functions.rs",
    "src/cuda/graph.rs",
    "src/cuda/kernels.rs",
    "src/cuda/last_use.rs",
    "src/cuda/launches.rs",
    "src/cuda/library.rs",
    "src/cuda/memory.rs",
    "src/cuda/nccl/bindings.rs",
    "src/cuda/nccl/communicator.rs",
    "src/cuda/nccl/library.rs",
    "src/cuda/nccl/memory.rs",
    "src/cuda/nccl/raw.rs",
    "src/cuda/nccl/stub.rs",
    "src/cuda/norm_block.rs",
    "src/cuda/pinned.rs",
    "src/cuda/streams.rs",
    "src/cuda/submit.rs",
    "src/cuda/system.rs",
    "src/cuda/tile_tables.rs",
    "src/cuda/timing.rs",
    "src/cuda/waits.rs",
    "src/device.rs",
    "src/host/arena.rs",
    "src/host/bucket_job.rs",
    "src/host/custom.rs",
    "src/host/kernels.rs",
    "src/host/mod.rs",
    "src/host/mpi/mod.rs",
    "src/host/mpi/wire.rs",
    "src/host/ranks.rs",
    "src/host/rendezvous.rs",
    "src/host/runner.rs",
    "src/host/solo.rs",
    "src/launch/region.rs",
    "src/launch/settings.rs",
    "src/overlap/bucket.rs",
    "src/overlap/compress.rs",
    "src/overlap/hooks.rs",
    "src/stepper/build.rs",
    "src/stepper/control_access.rs",
    "src/stepper/gpu.rs",
    "src/stepper/graphs.rs",
    "src/stepper/rebuild.rs",
    "src/stepper/scaling.rs",
    "src/stepper/stored.rs",
    "src/stepper/views.rs",
];

#[test]
fn unsafe_code_stays_in_the_named_files_and_each_block_says_why() {
    for path in ["src", "cli", "examples", "benches"].iter().flat_map(|tree| files(tree, &["rs"])) {
        let name = name(&path);
        let text = read(&path);
        let lines: Vec<&str> = text.lines().collect();
        let allowed = UNSAFE.contains(&name.as_str());
        let mut found = false;
        for (at, line) in code_lines(&text) {
            let code = line.split("//").next().unwrap();
            assert!(!code.contains("unsafe_code)]") || allowed, "{name}:{}: allows unsafe", at + 1);
            let words: Vec<&str> = code.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect();
            if !words.contains(&"unsafe") {
                continue;
            }
            found = true;
            assert!(allowed, "{name}:{}: unsafe outside the named files", at + 1);
            let declares = ["unsafe fn", "unsafe extern", "unsafe trait"].iter().any(|d| code.contains(d));
            if declares || GENERATED.contains(&name.as_str()) {
                continue;
            }
            let explained = (1..=5).any(|back| at >= back && lines[at - back].contains("SAFETY:"));
            assert!(explained, "{name}:{}: no SAFETY line", at + 1);
        }
        assert!(found || !allowed, "{name} no longer needs to be named");
    }
}
