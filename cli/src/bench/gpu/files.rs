//! Writes the files that a run on a GPU was asked for, with the rows so far.
//!
//! Every bench calls this after each row, so a run that is cut off leaves what it has measured.

use super::plot;
use super::report::Report;
use crate::Failure;
use crate::bench::{Arguments, system};

pub(super) fn save(options: &Arguments, report: &Report) -> Result<(), Failure> {
    let recorded = options.record.then(|| system::folder_of(&report.device.name).join("cuda.json"));
    for path in options.json.iter().chain(&recorded) {
        system::write(path, &report.to_json()).map_err(Failure::file(path))?;
    }
    match &options.gpu.svg {
        Some(path) => system::write(path, &plot::draw(report)).map_err(Failure::file(path)),
        None => Ok(()),
    }
}
