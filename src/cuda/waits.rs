//! How the host waits for a GPU, and what becomes of a device on which something fails.
//!
//! A wait polls, so that a lost peer or a sum that hangs ends it; what has failed stays failed, and is what every later
//! call answers. Must never count the trainer's own work against a deadline.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::CudaDevice;
use super::driver::Entered;
use crate::error::{Error, Result};
use crate::handle::EventHandle;
use crate::op::{Stream, Ticket};

/// How long an idle GPU may take to pass an event: a drop looks no longer whether all is through.
const GRACE: Duration = Duration::from_millis(20);

impl CudaDevice {
    /// Blocks until an event has been passed, or a sum takes longer than the deadline. The trainer's own work may take
    /// any time: only while a sum is under way does the clock run.
    pub(crate) fn block_on(&self, event: EventHandle) -> Result<()> {
        let start = Instant::now();
        let mut summing_since = start;
        // SAFETY: the event is of this device's, and alive as long as it.
        while !unsafe { self.driver.is_passed(event)? } {
            self.comm.check()?;
            // Most waits are short; a long one must not take a core from the trainer's other threads.
            if start.elapsed() < Duration::from_micros(200) {
                std::hint::spin_loop();
                continue;
            }
            std::thread::sleep(Duration::from_micros(50));
            if !self.is_summing()? {
                summing_since = Instant::now();
            }
            let waited = summing_since.elapsed();
            if waited > self.deadline {
                return Err(Error::Deadline {
                    rank: self.rank,
                    call: "a sum or a captured pass on the GPU".to_owned(),
                    waited_ms: waited.as_millis() as u64,
                    missing: Vec::new(),
                });
            }
        }
        Ok(())
    }

    /// Whether the trainer has come to all that was handed over, and sums are still not through; or a graph is not, in
    /// which nobody can tell.
    fn is_summing(&self) -> Result<bool> {
        let is_passed = |event: Option<EventHandle>| {
            // SAFETY: as in `block_on`; positions inside captures are not among them.
            event.map_or(Ok(true), |event| unsafe { self.driver.is_passed(event) })
        };
        let event = |stream: Stream| self.recorded[stream.index()].map(|ticket| self.streams.event(ticket));
        Ok(!is_passed(event(Stream::Reduce))? && is_passed(event(Stream::Compute))?
            || !is_passed(self.replayed)?)
    }

    /// Whether an event is passed as soon as an idle GPU gets to it.
    pub(super) fn is_passed_soon(&self, event: EventHandle) -> bool {
        let start = Instant::now();
        loop {
            // SAFETY: as in `block_on`.
            match unsafe { self.driver.is_passed(event) } {
                Ok(false) if start.elapsed() < GRACE => std::thread::sleep(Duration::from_micros(20)),
                outcome => return outcome == Ok(true),
            }
        }
    }

    /// Makes the trainer's stream wait for a position.
    pub(super) fn order_compute(&mut self, ticket: Ticket) -> Result<()> {
        self.guarded("a wait of the trainer's", |device| {
            let wait = || device.streams.wait(Stream::Compute, ticket);
            match device.timing.as_mut().filter(|_| !device.is_capturing) {
                Some(timing) => timing.stall(device.streams.stream(Stream::Compute), wait),
                None => wait(),
            }
        })
    }

    /// Does something with the device current, unless anything has failed; if this fails, nothing else is tried.
    pub(crate) fn guarded<T>(
        &mut self,
        what: &str,
        work: impl FnOnce(&mut CudaDevice) -> Result<T>,
    ) -> Result<T> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let driver = Arc::clone(&self.driver);
        let outcome = Entered::new(&*driver).and_then(|_entered| work(self));
        outcome.map_err(|error| {
            self.fail(what, error);
            self.failed.clone().unwrap_or(Error::Order(String::new()))
        })
    }

    pub(super) fn fail(&mut self, op: &str, error: Error) {
        if self.failed.is_none() {
            self.failed = Some(Error::Poisoned { op: op.to_owned(), first: Arc::new(error.clone()) });
            if !self.is_capturing {
                self.comm.abort(&error);
            }
        }
    }
}
