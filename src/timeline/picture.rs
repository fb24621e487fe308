//! Timelines as an SVG picture: streams over time, with exposed time in red.
//!
//! The same lanes always give the same text. The trainer's own work is not measured. The picture shows it as the time
//! between waits.

use std::fmt;

use crate::op::{STREAMS, Stream};
use crate::timeline::block::{Block, Kind, collect_blocks};
use crate::timeline::canvas::{Canvas, LEFT, MARGIN, RIGHT};
use crate::timeline::trace::Micros;
use crate::timeline::{Interval, Lane, exposure, find_exposed};

/// Height of a stream's row, and vertical distance from row to row.
const ROW: f64 = 34.0;
const PITCH: f64 = 44.0;
/// Room above a lane's rows, for the numbers of passes.
const HEADING: f64 = 26.0;
/// Height of the strip of exposed time, under the last row.
const STRIP: f64 = 8.0;
/// Room under a lane's rows, for the strip and a line of text.
const FOOT: f64 = STRIP + 24.0;
/// Vertical position of the legend's text.
const LEGEND: f64 = 65.0;
/// Vertical position of the first lane.
const TOP: f64 = 84.0;
/// Approximate width of a letter.
const LETTER: f64 = 7.0;

/// Draws the lanes in a window: a title, a row for each stream of each lane, and an axis that starts with the window.
pub fn draw_picture(title: &str, lanes: &[Lane], window: Interval) -> String {
    // Writing to a String cannot fail.
    try_draw(title, lanes, window).unwrap_or_default()
}

fn try_draw(title: &str, lanes: &[Lane], window: Interval) -> Result<String, fmt::Error> {
    let rows = Rows::of(lanes);
    let bottom = rows.top(lanes.len());
    let mut canvas = Canvas::open(window, bottom)?;
    let title = title.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    canvas.write("title", MARGIN, 32.0, &title)?;
    let lanes: Vec<_> = lanes.iter().map(|lane| Drawn::new(lane, &canvas)).collect();
    draw_legend(&mut canvas, &lanes)?;
    for index in 0..lanes.len() {
        for stream in rows.streams() {
            canvas.draw_box("row", [LEFT, rows.find(index, stream), RIGHT - LEFT, ROW], "")?;
        }
    }
    canvas.draw_axis(TOP + HEADING, bottom)?;
    for (index, lane) in lanes.iter().enumerate() {
        lane.draw(&mut canvas, rows, index)?;
    }
    Ok(canvas.close())
}

/// Draws the legend, with the kinds that occur in the window.
fn draw_legend(canvas: &mut Canvas, lanes: &[Drawn]) -> fmt::Result {
    let occurs = |kind: &Kind| lanes.iter().flat_map(|lane| &lane.blocks).any(|block| block.kind == *kind);
    let kinds = Kind::ALL.into_iter().filter(occurs).map(|kind| (kind.name(), explain(kind)));
    let mut x = LEFT;
    let exposed = ("exposed", "exposed: optim works while the trainer waits");
    for (class, words) in [("trainer", "trainer at work")].into_iter().chain(kinds).chain([exposed]) {
        canvas.draw_box(&format!("key {class}"), [x, LEGEND - 12.0, 18.0, 14.0], "")?;
        canvas.write("small", x + 24.0, LEGEND - 1.0, words)?;
        x += 44.0 + 0.9 * LETTER * words.len() as f64;
    }
    Ok(())
}

/// The visible part of a lane.
struct Drawn {
    rank: u32,
    /// The time from the earliest start to the latest end of all blocks of the lane.
    measured: Option<Interval>,
    /// Blocks that are visible in the window.
    blocks: Vec<Block>,
}

impl Drawn {
    fn new(lane: &Lane, canvas: &Canvas) -> Drawn {
        let mut blocks = collect_blocks(lane);
        let start_ns = blocks.iter().map(|block| block.interval.start_ns).min();
        let end_ns = blocks.iter().map(|block| block.interval.end_ns).max();
        let measured = start_ns.zip(end_ns).map(|(start_ns, end_ns)| Interval { start_ns, end_ns });
        blocks.retain(|block| canvas.clip(&block.interval).is_some());
        Drawn { rank: lane.rank, measured, blocks }
    }

    fn draw(&self, canvas: &mut Canvas, rows: Rows, index: usize) -> fmt::Result {
        canvas.write(
            "rank",
            MARGIN,
            rows.find(index, Stream::Compute) - 8.0,
            &format!("rank {}", self.rank),
        )?;
        for stream in rows.streams() {
            canvas.write("", MARGIN, rows.find(index, stream) + 22.0, stream.name())?;
        }
        if let Some(measured) = &self.measured {
            let words = "trainer at work, where it does not wait";
            canvas.draw_interval("trainer", measured, rows.find(index, Stream::Compute), ROW, words)?;
        }
        for (at, block) in self.blocks.iter().enumerate() {
            let y = rows.find(index, block.stream);
            let pass = block.pass.map_or(String::new(), |pass| format!(", pass {pass}"));
            let words = format!("{}{pass}, {} µs", block.name, Micros(block.interval.ns()));
            canvas.draw_interval(block.kind.name(), &block.interval, y, ROW, &words)?;
            self.name_block(canvas, at, y)?;
            self.draw_opening(canvas, block, rows, index)?;
        }
        self.draw_exposed(canvas, rows.find_last(index) + ROW + 2.0)
    }

