//! Writes timelines in the trace-event format. ui.perfetto.dev and chrome://tracing show such files.
//!
//! In the trace, each rank is a process and each stream is a thread. This file writes text and opens no file. Names are
//! not escaped, because all names come from this file, from `block` or from `Stream::name`.

use std::fmt::{self, Display, Write};

use crate::op::Stream;
use crate::timeline::Lane;
use crate::timeline::block::{Block, collect_blocks};

/// Writes lanes as one JSON object. Times are in microseconds, with three decimal places.
///
/// # Errors
/// The errors of `out`.
pub fn write_trace(out: &mut impl Write, lanes: &[Lane]) -> fmt::Result {
    out.write_str("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    let mut separator = "\n";
    for lane in lanes {
        let rank = lane.rank;
        let mut describe = |what: &str, stream: usize, key: &str, value: &dyn Display| {
            write!(out, "{separator}{{\"ph\":\"M\",\"pid\":{rank},\"tid\":{stream},")?;
            write!(out, "\"name\":\"{what}\",\"args\":{{\"{key}\":{value}}}}}")?;
            separator = ",\n";
            fmt::Result::Ok(())
        };
        describe("process_name", 0, "name", &format_args!("\"rank {rank}\""))?;
        describe("process_sort_index", 0, "sort_index", &rank)?;
        let is_used = |stream: &Stream| lane.ran.iter().any(|ran| ran.op.stream == *stream);
        for stream in Stream::ALL.into_iter().filter(|stream| stream.is_always_used() || is_used(stream)) {
            let name = match stream {
                Stream::Compute => "compute: the trainer's waits",
                _ => stream.name(),
            };
            describe("thread_name", stream.index(), "name", &format_args!("\"{name}\""))?;
            describe("thread_sort_index", stream.index(), "sort_index", &stream.index())?;
        }
        for block in collect_blocks(lane) {
            write_block(out, rank, &block)?;
        }
    }
    out.write_str("\n]}\n")
}

/// Writes a block as one complete event. The events that describe the rank have been written before, so the text starts
/// with a comma.
fn write_block(out: &mut impl Write, rank: u32, block: &Block) -> fmt::Result {
    let (name, category, stream) = (&block.name, block.kind.name(), block.stream.index());
    write!(
        out,
        ",\n{{\"ph\":\"X\",\"pid\":{rank},\"tid\":{stream},\"name\":\"{name}\",\"cat\":\"{category}\""
    )?;
    let (start, length) = (Micros(block.interval.start_ns), Micros(block.interval.ns()));
    write!(out, ",\"ts\":{start},\"dur\":{length},\"args\":{{")?;
    if let Some(pass) = block.pass {
        write!(out, "\"pass\":{pass}")?;
    }
    if let Some(bucket) = block.bucket {
        write!(out, "{}\"bucket\":{bucket}", if block.pass.is_some() { "," } else { "" })?;
    }
    out.write_str("}}")
}

/// A number of nanoseconds. `Display` prints the number in microseconds, without rounding.
pub(super) struct Micros(pub(super) u64);

impl Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1_000, self.0 % 1_000)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/timeline/trace.rs"]
mod tests;
