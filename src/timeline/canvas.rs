//! The canvas of a picture: a growing SVG text, a scale from time to width, and an axis.
//!
//! This file draws shapes and does not depend on ops. The SVG needs no script, no external font and no particular
//! background. Callers pass text that is already escaped.

use std::fmt::{self, Write};

use crate::timeline::Interval;

const WIDTH: f64 = 1200.0;
/// Horizontal position of text to the left of the plot.
pub(super) const MARGIN: f64 = 24.0;
/// Horizontal start of the plot.
pub(super) const LEFT: f64 = 110.0;
/// Horizontal end of the plot.
pub(super) const RIGHT: f64 = WIDTH - MARGIN;
/// Height of the space below the plot.
const BELOW: f64 = 50.0;
const TICKS: u64 = 12;

const STYLE: &str = "text{font:13px Helvetica,Arial,sans-serif;fill:#24292f}.title{font-size:17px;font-weight:bold}\
    .rank{font-weight:bold}.small{font-size:12px;fill:#57606a}.in{text-anchor:middle}.in.step{fill:#fff}\
    rect.row{fill:#f6f8fa}rect.trainer{fill:#dce6f2}rect.waiting{fill:url(#hatch);stroke:#8c959f;stroke-width:.7}\
    rect.collective{fill:#7cc7b5}rect.control{fill:#a395c6}rect.norm{fill:#ecc45c}rect.step{fill:#2f6db3}\
    rect.copy{fill:#d99a6c}rect.zero{fill:#c4c9cf}rect.exposed{fill:#d1242f}\
    .grid{stroke:#eaeef2}.open{stroke:#57606a;stroke-dasharray:4 3}.axis{stroke:#57606a}";
const HATCH: &str = "<pattern id=\"hatch\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\" \
    patternTransform=\"rotate(45)\"><rect width=\"7\" height=\"7\" fill=\"#fff\"/>\
    <rect width=\"2.5\" height=\"7\" fill=\"#c4cbd3\"/></pattern>";

/// An unfinished picture.
pub(super) struct Canvas {
    text: String,
    window: Interval,
}

impl Canvas {
    /// Starts an empty picture with a plot that shows `window`. `bottom` is the vertical position of the plot's end.
    pub(super) fn open(window: Interval, bottom: f64) -> Result<Canvas, fmt::Error> {
        let mut text = String::new();
        let height = bottom + BELOW;
        write!(text, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" ")?;
        writeln!(text, "width=\"{WIDTH}\" height=\"{height}\" role=\"img\">")?;
        writeln!(text, "<style>{STYLE}</style><defs>{HATCH}</defs>")?;
        let (width, inner) = (WIDTH - 1.0, height - 1.0);
        write!(text, "<rect x=\"0.5\" y=\"0.5\" width=\"{width}\" height=\"{inner}\" rx=\"8\" ")?;
        writeln!(text, "fill=\"#fff\" stroke=\"#d0d7de\"/>")?;
        Ok(Canvas { text, window })
    }

    pub(super) fn close(mut self) -> String {
        self.text.push_str("</svg>\n");
        self.text
    }

    /// Returns the visible part of an interval.
    pub(super) fn clip(&self, interval: &Interval) -> Option<Interval> {
        self.window.overlap(interval)
    }

    /// Returns the horizontal position of a time.
    pub(super) fn x(&self, ns: u64) -> f64 {
        let share = (ns - self.window.start_ns) as f64 / self.window.ns().max(1) as f64;
        LEFT + share * (RIGHT - LEFT)
    }

    /// Writes text that starts at `x`. Text of the class `in` is centred at `x`.
    pub(super) fn write(&mut self, class: &str, x: f64, y: f64, words: &str) -> fmt::Result {
        writeln!(self.text, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{words}</text>")
    }

    /// Draws a box with a tooltip.
    pub(super) fn draw_box(
        &mut self,
        class: &str,
        [x, y, width, height]: [f64; 4],
        words: &str,
    ) -> fmt::Result {
        write!(self.text, "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" ")?;
        if words.is_empty() {
            return writeln!(self.text, "height=\"{height}\"/>");
        }
        writeln!(self.text, "height=\"{height}\"><title>{words}</title></rect>")
    }

    /// Draws a box for the visible part of an interval, if there is one.
    pub(super) fn draw_interval(
        &mut self,
        class: &str,
        interval: &Interval,
        y: f64,
        height: f64,
        words: &str,
    ) -> fmt::Result {
        let Some(part) = self.clip(interval) else { return Ok(()) };
        let x = self.x(part.start_ns);
        // An interval that is too short to see is drawn as a line.
        let width = (self.x(part.end_ns) - x).max(0.7);
        self.draw_box(class, [x, y, width, height], words)
    }

    pub(super) fn draw_line(&mut self, class: &str, [x1, y1, x2, y2]: [f64; 4]) -> fmt::Result {
        write!(self.text, "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" ")?;
        writeln!(self.text, "x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>")
    }

    /// Draws the axis below the plot, with 0 at the start of the window, and a faint vertical line at each tick.
    pub(super) fn draw_axis(&mut self, top: f64, bottom: f64) -> fmt::Result {
        let window_ns = self.window.ns();
        let (unit_ns, unit) = if window_ns >= 20_000_000 { (1_000_000, "ms") } else { (1_000, "µs") };
        let step_ns = find_tick(window_ns, unit_ns);
        for tick in 0..=window_ns / step_ns {
            let x = self.x(self.window.start_ns + tick * step_ns);
            self.draw_line("grid", [x, top, x, bottom + 5.0])?;
            self.write("small in", x, bottom + 20.0, &(tick * step_ns / unit_ns).to_string())?;
        }
        self.draw_line("axis", [LEFT, bottom, RIGHT, bottom])?;
        self.write("small in", (LEFT + RIGHT) / 2.0, bottom + 38.0, &format!("time in {unit}"))
    }
}

/// Returns the distance between ticks: 1, 2 or 5 units, multiplied by a power of ten.
fn find_tick(window_ns: u64, unit_ns: u64) -> u64 {
    let mut decade = unit_ns;
    loop {
        let steps = [1, 2, 5].map(|factor| decade.saturating_mul(factor));
        match steps.into_iter().find(|step| window_ns / step <= TICKS) {
            Some(step) => return step,
            None => decade = decade.saturating_mul(10),
        }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/timeline/canvas.rs"]
mod tests;
