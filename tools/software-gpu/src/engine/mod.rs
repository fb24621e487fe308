//! Runs a kernel and reports to the judge every byte that it touched.
//!
//! The kernel's PTX is interpreted. `INSTEP_GPU_KERNELS` names kernels that are compiled for the CPU. These are faster.
//! Bounds are checked before each access, and races and values once the kernel has ended.

mod host_run;
mod seen;

use software_gpu_ptx as ptx;

use crate::judge::Judge;
use crate::report;
use crate::work::Launch;
use seen::Seen;

/// Runs all blocks of a launch, in an order that `choice` selects.
pub(crate) fn launch(judge: &mut Judge<'_>, launch: &Launch, choice: u64) {
    let mut seen = Seen::new(judge);
    match host_run::library() {
        Some(library) => library.run(&mut seen, launch, choice, judge.heap.window()),
        None => interpret(&mut seen, launch, choice),
    }
    let accesses = seen.accesses;
    for range in accesses.reads() {
        judge.read(range.start, range.end - range.start);
    }
    for range in accesses.writes() {
        judge.write(range.start, range.end - range.start);
    }
}

fn interpret(seen: &mut Seen<'_, '_>, launch: &Launch, choice: u64) {
    let shape = ptx::Launch {
        grid: launch.blocks,
        block: launch.threads,
        dynamic_shared_bytes: launch.shared_bytes,
        params: &launch.arguments,
        variables: &launch.variables,
        seed: choice,
    };
    match launch.kernel.launch(&shape, seen) {
        Ok(_) => {}
        Err(ptx::Error::Fault(fault)) => report::fault(seen.broken.unwrap_or("kernel"), &fault.to_string()),
        Err(error) => report::fault("launch", &error.to_string()),
    }
}
