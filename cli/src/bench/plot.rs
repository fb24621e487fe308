//! Draws the percentage of the ceiling by bucket size, as an SVG picture with one line per case.
//!
//! The picture shows medians with their spread. The axis starts at 0. Only measured points are drawn.

use std::fmt::{self, Write};

use super::statistics::Spread;

const LEFT: f64 = 60.0;
const RIGHT: f64 = 640.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = 340.0;
const COLOURS: [&str; 5] = ["#2f6db3", "#d1242f", "#7cc7b5", "#a395c6", "#b58900"];

/// A point of the picture: one measured size of a case.
pub(super) struct Point {
    /// The name of the line to which the point belongs.
    pub(super) line: String,
    pub(super) elements: usize,
    pub(super) percent_of_ceiling: Spread,
}

/// Draws one line through the points of each case. In `points`, the points of a line are adjacent and ascend in size.
pub(super) fn draw(title: &str, points: &[Point]) -> String {
    // Writing to a String cannot fail.
    try_draw(title, points).unwrap_or_default()
}

fn try_draw(title: &str, points: &[Point]) -> Result<String, fmt::Error> {
    let mut sizes: Vec<usize> = points.iter().map(|point| point.elements).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let most = points.iter().map(|point| point.percent_of_ceiling.max).fold(100.0, f64::max);
    let top_percent = (most / 20.0).ceil() * 20.0;
    let x = |elements: usize| {
        let place = sizes.iter().position(|size| *size == elements).unwrap_or_default();
        LEFT + (place as f64 + 0.5) / sizes.len() as f64 * (RIGHT - LEFT)
    };
    let y = |percent: f64| BOTTOM - percent / top_percent * (BOTTOM - TOP);

    let mut text = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 860 400\" width=\"860\" height=\"400\" role=\"img\">\n\
         <style>text{font:13px Helvetica,Arial,sans-serif;fill:#24292f}.in{text-anchor:middle}.end{text-anchor:end}\
         .grid{stroke:#eaeef2}.full{stroke:#57606a;stroke-dasharray:4 3}.line{fill:none;stroke-width:2}</style>\n\
         <rect width=\"860\" height=\"400\" fill=\"#fff\"/>\n",
    );
    let title = title.replace('&', "&amp;").replace('<', "&lt;");
    writeln!(text, "<text x=\"{LEFT}\" y=\"24\">{title}</text>")?;
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
    let lines = points.chunk_by(|one, other| one.line == other.line);
    for (k, (own, colour)) in lines.zip(COLOURS.iter().cycle()).enumerate() {
        let name = &own[0].line;
        let corners: Vec<String> = own
            .iter()
            .map(|point| format!("{:.1},{:.1}", x(point.elements), y(point.percent_of_ceiling.median)))
            .collect();
        writeln!(text, "<polyline class=\"line\" stroke=\"{colour}\" points=\"{}\"/>", corners.join(" "))?;
        for point in own {
            let (at, spread) = (x(point.elements), point.percent_of_ceiling);
            let (low, high) = (y(spread.min), y(spread.max));
            write!(
                text,
                "<line stroke=\"{colour}\" x1=\"{at:.1}\" y1=\"{low:.1}\" x2=\"{at:.1}\" y2=\"{high:.1}\">"
            )?;
            writeln!(text, "<title>{name} {}: {} %</title></line>", point.elements, spread.show(1))?;
        }
        let at = TOP + 20.0 * k as f64;
        writeln!(text, "<text x=\"{}\" y=\"{at}\" style=\"fill:{colour}\">{name}</text>", RIGHT + 16.0)?;
    }
    text.push_str("</svg>\n");
    Ok(text)
}

/// Returns a number as text with a binary unit. For example, 65,536 becomes `64Ki`.
fn short(elements: usize) -> String {
    let units = [(30, "Gi"), (20, "Mi"), (10, "Ki"), (0, "")];
    let fits = |shift: &u32| elements.is_multiple_of(1 << shift);
    let unit = units.iter().find(|(shift, _)| fits(shift));
    unit.map_or_else(String::new, |(shift, unit)| format!("{}{unit}", elements >> shift))
}
