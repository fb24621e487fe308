//! When ops ran on a GPU: an event before and behind each, read once they have been passed.
//!
//! Only for runs that were asked to be measured: events cost a call each, and a timed one more than a plain one. Must not
//! touch a captured stream, whose events nobody could read.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::driver::Driver;
use crate::error::Result;
use crate::handle::{EventHandle, StreamHandle};
use crate::op::{Interval, Op, Ran};

/// See the module.
pub(super) struct Timing {
    driver: Arc<dyn Driver>,
    /// Where the device's clock is zero.
    origin: EventHandle,
    spans: Vec<(Op, EventHandle, EventHandle)>,
    spare: Vec<EventHandle>,
}

impl Timing {
    pub(super) fn new(driver: &Arc<dyn Driver>, stream: StreamHandle) -> Result<Timing> {
        let origin = driver.create_event(true)?;
        let timing = Timing { driver: Arc::clone(driver), origin, spans: Vec::new(), spare: Vec::new() };
        // SAFETY: just made; the stream is the device's.
        unsafe { driver.record(origin, stream)? };
        Ok(timing)
    }

    /// The zero of all times.
    pub(super) fn origin(&self) -> EventHandle {
        self.origin
    }

    pub(super) fn start(&mut self, op: Op, stream: StreamHandle) -> Result<()> {
        let mut event = || self.spare.pop().map_or_else(|| self.driver.create_event(true), Ok);
        let (start, end) = (event()?, event()?);
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

    /// What ran since the last call, all of which has been passed.
    pub(super) fn take(&mut self) -> Result<Vec<Ran>> {
        let mut ran = Vec::with_capacity(self.spans.len());
        for (op, start, end) in self.spans.drain(..) {
            // SAFETY: as above.
            let at = |event| unsafe { self.driver.elapsed_ns(self.origin, event) };
            let (start_ns, end_ns) = (at(start)? as u64, at(end)? as u64);
            ran.push(Ran { op, interval: Interval { start_ns, end_ns } });
            self.spare.extend([start, end]);
        }
        Ok(ran)
    }
}

impl Drop for Timing {
    fn drop(&mut self) {
        let spans = self.spans.iter().flat_map(|(_, start, end)| [*start, *end]);
        for event in spans.chain(self.spare.iter().copied()).chain([self.origin]) {
            // SAFETY: made by this driver, not used again.
            unsafe { self.driver.destroy_event(event) };
        }
    }
}
