//! When ops ran on a GPU: an event before and behind each, read once they have been passed.
//!
//! Only for runs that were asked to be measured: events cost a call each, and a timed one more than a plain one. Must
//! not touch a captured stream, whose events nobody could read.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::driver::Driver;
use crate::error::Result;
use crate::handle::{EventHandle, StreamHandle};
use crate::op::{Interval, Op, TimedOp};

/// See the module.
pub(super) struct Timing {
    driver: Arc<dyn Driver>,
    /// Where the device's clock is zero.
    origin: EventHandle,
    spans: Vec<(Op, EventHandle, EventHandle)>,
    /// The trainer's waits.
    stalls: Vec<(EventHandle, EventHandle)>,
    spare: Vec<EventHandle>,
}

impl Timing {
    pub(super) fn new(driver: &Arc<dyn Driver>, stream: StreamHandle) -> Result<Timing> {
        let origin = driver.create_event(true)?;
        let (spans, stalls, spare) = (Vec::new(), Vec::new(), Vec::new());
        let timing = Timing { driver: Arc::clone(driver), origin, spans, stalls, spare };
        // SAFETY: just made; the stream is the device's.
        unsafe { driver.record(origin, stream)? };
        Ok(timing)
    }

    /// The zero of all times.
    pub(super) fn origin(&self) -> EventHandle {
        self.origin
    }

    pub(super) fn start(&mut self, op: Op, stream: StreamHandle) -> Result<()> {
        let (start, end) = (self.event()?, self.event()?);
        self.spans.push((op, start, end));
        // SAFETY: made by this driver; the stream is the device's.
        unsafe { self.driver.record(start, stream) }
    }

    pub(super) fn end(&mut self, stream: StreamHandle) -> Result<()> {
        match self.spans.last() {
            // SAFETY: as above.
            Some((_, _, end)) => unsafe { self.driver.record(*end, stream) },
            None => Ok(()),
        }
    }

    /// Measures how long a wait of the trainer's holds its stream up.
    pub(super) fn stall(&mut self, compute: StreamHandle, wait: impl FnOnce() -> Result<()>) -> Result<()> {
        let (start, end) = (self.event()?, self.event()?);
        self.stalls.push((start, end));
        // SAFETY: as above.
        unsafe { self.driver.record(start, compute)? };
        wait()?;
        // SAFETY: as above.
        unsafe { self.driver.record(end, compute) }
    }

    /// What ran since the last call, all of which has been passed.
    pub(super) fn take_timed_ops(&mut self) -> Result<Vec<TimedOp>> {
        let spans = std::mem::take(&mut self.spans);
        let ran = |(op, start, end)| Ok(TimedOp { op, interval: self.interval(start, end)? });
        spans.into_iter().map(ran).collect()
    }

    /// When the trainer stood still since the last call, all of which has been passed.
    pub(super) fn take_stalls(&mut self) -> Result<Vec<Interval>> {
        let stalls = std::mem::take(&mut self.stalls);
        stalls.into_iter().map(|(start, end)| self.interval(start, end)).collect()
    }

    fn event(&mut self) -> Result<EventHandle> {
        self.spare.pop().map_or_else(|| self.driver.create_event(true), Ok)
    }

    fn interval(&mut self, start: EventHandle, end: EventHandle) -> Result<Interval> {
        // SAFETY: as above.
        let from = |since, event| unsafe { self.driver.elapsed_ns(since, event) };
        // The driver counts in f32 milliseconds: a length taken from the origin would be good to 60 us after ten
        // minutes.
        let (start_ns, length_ns) = (from(self.origin, start)?, from(start, end)?);
        let interval = Interval { start_ns: start_ns as u64, end_ns: (start_ns + length_ns) as u64 };
        self.spare.extend([start, end]);
        Ok(interval)
    }
}

impl Drop for Timing {
    fn drop(&mut self) {
        let spans = self.spans.iter().map(|(_, start, end)| (start, end));
        let pairs = spans.chain(self.stalls.iter().map(|(start, end)| (start, end)));
        for event in pairs
            .flat_map(|(start, end)| [*start, *end])
            .chain(self.spare.iter().copied())
            .chain([self.origin])
        {
            // SAFETY: made by this driver, not used again.
            unsafe { self.driver.destroy_event(event) };
        }
    }
}
