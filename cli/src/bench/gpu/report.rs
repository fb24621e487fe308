//! Every figure of a run on a GPU, with its machine, as JSON.
//!
//! Units are in the names. The JSON holds the same figures as the printed tables.

use std::fmt;

use instep::cuda::Cuda;
use serde::Serialize;

use super::super::{Arguments, record};
use super::sweep::Case;
use crate::bench::statistics::Spread;

#[derive(Serialize)]
pub(super) struct Report {
    pub(super) device: DeviceLine,
    commit: String,
    quick: bool,
    pub(super) step: Vec<StepRow>,
    /// Cases of the step bench that do not fit into memory.
    pub(super) skipped: Vec<Case>,
    pub(super) overlap: Vec<OverlapRow>,
    pub(super) handover: Vec<HandoverRow>,
}

/// The GPU.
#[derive(Serialize)]
pub(super) struct DeviceLine {
    ordinal: u32,
    pub(super) name: String,
    multiprocessors: u32,
    l2_bytes: u64,
}

/// One line of the step bench.
#[derive(Serialize)]
pub(super) struct StepRow {
    #[serde(flatten)]
    pub(super) case: Case,
    /// Buckets that the step goes through.
    pub(super) buckets: usize,
    pub(super) steps_per_sample: usize,
    pub(super) bytes_per_element: f64,
    pub(super) step_us: Spread,
    pub(super) copy_us: Spread,
    /// Bytes that a step moves, divided by its median time.
    pub(super) step_gb_per_s: f64,
    pub(super) copy_gb_per_s: f64,
    pub(super) percent_of_copy: Spread,
    /// Samples in which the GPU may have waited for the host.
    pub(super) starved_samples: usize,
}

/// One line of the overlap bench: a mode, a limit on blocks and a kind of backward.
#[derive(Serialize)]
pub(super) struct OverlapRow {
    pub(super) backward: String,
    pub(super) max_blocks: String,
    /// Null without an optimizer, with backward and all-reduce only.
    pub(super) mode: Option<String>,
    pub(super) pass_us: Spread,
    pub(super) backward_us: Spread,
    pub(super) tail_us: Spread,
    /// Tail minus the tail of the pass without an optimizer, of the same round.
    pub(super) exposed_us: Spread,
    /// Backward minus that of the pass without an optimizer, of the same round.
    pub(super) backward_slowdown_percent: Spread,
}

/// One line of the handover bench.
#[derive(Serialize)]
pub(super) struct HandoverRow {
    pub(super) mode: String,
    pub(super) case: String,
    pub(super) grad_ready_us: Spread,
}

impl Report {
    pub(super) fn new(cuda: &Cuda, options: &Arguments) -> Report {
        let driver = cuda.driver();
        let device = DeviceLine {
            ordinal: driver.ordinal(),
            name: driver.name().to_owned(),
            multiprocessors: driver.multiprocessors(),
            l2_bytes: driver.l2_bytes(),
        };
        let commit = record::commit();
        let quick = options.quick;
        Report { device, commit, quick, step: vec![], skipped: vec![], overlap: vec![], handover: vec![] }
    }

    pub(super) fn to_json(&self) -> String {
        // Plain structs with string keys always serialize.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }
}

impl fmt::Display for DeviceLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceLine { ordinal, name, multiprocessors, l2_bytes } = self;
        let l2_mib = *l2_bytes as f64 / f64::from(1 << 20);
        write!(f, "cuda:{ordinal}: {name}, {multiprocessors} multiprocessors, L2 {l2_mib:.1} MiB")
    }
}
