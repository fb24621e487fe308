//! A framework's own all-reduce: each bucket's step waits for an event that the framework recorded after the sum.
//!
//! It is for programs that have a communicator already, and it enqueues only waits. A bucket without an event is
//! refused, because its step would race with the sum.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::Cuda;
use super::driver::Driver;
use crate::collective::{Call, Collective};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::{EventHandle, Place};
use crate::op::CollectiveKind;

/// Steps buckets after a framework's own all-reduce. Each step waits for an event; nothing is sent or compared here.
///
/// For [`StepperBuilder::cuda_borrowing`](crate::StepperBuilder::cuda_borrowing) alone; buckets are numbered as they
/// were added to [`Borrowed`](crate::Borrowed). In each pass, for each bucket:
///
/// 1. Call [`Stepper::ptr`](crate::Stepper::ptr) for the gradient of every parameter that is not frozen, then run backward on the
///    trainer's stream. The framework zeroes the gradients that this rank did not use. The stepper writes no
///    gradient before its step, so it zeroes none.
/// 2. Run the framework's all-reduce on any stream, after backward's writes: a plain sum of the whole bucket, in place.
///    The step divides by `world_size`. If the all-reduce already averages, construct this as rank 0 of 1.
/// 3. Record an event after it and name the event with [`reduced`](Self::reduced).
/// 4. Call [`Stepper::bucket_ready`](crate::Stepper::bucket_ready). It refuses a bucket with a gradient that was not asked
///    for, and so does [`Stepper::finish`](crate::Stepper::finish), unless the parameter is frozen or
///    [named as unused](crate::Stepper::set_unused).
///
/// [`Stepper::capture`](crate::Stepper::capture) works the same way. Capture the all-reduce too, on a stream that forks
/// from the trainer's, and record its event there; a replay needs no events. Clones are the same communicator: one goes
/// into the stepper, the other stays with the framework.
///
/// ```no_run
/// # use instep::cuda::{Cuda, External};
/// # use instep::layout::ForeignBucket;
/// # use instep::{AdamW, Borrowed, EventHandle, Layout, Stepper, StreamHandle};
/// # let layout = Layout::builder().param("weight", 1024).build()?;
/// # let weight = layout.id("weight")?;
/// # let (weights, bucket, stream) = (std::ptr::null_mut::<f32>(), std::ptr::null_mut::<f32>(), StreamHandle(0));
/// # let all_reduce = || EventHandle(0);
/// let cuda = Cuda::open(0)?.compute_stream(stream);
/// let sums = External::new(&cuda, 0, 8);
/// let memory = Borrowed::new().param(weight, weights).bucket(ForeignBucket::new(1024).gradient(weight, 0), bucket);
/// let builder = Stepper::builder(&layout, AdamW::default());
/// // SAFETY: stream and tensors are the framework's, which keeps them and touches them as agreed.
/// let mut stepper = unsafe { builder.cuda_borrowing(sums.clone(), memory, &cuda)? };
/// let mut pass = stepper.begin()?;
/// pass.ptr(weight.grad())?; // backward writes it on `stream`, then:
/// // the event after bucket 0's sum, on any stream; SAFETY: it is not destroyed before the pass has ended
/// unsafe { sums.reduced(0, all_reduce()) };
/// pass.bucket_ready(0)?; // one step, after that event
/// pass.finish()?;
/// # Ok::<(), instep::Error>(())
/// ```
#[derive(Clone)]
pub struct External {
    driver: Arc<dyn Driver>,
    rank: u32,
    world_size: u32,
    /// Per bucket, the event after its next sum.
    events: Arc<Mutex<HashMap<u32, EventHandle>>>,
}

impl External {
    /// Makes rank `rank`'s end of a communicator of `world_size` ranks. Parameters are not sent, so they must be equal
    /// on all ranks before the first pass and after every write. Layout, options, learning rates and frozen parameters
    /// must be equal too: nothing is compared, and ranks that differ drift apart.
    pub fn new(cuda: &Cuda, rank: u32, world_size: u32) -> External {
        External { driver: Arc::clone(&cuda.driver), rank, world_size, events: Arc::default() }
    }

    /// Names the event after a bucket's sum in this pass, recorded before the bucket is handed over. Name none for a
    /// bucket whose parameters are all frozen: no pass steps it, and the event would stay until a parameter is
    /// unfrozen.
    ///
    /// # Ordering
    /// A bucket launches once it has been handed over, in any order of buckets. Its step then waits for the latest
    /// record of the event, so the event must not be recorded again before. A bucket that launches without an event
    /// poisons the stepper with `Order`.
    ///
    /// # Safety
    /// The event belongs to this device's driver, lives until the pass has been finished, and was recorded after the
    /// framework's last access to the bucket.
    pub unsafe fn reduced(&self, bucket: u32, event: EventHandle) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.insert(bucket, event);
    }

    /// Forgets the events of an abandoned pass or a failed capture, so that the next pass does not use them.
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

    /// All types: the sums are the framework's.
    fn sums(&self, _: DType) -> bool {
        true
    }

    /// Each sum has an event of its own.
    fn keeps_order(&self) -> bool {
        false
    }

    fn sums_outside(&self) -> bool {
        true
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        if call.kind == CollectiveKind::Broadcast {
            return Ok(());
        }
        if !self.knows(call.kind) {
            return Err(call.unknown_kind());
        }
        let (stream, bucket) = (call.require_stream()?, call.bucket.unwrap_or(u32::MAX));
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(event) = events.remove(&bucket) else {
            let thing = format_args!("sum of bucket {bucket}");
            return Err(Error::order(
                thing,
                "its event is unknown",
                "call External::reduced before the hand-over",
            ));
        };
        // SAFETY: the caller of `reduced` keeps the event alive; the stream is the stepper's.
        unsafe { self.driver.wait(stream, event) }
    }

    /// Does nothing: the group is the framework's, which learns of a failure from its stepper's errors.
    fn abort(&self, _: &Error) {}
}
