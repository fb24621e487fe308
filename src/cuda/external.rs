//! Sums that somebody else makes: a framework's own all-reduce, which the steps wait for by its event.
//!
//! For whoever has a communicator already. The framework says which event stands behind which bucket's sum, and hands
//! the bucket over; nothing is issued here but a wait. Must refuse a bucket that no event was named for, because its
//! step would run beside the sum.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use super::Cuda;
use super::driver::Driver;
use crate::collective::{Call, Collective};
use crate::error::{Error, Result};
use crate::handle::{EventHandle, Place};
use crate::op::CollectiveKind;

/// Steps behind a framework's own all-reduce: each bucket's waits for an event, and nothing is sent or compared here.
///
/// For [`StepperBuilder::cuda_borrowing`](crate::StepperBuilder::cuda_borrowing) alone; buckets are numbered as they
/// were added to [`Borrowed`](crate::Borrowed). In each pass, for each bucket:
///
/// 1. [`Pass::grad_ptr`](crate::Pass::grad_ptr) for every parameter that is not frozen, then backward on the trainer's
///    stream. What this rank did not use the framework fills with zeros; what is frozen the stepper does.
/// 2. The framework's all-reduce, on any stream, behind what backward wrote: the plain sum of the whole bucket, in
///    place. The step divides by `world_size`; where the all-reduce gives the mean already, say rank 0 of 1.
/// 3. An event behind it, named by [`reduced`](Self::reduced).
/// 4. [`Pass::bucket_ready`](crate::Pass::bucket_ready), which refuses a bucket with a gradient that nobody asked for.
///    [`Pass::finish`](crate::Pass::finish) refuses a pass in which one was not asked for: its zeros would come beside
///    the sum.
///
/// In [`Stepper::capture`](crate::Stepper::capture) the same: the all-reduce is captured too, on a stream that forks
/// from the trainer's, and its event recorded there; replays ask for none. Clones are the same communicator: one goes
/// into the stepper, the other stays with the framework.
///
/// ```no_run
/// # use instep::cuda::{Cuda, External};
/// # use instep::layout::ForeignBucket;
/// # use instep::{AdamW, Borrowed, EventHandle, Layout, Stepper, StreamHandle, Unused};
/// # let layout = Layout::builder().param("weight", 1024).build()?;
/// # let weight = layout.id("weight")?;
/// # let (weights, bucket, stream) = (std::ptr::null_mut::<f32>(), std::ptr::null_mut::<f32>(), StreamHandle(0));
/// # let all_reduce = || EventHandle(0);
/// let cuda = Cuda::open(0)?.compute_stream(stream);
/// let sums = External::new(&cuda, 0, 8);
/// let memory = Borrowed::new().param(weight, weights).bucket(ForeignBucket::new(1024).gradient(weight, 0), bucket);
/// let builder = Stepper::builder(&layout, AdamW::default()).unused(Unused::StepZero);
/// // SAFETY: stream and tensors are the framework's, which keeps them and touches them as agreed.
/// let mut stepper = unsafe { builder.cuda_borrowing(sums.clone(), memory, &cuda)? };
/// let mut pass = stepper.begin()?;
/// pass.grad_ptr(weight)?; // backward writes it on `stream`, then:
/// // the event behind bucket 0's sum, on whatever stream; SAFETY: it is not destroyed before the pass has ended
/// unsafe { sums.reduced(0, all_reduce()) };
/// pass.bucket_ready(0)?; // one step, behind that event
/// pass.finish()?;
/// # Ok::<(), instep::Error>(())
/// ```
#[derive(Clone)]
pub struct External {
    driver: Arc<dyn Driver>,
    rank: u32,
    world_size: u32,
    /// Per bucket, the event behind its next sum.
    events: Arc<Mutex<Vec<Option<EventHandle>>>>,
}

impl External {
    /// A communicator of `world_size` ranks, as rank `rank` of them sees it. Parameters are not sent anywhere: they
    /// must be the same on all ranks before the first pass, and after any that are written. So must layout, options,
    /// learning rates and frozen parameters be: nothing is compared, and ranks that differ drift apart.
    pub fn new(cuda: &Cuda, rank: u32, world_size: u32) -> External {
        External { driver: Arc::clone(&cuda.driver), rank, world_size, events: Arc::default() }
    }

    /// Names the event behind a bucket's sum in this pass, recorded before the bucket is handed over. Not for a bucket
    /// of frozen parameters alone, which no pass steps: its event would stand until the bucket thaws.
    ///
    /// # Ordering
    /// The bucket's step comes behind the event as it was recorded last when the bucket launches: when it and all
    /// earlier ones have been handed over. Until then the event must not be recorded for anything else. A bucket that
    /// launches without one poisons the stepper with `Order`.
    ///
    /// # Safety
    /// The event is one of this device's driver, alive until the pass has been finished, and behind the last access of
    /// the framework's to the bucket.
    pub unsafe fn reduced(&self, bucket: u32, event: EventHandle) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = bucket as usize;
        if events.len() <= bucket {
            events.resize(bucket + 1, None);
        }
        events[bucket] = Some(event);
    }

    /// Forgets the events of a pass that was abandoned, or of a capture that failed, so that none stands for a sum of
    /// the next one.
    pub fn forget(&self) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl Collective for External {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    fn reaches(&self, place: Place) -> bool {
        place == Place::Cuda(self.driver.ordinal())
    }

    fn sums_outside(&self) -> bool {
        true
    }

    unsafe fn enqueue(&self, call: &Call) -> Result<()> {
        if call.kind == CollectiveKind::Broadcast {
            return Ok(());
        }
        let bucket = call.bucket.unwrap_or(u32::MAX) as usize;
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(event) = events.get_mut(bucket).and_then(Option::take) else {
            return Err(Error::Order(format!("no event was named for the sum of bucket {bucket}")));
        };
        // SAFETY: whoever named the event keeps it, by the contract of `reduced`; the stream is the stepper's.
        unsafe { self.driver.wait(call.stream, event) }
    }

    /// Ends nothing: the group is the framework's, which hears of a failure by its own stepper's errors.
    fn abort(&self, _: &Error) {}
}
