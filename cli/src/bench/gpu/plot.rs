//! Share of the ceiling against the size of the bucket, as an SVG picture: one line per optimizer and precision.
//!
//! It shows medians with their spread, for single-segment buckets beyond cache under the first limit on blocks. The
//! axis starts at 0. Only measured points are drawn, and none whose bits are wrong.

use std::fmt::{self, Write};

use super::report::{Report, StepRow};
use crate::bench::cases::Cache;

const LEFT: f64 = 60.0;
const RIGHT: f64 = 640.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = 340.0;
const COLOURS: [&str; 5] = ["#2f6db3", "#d1242f", "#7cc7b5", "#a395c6", "#b58900"];

pub(super) fn draw(report: &Report) -> String {
    // Writing to a String cannot fail.
    try_draw(report).unwrap_or_default()
}

fn try_draw(report: &Report) -> Result<String, fmt::Error> {
    let blocks = report.step.first().and_then(|row| row.case.max_blocks);
    let shown = |row: &&StepRow| {
        row.case.cache == Cache::Beyond
            && row.case.segments == 1
            && row.case.max_blocks == blocks
            && row.mismatch().is_none()
    };
    let rows: Vec<&StepRow> = report.step.iter().filter(shown).collect();
    let mut sizes: Vec<usize> = rows.iter().map(|row| row.case.elements).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let most = rows.iter().map(|row| row.percent_of_ceiling.max).fold(100.0, f64::max);
    let top_percent = (most / 20.0).ceil() * 20.0;
    let x = |elements: usize| {
        let place = sizes.iter().position(|size| *size == elements).unwrap_or_default();
        LEFT + (place as f64 + 0.5) / sizes.len() as f64 * (RIGHT - LEFT)
    };
    let y = |percent: f64| BOTTOM - percent / top_percent * (BOTTOM - TOP);

    let mut text = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 760 400\" width=\"760\" height=\"400\" role=\"img\">\n\
         <style>text{font:13px Helvetica,Arial,sans-serif;fill:#24292f}.in{text-anchor:middle}.end{text-anchor:end}\
         .grid{stroke:#eaeef2}.full{stroke:#57606a;stroke-dasharray:4 3}.line{fill:none;stroke-width:2}</style>\n\
         <rect width=\"760\" height=\"400\" fill=\"#fff\"/>\n",
    );
    let name = report.device.name.replace('&', "&amp;").replace('<', "&lt;");
    writeln!(
        text,
        "<text x=\"{LEFT}\" y=\"24\">{name}: step of a bucket, % of the faster copy of as many bytes</text>"
    )?;
    for tick in 0..=(top_percent / 20.0) as u32 {
        let (percent, class) = (tick * 20, if tick == 5 { "full" } else { "grid" });
        let at = y(f64::from(percent));
        writeln!(
            text,
            "<line class=\"{class}\" x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{RIGHT}\" y2=\"{at:.1}\"/>"
        )?;
        writeln!(text, "<text class=\"end\" x=\"{}\" y=\"{:.1}\">{percent}</text>", LEFT - 8.0, at + 4.0)?;
    }
    for size in &sizes {
        let at = x(*size);
        writeln!(text, "<text class=\"in\" x=\"{at:.1}\" y=\"{}\">{}</text>", BOTTOM + 20.0, short(*size))?;
    }
    let middle = (LEFT + RIGHT) / 2.0;
    writeln!(
        text,
        "<text class=\"in\" x=\"{middle}\" y=\"{}\">elements of the bucket</text>",
        BOTTOM + 42.0
    )?;
    let name_of = |row: &StepRow| match row.case.precision.as_str() {
        "f32" => row.case.name().to_owned(),
        precision => format!("{} {precision}", row.case.name()),
    };
    let mut names: Vec<String> = rows.iter().map(|row| name_of(row)).collect();
    names.dedup();
    for (k, (name, colour)) in names.iter().zip(COLOURS.iter().cycle()).enumerate() {
        let own: Vec<&&StepRow> = rows.iter().filter(|row| name_of(row) == *name).collect();
        let points: Vec<String> = own
            .iter()
            .map(|row| format!("{:.1},{:.1}", x(row.case.elements), y(row.percent_of_ceiling.median)))
            .collect();
        writeln!(text, "<polyline class=\"line\" stroke=\"{colour}\" points=\"{}\"/>", points.join(" "))?;
        for row in own {
            let (at, spread) = (x(row.case.elements), row.percent_of_ceiling);
            let (low, high) = (y(spread.min), y(spread.max));
            write!(
                text,
                "<line stroke=\"{colour}\" x1=\"{at:.1}\" y1=\"{low:.1}\" x2=\"{at:.1}\" y2=\"{high:.1}\">"
            )?;
            writeln!(text, "<title>{name} {}: {} %</title></line>", row.case.elements, spread.show(1))?;
        }
        let at = TOP + 20.0 * k as f64;
        writeln!(text, "<text x=\"{}\" y=\"{at}\" style=\"fill:{colour}\">{name}</text>", RIGHT + 16.0)?;
    }
    text.push_str("</svg>\n");
    Ok(text)
}

/// 65,536 as 64Ki.
fn short(elements: usize) -> String {
    let units = [(30, "Gi"), (20, "Mi"), (10, "Ki"), (0, "")];
    let fits = |shift: &u32| elements.is_multiple_of(1 << shift);
    let unit = units.iter().find(|(shift, _)| fits(shift));
    unit.map_or_else(String::new, |(shift, unit)| format!("{}{unit}", elements >> shift))
}
