//! Writes the output files of a run on a GPU, with all rows that were measured so far.
//!
//! Every bench calls `save` after each row, so an interrupted run leaves the rows that it has measured.

use super::report::{Report, StepRow};
use crate::Failure;
use crate::bench::cases::Cache;
use crate::bench::plot::{self, Point};
use crate::bench::{Arguments, system};

pub(super) fn save(options: &Arguments, report: &Report) -> Result<(), Failure> {
    let recorded = options.record.then(|| system::folder_of(&report.device.name).join("cuda.json"));
    for path in options.json.iter().chain(&recorded) {
        system::write(path, &report.to_json()).map_err(Failure::file(path))?;
    }
    let Some(path) = &options.svg else { return Ok(()) };
    let title = format!("{}: step of a bucket, % of the faster copy of as many bytes", report.device.name);
    system::write(path, &plot::draw(&title, &points(report))).map_err(Failure::file(path))
}

/// Returns the points of the picture. A row becomes a point if it has one segment, `Cache::Beyond`, the first row's
/// limit on blocks, and no wrong bit.
fn points(report: &Report) -> Vec<Point> {
    let blocks = report.step.first().and_then(|row| row.case.max_blocks);
    let is_shown = |row: &&StepRow| {
        let case = &row.case;
        case.cache == Cache::Beyond
            && case.segments == 1
            && case.max_blocks == blocks
            && row.mismatch().is_none()
    };
    let point = |row: &StepRow| Point {
        line: match row.case.precision.as_str() {
            "f32" => row.case.name().to_owned(),
            precision => format!("{} {precision}", row.case.name()),
        },
        elements: row.case.elements,
        percent_of_ceiling: row.percent_of_ceiling,
    };
    report.step.iter().filter(is_shown).map(point).collect()
}
