//! The figures of a run on the host as JSON, and the rows of its step table.
//!
//! Keys that a GPU's report has too have the same names. The file is written anew after each row, so a run that is cut off
//! leaves what it has measured.

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
    /// Null while the run goes on, and where the system does not tell it.
    pub(super) load: Option<Load>,
    pub(super) quick: bool,
    pub(super) step: &'a [StepRow],
    /// Every figure, also those of the other benches, as `--csv` has them.
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
    /// Buckets that the step goes through.
    pub(super) buckets: usize,
    pub(super) bytes_per_element: f64,
    pub(super) step_us: Spread,
    pub(super) ceiling_us: Spread,
    /// Bytes that a step moves, divided by its median time.
    pub(super) step_gb_per_s: f64,
    pub(super) percent_of_ceiling: Spread,
}

/// A quantity of a case of a bench.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Figure {
    pub(super) bench: String,
    pub(super) case: String,
    pub(super) isa: String,
    pub(super) threads: usize,
    /// It ends in its unit.
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
    pub(super) const HEAD: &'static str = "name      precision                     bytes    elements  segm. cache    isa       thr  B/elem  \
         time us                        GB/s  ceiling us                  % of ceiling";

    pub(super) fn line(&self) -> String {
        let StepRow { optimizer, precision, bytes, elements, segments, cache, isa, threads, .. } = self;
        let StepRow { bytes_per_element, step_us, ceiling_us, step_gb_per_s, percent_of_ceiling, .. } = self;
        format!(
            "{optimizer:<10}{precision:<23}{bytes:>11} {elements:>11}  {segments:>5} {:<9}{isa:<10}{threads:>3}  \
             {bytes_per_element:>6.2}  {:<28}{step_gb_per_s:>7.1}  {:<28}{}",
            cache.name(),
            step_us.show_us(),
            ceiling_us.show_us(),
            percent_of_ceiling.show(0),
        )
    }
}
