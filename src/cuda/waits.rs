//! How the host waits for a GPU, and how a device fails.
//!
//! A wait polls, so it ends if a peer is lost or a reduction hangs. A failure is sticky: every later call returns it.
//! The time of the trainer's own work does not count toward a deadline, except in a replay of a captured pass.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::CudaDevice;
use super::driver::Entered;
use super::host_steps::HostSteps;
use super::owned::Event;
use crate::error::{Error, Result};
use crate::op::{Stream, Ticket};
use crate::poll::{Wall, poll};

/// How long a wait polls before it begins to sleep. Most waits are short.
const AWAKE: Duration = Duration::from_micros(200);

impl CudaDevice {
    /// Blocks until an event has passed. If a reduction takes longer than the deadline, returns `Deadline` instead. The
    /// clock runs only during a reduction or a replay, because the trainer's own work may take any time.
    pub(crate) fn block_on(&self, event: &Event) -> Result<()> {
        let summing_since = Cell::new(Instant::now());
        let wanted = || {
            self.comms.iter().try_for_each(|comm| comm.check())?;
            if !self.is_summing()? {
                summing_since.set(Instant::now());
            }
            let waited = summing_since.get().elapsed();
            if waited <= self.comms.deadline {
                return Ok(());
            }
            let call = "a reduction or a captured pass on the GPU";
            Err(Error::deadline(self.comms.world.rank(), call, waited, Vec::new()))
        };
        let look = || Ok(event.is_passed()?.then_some(()));
        poll(Wall::start(), AWAKE, Duration::MAX, wanted, look).map(drop)
    }

    /// Returns whether the GPU is running a collective that waits neither for the trainer nor for a step on the host. A
    /// graph that has not ended counts as such a collective, because its progress cannot be observed.
    fn is_summing(&self) -> Result<bool> {
        let is_passed = |event: Option<&Event>| event.map_or(Ok(true), Event::is_passed);
        // Positions inside captures cannot be queried, so they are left out.
        let event = |stream: Stream| self.recorded[stream.index()].map(|ticket| self.streams.event(ticket));
        if self.is_host_busy() {
            // A gather may be waiting for its step, which may take long on the host.
            return Ok(false);
        }
        let is_over = is_passed(event(Stream::Reduce))? && is_passed(event(Stream::Gather))?;
        Ok(!is_over && is_passed(event(Stream::Compute))? || !is_passed(self.replayed.as_ref())?)
    }

    pub(super) fn is_host_busy(&self) -> bool {
        self.host.as_ref().is_some_and(HostSteps::is_busy)
    }

    /// Makes the trainer's stream wait for a position.
    pub(super) fn order_compute(&mut self, ticket: Ticket) -> Result<()> {
        self.guarded("a wait of the trainer's", |device| {
            let wait = || device.streams.wait(Stream::Compute, ticket);
            match device.timing.as_mut().filter(|_| !device.is_capturing) {
                Some(timing) => timing.stall(device.cuda.compute, wait),
                None => wait(),
            }
        })
    }

    /// Runs `work` with the device current. If the device has failed, returns the device's error instead. If `work`
    /// returns an error, the device fails.
    pub(crate) fn guarded<T>(
        &mut self,
        what: &str,
        work: impl FnOnce(&mut CudaDevice) -> Result<T>,
    ) -> Result<T> {
        self.notice_host();
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let driver = Arc::clone(&self.cuda.driver);
        let outcome = Entered::new(&*driver).and_then(|_entered| work(self));
        // An op on the host for which `work` waited may have failed.
        self.notice_host();
        if let Err(error) = &outcome {
            self.fail(what, error.clone());
        }
        match &self.failed {
            Some(failed) => Err(failed.clone()),
            None => outcome,
        }
    }

    /// Fails the device if an op on the host has failed.
    pub(super) fn notice_host(&mut self) {
        if let Some((op, error)) = self.host.as_ref().and_then(HostSteps::failed) {
            self.fail(&op.to_string(), error);
        }
    }

    pub(super) fn fail(&mut self, op: &str, error: Error) {
        if self.failed.is_none() {
            self.failed = Some(Error::Poisoned { op: op.to_owned(), first: Arc::new(error.clone()) });
            if !self.is_capturing {
                self.comms.abort(&error);
            }
        }
    }
}
