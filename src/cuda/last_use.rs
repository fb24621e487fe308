//! The last work of an object whose calls come on any stream: later work waits for it, and so does a drop, a little.
//!
//! It depends on the driver alone. A stream of its own carries allocations, and copies that the host waits for.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::driver::Driver;
use crate::error::Result;
use crate::handle::{EventHandle, StreamHandle};

/// How long a drop waits for the GPU before its owner leaks what may still be in use.
const GRACE: Duration = Duration::from_millis(20);

/// See the module.
pub(super) struct LastUse {
    driver: Arc<dyn Driver>,
    own: StreamHandle,
    event: EventHandle,
    /// Whether the event was ever recorded.
    is_used: bool,
    /// Whether the last work could not be marked, so nobody knows when it ends.
    is_lost: bool,
}

impl LastUse {
    pub(super) fn new(driver: &Arc<dyn Driver>) -> Result<LastUse> {
        let (own, driver) = (driver.create_stream(0)?, Arc::clone(driver));
        match driver.create_event(false) {
            Ok(event) => Ok(LastUse { driver, own, event, is_used: false, is_lost: false }),
            Err(error) => {
                // SAFETY: made above, and nothing is on it.
                unsafe { driver.destroy_stream(own) };
                Err(error)
            }
        }
    }

    /// Returns the stream of its own.
    pub(super) fn own(&self) -> StreamHandle {
        self.own
    }

    /// Makes a stream wait for the last work.
    pub(super) fn join(&self, stream: StreamHandle) -> Result<()> {
        if !self.is_used {
            return Ok(());
        }
        // SAFETY: both are alive.
        unsafe { self.driver.wait(stream, self.event) }
    }

    /// Says that the last work is what the stream has now: also after a failure, since a part may have been enqueued.
    pub(super) fn mark(&mut self, stream: StreamHandle) -> Result<()> {
        self.is_used = true;
        // SAFETY: both are alive.
        unsafe { self.driver.record(self.event, stream) }.inspect_err(|_| self.is_lost = true)
    }

    /// Makes its own stream wait for the last work, and waits a little for the GPU. Returns whether nothing runs any more.
    pub(super) fn is_over_soon(&self) -> bool {
        let start = Instant::now();
        if self.is_lost || self.join(self.own).is_err() {
            return false;
        }
        // SAFETY: the event is alive.
        while self.is_used && !unsafe { self.driver.is_passed(self.event) }.unwrap_or(false) {
            if start.elapsed() > GRACE {
                return false;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        true
    }
}

impl Drop for LastUse {
    fn drop(&mut self) {
        // SAFETY: made by `new`; work that is still queued runs to its end.
        unsafe {
            self.driver.destroy_event(self.event);
            self.driver.destroy_stream(self.own);
        }
    }
}
