//! Times of ops on a GPU: an event before and after each op, read once both events have passed.
//!
//! This module is used only if a caller asks for the times of ops, because each event costs a call, and a timed event
//! costs more than a plain event. Captured streams are never timed, because events inside a graph cannot be read.

use std::sync::Arc;

use super::driver::Driver;
use super::owned::Event;
use crate::error::Result;
use crate::handle::StreamHandle;
use crate::op::{Interval, Op, TimedOp};

pub(crate) struct Timing {
    driver: Arc<dyn Driver>,
    /// All times count from this event, on the device's clock.
    pub(crate) origin: Event,
    spans: Vec<(Op, Event, Event)>,
    stalls: Vec<(Event, Event)>,
    spare: Vec<Event>,
}

impl Timing {
    pub(super) fn new(driver: &Arc<dyn Driver>, stream: StreamHandle) -> Result<Timing> {
        let origin = Event::new(driver, true)?;
        let (spans, stalls, spare) = (Vec::new(), Vec::new(), Vec::new());
        origin.record(stream)?;
        Ok(Timing { driver: Arc::clone(driver), origin, spans, stalls, spare })
    }

    pub(super) fn start(&mut self, op: Op, stream: StreamHandle) -> Result<()> {
        let (start, end) = (self.event()?, self.event()?);
        let begun = start.record(stream);
        self.spans.push((op, start, end));
        begun
    }

    pub(super) fn end(&mut self, count: usize, stream: StreamHandle) -> Result<()> {
        self.spans.iter().rev().take(count).try_for_each(|(_, _, end)| end.record(stream))
    }

    /// Measures how long a wait delays the trainer's stream.
    pub(super) fn stall(&mut self, compute: StreamHandle, wait: impl FnOnce() -> Result<()>) -> Result<()> {
        let (start, end) = (self.event()?, self.event()?);
        start.record(compute)?;
        wait()?;
        end.record(compute)?;
        self.stalls.push((start, end));
        Ok(())
    }

    /// Returns the ops that were submitted since the last call of this function, with their times. All of these ops
    /// must have ended.
    pub(super) fn take_timed_ops(&mut self) -> Result<Vec<TimedOp>> {
        let spans = std::mem::take(&mut self.spans);
        let ran = |(op, start, end)| Ok(TimedOp { op, interval: self.interval(start, end)? });
        spans.into_iter().map(ran).collect()
    }

    /// Returns the intervals in which the trainer's stream has waited since the last call of this function. All of
    /// these waits must have ended.
    pub(super) fn take_stalls(&mut self) -> Result<Vec<Interval>> {
        let stalls = std::mem::take(&mut self.stalls);
        stalls.into_iter().map(|(start, end)| self.interval(start, end)).collect()
    }

    fn event(&mut self) -> Result<Event> {
        self.spare.pop().map_or_else(|| Event::new(&self.driver, true), Ok)
    }

    fn interval(&mut self, start: Event, end: Event) -> Result<Interval> {
        // The driver counts in f32 milliseconds. After ten minutes, a length computed from the origin would be off by
        // up to 60 us, so the length is measured from the op's start.
        let (start_ns, length_ns) = (start.ns_since(self.origin.handle())?, end.ns_since(start.handle())?);
        let interval = Interval { start_ns: start_ns as u64, end_ns: (start_ns + length_ns) as u64 };
        self.spare.extend([start, end]);
        Ok(interval)
    }
}
