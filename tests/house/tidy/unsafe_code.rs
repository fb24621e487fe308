//! Unsafe code: the files that may contain it, and a reason at each block.
//!
//! A file that no longer needs `unsafe` must leave the list. A reason stands at its block: a reference to another
//! reason is one that readers may not follow.

use super::{GENERATED, code_lines, files, name, read};

/// Only these files may contain unsafe code; each one's header says why.
const UNSAFE: &[&str] = &[
    "benches/peers/entry/src/gpu.rs",
    "benches/peers/entry/src/lib.rs",
    "capi/src/access.rs",
    "capi/src/arguments.rs",
    "capi/src/between.rs",
    "capi/src/bucket_options.rs",
    "capi/src/bucket_step.rs",
    "capi/src/checkpoint.rs",
    "capi/src/collective.rs",
    "capi/src/entry.rs",
    "capi/src/fork.rs",
    "capi/src/layout.rs",
    "capi/src/memory.rs",
    "capi/src/norm.rs",
    "capi/src/optimizer.rs",
    "capi/src/options.rs",
    "capi/src/pass.rs",
    "capi/src/settings.rs",
    "capi/src/stepper.rs",
    "capi/src/stepper_options.rs",
    "capi/src/tensors.rs",
    "examples/cuda_ddp/src/instep_nccl.rs",
    "examples/cuda_ddp/src/main.rs",
    "python/src/arguments.rs",
    "python/src/lists/found.rs",
    "python/src/lists/mod.rs",
    "python/src/lists/moved.rs",
    "python/src/lists/plan.rs",
    "python/src/norm.rs",
    "python/src/openmp.rs",
    "python/src/step.rs",
    "python/src/tensors.rs",
    "src/abi.rs",
    "src/bench/gpu.rs",
    "src/bench/host.rs",
    "src/bench/load.rs",
    "src/bench/public.rs",
    "src/bucket_step/gpu.rs",
    "src/bucket_step/host.rs",
    "src/bucket_step/norm.rs",
    "src/bucket_step/tensors.rs",
    "src/collective/call.rs",
    "src/cuda/any_stream.rs",
    "src/cuda/gpu_memory.rs",
    "src/cuda/bucket.rs",
    "src/cuda/cast.rs",
    "src/cuda/device.rs",
    "src/cuda/device_impl.rs",
    "src/cuda/driver.rs",
    "src/cuda/engine.rs",
    "src/cuda/given.rs",
    "src/cuda/host_steps.rs",
    "src/cuda/judge.rs",
    "src/cuda/launches.rs",
    "src/cuda/library.rs",
    "src/cuda/nccl/bindings.rs",
    "src/cuda/nccl/library.rs",
    "src/cuda/nccl/memory.rs",
    "src/cuda/nccl/mod.rs",
    "src/cuda/nccl/ending.rs",
    "src/cuda/nccl/raw.rs",
    "src/cuda/norm_block.rs",
    "src/cuda/owned.rs",
    "src/cuda/submit.rs",
    "src/cuda/system.rs",
    "src/cuda/tile_tables.rs",
    "src/device.rs",
    "src/host/memories.rs",
    "src/host/bucket_job.rs",
    "src/host/custom.rs",
    "src/host/kernels.rs",
    "src/host/mod.rs",
    "src/host/mpi/mod.rs",
    "src/host/mpi/wire.rs",
    "src/host/ranks.rs",
    "src/host/runner.rs",
    "src/stepper/borrowing.rs",
    "src/stepper/control_access.rs",
    "src/stepper/gpu.rs",
    "src/stepper/views.rs",
    "tools/software-gpu/nccl/src/communicator.rs",
    "tools/software-gpu/nccl/src/driver.rs",
    "tools/software-gpu/nccl/src/exports.rs",
    "tools/software-gpu/nccl/src/header.rs",
    "tools/software-gpu/nccl/src/shared.rs",
    "tools/software-gpu/nccl/src/transfer.rs",
    "tools/software-gpu/src/claims.rs",
    "tools/software-gpu/src/copies.rs",
    "tools/software-gpu/src/engine/host_run.rs",
    "tools/software-gpu/src/engine/seen.rs",
    "tools/software-gpu/src/entry.rs",
    "tools/software-gpu/src/exports/devices.rs",
    "tools/software-gpu/src/exports/kernels.rs",
    "tools/software-gpu/src/exports/mod.rs",
    "tools/software-gpu/src/foreign.rs",
    "tools/software-gpu/src/header.rs",
    "tools/software-gpu/src/heap.rs",
    "tools/software-gpu/src/modules.rs",
    "tools/software-gpu/src/run.rs",
    "tools/software-gpu/src/window.rs",
];

#[test]
fn unsafe_code_stays_in_the_named_files_and_each_block_says_why() {
    let trees = [
        "src",
        "capi",
        "cli",
        "examples",
        "integrations",
        "benches",
        "python",
        "tools/software-gpu/src",
        "tools/software-gpu/nccl",
    ];
    for path in trees.iter().flat_map(|tree| files(tree, &["rs"])) {
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
            let declares = ["unsafe fn", "unsafe extern", "unsafe trait", "unsafe(no_mangle)"]
                .iter()
                .any(|d| code.contains(d));
            if declares || GENERATED.contains(&name.as_str()) {
                continue;
            }
            let explained = (1..=5).any(|back| at >= back && lines[at - back].contains("SAFETY:"));
            assert!(explained, "{name}:{}: no SAFETY line", at + 1);
        }
        let points = |line: &&str| {
            ["above", "below", "in", "for"].iter().any(|to| line.contains(&format!("SAFETY: as {to}")))
        };
        let elsewhere = lines.iter().find(|line| points(line));
        assert_eq!(elsewhere, None, "{name}: say the reason here");
        assert!(found || !allowed, "{name} no longer needs to be named");
    }
}
