//! The last work of an object whose calls come on any stream: later work waits for it, and so does a drop, a little.
//!
//! It depends on the driver alone. A stream of its own carries allocations, and copies that the host waits for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::driver::Driver;
use super::owned::{Event, OwnedStream};
use crate::error::Result;
use crate::handle::StreamHandle;

/// How long a drop waits for the GPU before its owner leaks what may still be in use.
const GRACE: Duration = Duration::from_millis(20);

/// See the module.
pub(super) struct LastUse {
    event: Event,
    /// Whether the event was ever recorded.
    is_used: bool,
    /// Whether the last work could not be marked, so nobody knows when it ends.
    is_lost: bool,
    own: OwnedStream,
}

impl LastUse {
    pub(super) fn new(driver: &Arc<dyn Driver>) -> Result<LastUse> {
        let (own, event) = (OwnedStream::new(driver, 0)?, Event::new(driver, false)?);
        Ok(LastUse { event, own, is_used: false, is_lost: false })
    }

    /// Returns the stream of its own.
    pub(super) fn own(&self) -> StreamHandle {
        self.own.handle()
    }

    /// Makes a stream wait for the last work.
    pub(super) fn join(&self, stream: StreamHandle) -> Result<()> {
        if !self.is_used {
            return Ok(());
        }
        self.event.hold(stream)
    }

    /// Says that the last work is what the stream has now: also after a failure, since a part may have been enqueued.
    pub(super) fn mark(&mut self, stream: StreamHandle) -> Result<()> {
        self.is_used = true;
        self.event.record(stream).inspect_err(|_| self.is_lost = true)
    }

    /// Makes its own stream wait for the last work, and waits a little for the GPU. Returns whether nothing runs any more.
    pub(super) fn is_over_soon(&self) -> bool {
        let start = Instant::now();
        if self.is_lost || self.join(self.own()).is_err() {
            return false;
        }
        while self.is_used && !self.event.is_passed().unwrap_or(false) {
            if start.elapsed() > GRACE {
                return false;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        true
    }
}
