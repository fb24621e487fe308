//! The JSON report of a run on the host, and the lines of the step bench's table.
//!
//! A quantity that is also in a GPU's report has the same key there. The file is written again after each row, so an
//! interrupted run leaves its measurements.

use std::path::Path;

use serde::Serialize;

use super::cases::Cache;
use super::load::Load;
use super::machine::Machine;
use super::statistics::Spread;
use super::system::write;
use crate::Failure;

/// One run.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    pub(super) machine: &'a Machine,
    /// The load during the run; null until the run ends, and on a system that does not report the load.
    pub(super) load: Option<Load>,
    pub(super) quick: bool,
    pub(super) step: &'a [StepRow],
    /// Every figure of every bench, as in the file of `--csv`.
    pub(super) figures: &'a [Figure],
}

/// One line of the step bench.
#[derive(Clone, Debug, Serialize)]
pub(super) struct StepRow {
    pub(super) optimizer: String,
    pub(super) precision: String,
    /// Bytes of gradients.
    pub(super) bytes: u64,
    pub(super) elements: usize,
    pub(super) segments: usize,
    pub(super) cache: Cache,
    pub(super) isa: &'static str,
    pub(super) threads: usize,
    /// The number of buckets through which the step rotates.
    pub(super) buckets: usize,
    pub(super) bytes_per_element: f64,
    pub(super) step_us: Spread,
    pub(super) ceiling_us: Spread,
    /// Bytes that a step moves, divided by the step's median time.
    pub(super) step_gb_per_s: f64,
    pub(super) percent_of_ceiling: Spread,
}

/// A measured quantity of one case of a bench.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Figure {
    pub(super) bench: String,
    pub(super) case: String,
    pub(super) isa: String,
    pub(super) threads: usize,
    /// The quantity's name, which ends in its unit.
    pub(super) quantity: String,
    #[serde(flatten)]
    pub(super) value: Spread,
}

impl Report<'_> {
    pub(super) fn save(&self, path: &Path) -> Result<(), Failure> {
        // Plain structs with string keys always serialize.
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        write(path, &text).map_err(Failure::file(path))
    }
}

impl StepRow {
    pub(super) fn head() -> String {
        format!(
            "{:<10}{:<24}{:>10}{:>6}  {:<9}{:<8}{:>4}{:>8}{:>11}{:>7}  % of ceiling",
            "name", "precision", "bytes", "segm.", "cache", "isa", "thr", "B/elem", "time us", "GB/s"
        )
    }

    /// Returns the row as a line under the table's header. The ceiling's time and the spread of both times are only in
    /// the files.
    pub(super) fn line(&self) -> String {
        let StepRow { optimizer, precision, bytes, segments, isa, threads, bytes_per_element, .. } = self;
        let StepRow { step_us, step_gb_per_s, percent_of_ceiling, .. } = self;
        format!(
            "{optimizer:<10}{precision:<24}{bytes:>10}{segments:>6}  {:<9}{isa:<8}{threads:>4}\
             {bytes_per_element:>8.2}{:>11}{step_gb_per_s:>7.1}  {}",
            self.cache.name(),
            step_us.median_us(),
            percent_of_ceiling.show(0),
        )
    }
}
