//! The JSON report of a run on a GPU: all figures, and a description of the machine.
//!
//! The name of a key contains the unit of its value. The report has all figures of the printed tables and some more.
//! `files.rs` writes the report after each row.

use std::fmt;

use instep::bench::Work;
use instep::cuda::Cuda;
use serde::Serialize;

use super::super::{Arguments, system};
use super::sweep::Case;
use super::verify::Compared;
use crate::Failure;
use crate::bench::machine::Machine;
use crate::bench::statistics::Spread;

#[derive(Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    pub(super) device: DeviceLine,
    commit: String,
    quick: bool,
    pub(super) step: Vec<StepRow>,
    pub(super) norm: Vec<StepRow>,
    /// The steps and norms that were skipped because their case does not fit into memory.
    pub(super) skipped: Vec<Case>,
    pub(super) control: Vec<ControlRow>,
    pub(super) graph: Vec<GraphRow>,
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

/// One line of the step bench or of the norm bench.
#[derive(Serialize)]
pub(super) struct StepRow {
    #[serde(flatten)]
    pub(super) case: Case,
    /// The number of buckets through which the step rotates.
    pub(super) buckets: usize,
    pub(super) steps_per_sample: usize,
    pub(super) bytes_per_element: f64,
    pub(super) step_us: Spread,
    /// Time of a copy by the driver that moves as many bytes as this row's work.
    pub(super) copy_us: Spread,
    /// Time of a copy by the multiprocessors that moves as many bytes; null without `--kernels`.
    pub(super) sm_copy_us: Option<Spread>,
    /// Bytes that a step moves, divided by the step's median time.
    pub(super) step_gb_per_s: f64,
    pub(super) copy_gb_per_s: f64,
    pub(super) sm_copy_gb_per_s: Option<f64>,
    /// The copy with the smaller median time: `copy` or `sm_copy`.
    pub(super) ceiling: &'static str,
    pub(super) percent_of_ceiling: Spread,
    /// The number of samples in which the GPU may have waited for the host.
    pub(super) starved_samples: usize,
    /// The time for which the GPU ran this case before its first round.
    pub(super) warm_up_ms: f64,
    /// The comparison with the host's bits; null for a norm, because the bench does not compare norms.
    pub(super) compared: Option<Compared>,
}

/// One line of the control bench, for one of the kernels Begin and Decide.
#[derive(Serialize)]
pub(super) struct ControlRow {
    pub(super) launch: &'static str,
    pub(super) params: usize,
    pub(super) launches_per_sample: usize,
    pub(super) launch_us: Spread,
    pub(super) starved_samples: usize,
    pub(super) warm_up_ms: f64,
}

/// One line of the graph bench: passes that are made call by call, or replays of a captured pass.
#[derive(Serialize)]
pub(super) struct GraphRow {
    /// `call by call` or `replay`.
    pub(super) pass: &'static str,
    pub(super) params: usize,
    pub(super) buckets: usize,
    /// Time of the calls on the trainer's thread.
    pub(super) host_us: Spread,
    /// Time on the trainer's stream, from before the pass until every parameter may be read.
    pub(super) device_us: Spread,
}

/// The figures of the overlap bench for one mode, one limit on blocks and one kind of backward.
#[derive(Serialize)]
pub(super) struct OverlapRow {
    pub(super) backward: String,
    pub(super) max_blocks: String,
    /// Null for the pass without an optimizer, which has only backward and all-reduce.
    pub(super) mode: Option<String>,
    pub(super) pass_us: Spread,
    pub(super) backward_us: Spread,
    pub(super) tail_us: Spread,
    /// `tail_us` minus the tail of the pass without an optimizer in the same round. A tail lasts from the end of
    /// backward to the end of the pass.
    pub(super) exposed_us: Spread,
    /// How much longer backward took than in the pass without an optimizer in the same round.
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
    pub(super) fn new(cuda: &Cuda, options: &Arguments) -> instep::Result<Report> {
        let driver = cuda.driver();
        let device = DeviceLine {
            ordinal: driver.ordinal(),
            name: driver.gpu().name.clone(),
            multiprocessors: driver.gpu().multiprocessors,
            l2_bytes: driver.gpu().l2_bytes,
        };
        Ok(Report {
            machine: Machine::this()?,
            device,
            commit: system::commit(),
            quick: options.quick,
            step: vec![],
            norm: vec![],
            skipped: vec![],
            control: vec![],
            graph: vec![],
            overlap: vec![],
            handover: vec![],
        })
    }

    /// Returns the list of rows for this kind of work.
    pub(super) fn rows(&mut self, work: Work) -> &mut Vec<StepRow> {
        if work == Work::Norm { &mut self.norm } else { &mut self.step }
    }

    /// Fails if the bits of any row's step differ from those that the host computed.
    pub(super) fn judge(&self) -> Result<(), Failure> {
        let mismatches: Vec<&str> = self.step.iter().filter_map(StepRow::mismatch).collect();
        match mismatches.first() {
            Some(first) => {
                let (count, of) = (mismatches.len(), self.step.len());
                Err(Failure::Bench(format!(
                    "step: {count} of {of} rows differ from the host's bits; first {first}"
                )))
            }
            None => Ok(()),
        }
    }

    pub(super) fn to_json(&self) -> String {
        // Plain structs with string keys always serialize.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }
}

impl StepRow {
    pub(super) fn mismatch(&self) -> Option<&str> {
        self.compared.as_ref()?.mismatch.as_deref()
    }
}

impl fmt::Display for DeviceLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceLine { ordinal, name, multiprocessors, l2_bytes } = self;
        let l2_mib = *l2_bytes as f64 / f64::from(1 << 20);
        write!(f, "cuda:{ordinal}: {name}, {multiprocessors} multiprocessors, L2 {l2_mib:.1} MiB")
    }
}
