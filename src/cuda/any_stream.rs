//! An object on a GPU that can be called on any stream. The work of each call waits for the work of the previous call.
//!
//! A failure is sticky: every later call fails too, because the failed call may have enqueued only a part of its work.
//! A drop waits a short time for the GPU. If the GPU is still busy then, the object's memory is leaked. The object has
//! its own stream for allocations and for blocking copies.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::driver::{Driver, Entered};
use super::owned::{Event, OwnedStream};
use crate::error::{Error, Result};
use crate::handle::StreamHandle;

pub(crate) struct AnyStream<T> {
    driver: Arc<dyn Driver>,
    /// The object's name in errors.
    what: &'static str,
    /// The object. Code in other files must not access parts of the object that work on the GPU reads.
    pub(super) inner: ManuallyDrop<T>,
    last: ManuallyDrop<LastUse>,
    failed: Option<Error>,
}

struct LastUse {
    event: Event,
    /// True if the event that marks the end of the last work could not be recorded. The end of that work is then
    /// unknown.
    is_lost: bool,
    own: OwnedStream,
}

impl<T> AnyStream<T> {
    /// Makes the device current, calls `make`, and wraps the result. `make` receives the object's own stream.
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        what: &'static str,
        make: impl FnOnce(StreamHandle) -> Result<T>,
    ) -> Result<AnyStream<T>> {
        let _entered = Entered::new(&**driver)?;
        let (own, event) = (OwnedStream::with_priority(driver, 0)?, Event::new(driver, false)?);
        let inner = ManuallyDrop::new(make(own.handle())?);
        let last = ManuallyDrop::new(LastUse { event, own, is_lost: false });
        Ok(AnyStream { driver: Arc::clone(driver), what, inner, last, failed: None })
    }

    pub(crate) fn refuse_failed(&self) -> Result<()> {
        match &self.failed {
            None => Ok(()),
            Some(first) => {
                let op = format!("an earlier call of this {}", self.what);
                Err(Error::Poisoned { op, first: Arc::new(first.clone()) })
            }
        }
    }

    /// Calls `work`, which enqueues new work on `stream` after the object's last work. Then records the end of the new
    /// work, even if `work` has failed halfway. `work` also receives the object's own stream.
    pub(super) fn on_stream<R>(
        &mut self,
        stream: StreamHandle,
        work: impl FnOnce(&mut T, StreamHandle) -> Result<R>,
    ) -> Result<R> {
        self.refuse_failed()?;
        let outcome = Entered::new(&*self.driver).and_then(|_entered| {
            self.last.event.hold(stream)?;
            let outcome = work(&mut self.inner, self.last.own.handle());
            let marked = self.last.mark(stream);
            outcome.and_then(|value| marked.map(|()| value))
        });
        outcome.inspect_err(|error| self.failed = Some(error.clone()))
    }

    /// Calls `work`, which copies to or from the host on the object's own stream, after all work of the object.
    pub(super) fn copy<R>(&mut self, work: impl FnOnce(&mut T, StreamHandle) -> Result<R>) -> Result<R> {
        self.refuse_failed()?;
        let outcome =
            Entered::new(&*self.driver).and_then(|_entered| work(&mut self.inner, self.last.join()?));
        outcome.inspect_err(|error| self.failed = Some(error.clone()))
    }

    /// Calls `work`, which copies to the host on the object's own stream, after all work of the object. A failure of
    /// this copy is not sticky, because the copy changes nothing on the GPU.
    pub(super) fn read<R>(&self, work: impl FnOnce(&T, StreamHandle) -> Result<R>) -> Result<R> {
        self.refuse_failed()?;
        let _entered = Entered::new(&*self.driver)?;
        work(&self.inner, self.last.join()?)
    }
}

impl LastUse {
    /// Makes the object's own stream wait for the object's last work, and returns that stream.
    fn join(&self) -> Result<StreamHandle> {
        self.event.hold(self.own.handle()).map(|()| self.own.handle())
    }

    /// Records that the object's last work ends at the stream's current position. The last work includes the work of a
    /// failed call, because a part of that work may have been enqueued.
    fn mark(&mut self, stream: StreamHandle) -> Result<()> {
        self.event.record(stream).inspect_err(|_| self.is_lost = true)
    }

    /// Makes the object's own stream wait for the last work, and waits a short time for the GPU. Returns whether all
    /// work has ended.
    fn is_over_soon(&self) -> bool {
        !self.is_lost && self.join().is_ok() && self.event.is_passed_soon(|| false)
    }
}

impl<T> Drop for AnyStream<T> {
    fn drop(&mut self) {
        let driver = Arc::clone(&self.driver);
        let Ok(_entered) = Entered::new(&*driver) else { return };
        if self.last.is_over_soon() {
            // SAFETY: each value is dropped once, here, and no work on the GPU uses it any more.
            unsafe {
                ManuallyDrop::drop(&mut self.inner);
                ManuallyDrop::drop(&mut self.last);
            }
        }
    }
}