    /// Writes the name of a block inside the block, or the number of its bucket if only this number fits. If neither
    /// fits, writes the number next to the block, if there is room.
    fn name_block(&self, canvas: &mut Canvas, at: usize, y: f64) -> fmt::Result {
        let block = &self.blocks[at];
        let Some(part) = canvas.clip(&block.interval) else { return Ok(()) };
        let number = block.bucket.map_or(String::new(), |bucket| bucket.to_string());
        let (start, end) = (canvas.x(part.start_ns), canvas.x(part.end_ns));
        let next = self.blocks[at + 1..].iter().find(|next| next.stream == block.stream || next.opens_pass());
        let free = next.map_or(RIGHT, |next| canvas.x(next.interval.start_ns.max(part.end_ns)));
        let last = self.blocks[..at].iter().rfind(|last| last.stream == block.stream);
        let taken =
            last.and_then(|last| canvas.clip(&last.interval)).map_or(LEFT, |last| canvas.x(last.end_ns));
        let fits = |words: &str, room: f64| !words.is_empty() && room > LETTER * words.len() as f64 + 5.0;
        let inside = [&block.name, &number].into_iter().find(|words| fits(words, end - start));
        match inside {
            Some(words) => {
                canvas.write(&format!("in {}", block.kind.name()), (start + end) / 2.0, y + 22.0, words)
            }
            None if fits(&number, free - end) => canvas.write("small", end + 3.0, y + 22.0, &number),
            // Half of the gap is left for the previous block's number.
            None if fits(&number, (start - taken) / 2.0) => {
                canvas.write("small", start - 3.0 - LETTER * number.len() as f64, y + 22.0, &number)
            }
            None => Ok(()),
        }
    }

    /// Draws a line through all rows at the time when a pass opens.
    fn draw_opening(&self, canvas: &mut Canvas, block: &Block, rows: Rows, index: usize) -> fmt::Result {
        let opened = block.pass.filter(|_| block.opens_pass()).zip(canvas.clip(&block.interval));
        let Some((pass, part)) = opened.filter(|(_, part)| part.start_ns == block.interval.start_ns) else {
            return Ok(());
        };
        let (x, top) = (canvas.x(part.start_ns), rows.find(index, Stream::Compute) - HEADING + 4.0);
        canvas.draw_line("open", [x, top, x, rows.find_last(index) + ROW])?;
        canvas.write("small", x + 5.0, top + 14.0, &format!("pass {pass}"))
    }

    /// Draws the strip of exposed time, and writes the totals.
    fn draw_exposed(&self, canvas: &mut Canvas, y: f64) -> fmt::Result {
        let of = |stream| -> Vec<Interval> {
            let blocks = self.blocks.iter().filter(|block| block.stream == stream);
            blocks.filter_map(|block| canvas.clip(&block.interval)).collect()
        };
        let (busy, blocked) = (of(Stream::Optim), of(Stream::Compute));
        for exposed in find_exposed(&busy, &blocked) {
            let words = format!("exposed, {} µs", Micros(exposed.ns()));
            canvas.draw_interval("exposed", &exposed, y, STRIP, &words)?;
        }
        let sums = exposure(&busy, &blocked);
        let [busy, exposed] = [sums.busy_ns, sums.exposed_ns].map(|ns| (ns + 500) / 1_000);
        let words = format!("optim at work for {busy} µs, of which {exposed} µs exposed");
        canvas.write("small", LEFT, y + STRIP + 14.0, &words)
    }
}

/// The rows of each lane, one per stream. Some streams are optional: not every stepper uses them. If no lane uses such
/// a stream, the stream has no row.
#[derive(Clone, Copy)]
struct Rows {
    has: [bool; STREAMS],
}

impl Rows {
    fn of(lanes: &[Lane]) -> Rows {
        let used =
            |stream: &Stream| lanes.iter().any(|lane| lane.ran.iter().any(|ran| ran.op.stream == *stream));
        Rows { has: Stream::ALL.map(|stream| stream.is_always_used() || used(&stream)) }
    }

    fn streams(self) -> impl Iterator<Item = Stream> {
        Stream::ALL.into_iter().filter(move |stream| self.has[stream.index()])
    }

    fn top(self, lane: usize) -> f64 {
        TOP + lane as f64 * (HEADING + self.streams().count() as f64 * PITCH + FOOT)
    }

    fn find(self, lane: usize, stream: Stream) -> f64 {
        let row = self.streams().take_while(|above| *above != stream).count();
        self.top(lane) + HEADING + row as f64 * PITCH
    }

    fn find_last(self, lane: usize) -> f64 {
        self.top(lane) + HEADING + (self.streams().count() - 1) as f64 * PITCH
    }
}

fn explain(kind: Kind) -> &'static str {
    match kind {
        Kind::Waiting => "trainer waiting",
        Kind::Collective => "collective",
        Kind::Control => "begin, decide",
        Kind::Norm => "norm",
        Kind::Step => "step of a bucket",
        Kind::Copy => "copy between memories",
        Kind::Zero => "zero",
    }
}

#[cfg(test)]
#[path = "../../tests/unit/timeline/picture.rs"]
mod tests;
