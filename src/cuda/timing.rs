//! When ops ran on a GPU: an event before and after each, read once both have passed.
//!
//! Only recorded runs use it, because each event costs a call and a timed event costs more than a plain one. It never
//! touches a captured stream, because events inside a graph cannot be read.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::driver::Driver;
use crate::error::Result;
use crate::handle::{EventHandle, StreamHandle};
use crate::op::{Interval, Op, TimedOp};

/// The timed events of the ops that have been submitted.
pub(super) struct Timing {
    driver: Arc<dyn Driver>,
    /// The zero of the device's clock.
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

    /// Returns the event that is the zero of all times.
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

    /// Measures how long a wait holds up the trainer's stream.
    pub(super) fn stall(&mut self, compute: StreamHandle, wait: impl FnOnce() -> Result<()>) -> Result<()> {
        let (start, end) = (self.event()?, self.event()?);
        self.stalls.push((start, end));
        // SAFETY: as above.
        unsafe { self.driver.record(start, compute)? };
        wait()?;
        // SAFETY: as above.
        unsafe { self.driver.record(end, compute) }
    }

    /// Returns the ops since the last call; all of them have been passed.
    pub(super) fn take_timed_ops(&mut self) -> Result<Vec<TimedOp>> {
        let spans = std::mem::take(&mut self.spans);
        let ran = |(op, start, end)| Ok(TimedOp { op, interval: self.interval(start, end)? });
        spans.into_iter().map(ran).collect()
    }

    /// Returns the trainer's stalls since the last call; all of them have been passed.
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
        // The driver counts in f32 milliseconds. After ten minutes, a length computed from the origin would be off by
        // up to 60 us.
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
