//! Selects who sums a stepper's gradients over the ranks: a collective, or the caller.
//!
//! If the caller sums the gradients itself, there is no collective, and the schedule has no op that communicates. The
//! caller tells the stepper when the sum of each bucket is complete. The step still divides the sums by the number of
//! ranks.

use std::sync::Arc;

use crate::collective::{Call, Collective, CollectiveKind, place_in, refused_kind};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::Place;

/// Selects who sums gradients over the ranks: a [`Collective`] or the caller. Every `Collective` converts to `Sums`, so
/// you can pass a `Collective` directly to a method that takes `Sums`.
///
/// If your program [sums the gradients itself](Self::by_caller), do this in each pass, for each bucket:
///
/// 1. For every parameter that is not frozen, request its gradient from the stepper, and write the gradient. On the
///    host, use [`Grads::get_mut`](crate::Grads::get_mut). On a GPU, use [`Stepper::ptr`](crate::Stepper::ptr). The
///    stepper does not zero gradients for you.
/// 2. Sum the whole bucket over the ranks, in place. Do not divide the sum, because the step divides it by the number
///    of ranks. If your all-reduce averages the gradients, pass rank 0 and a world size of 1 to
///    [`by_caller`](Self::by_caller).
/// 3. Hand the bucket over with `Stepper::bucket_ready_after`. On a GPU, pass an event that you recorded after the sum.
///    On the host, pass a closure that returns once the sum is complete. On the host you may instead call
///    [`Stepper::bucket_ready`](crate::Stepper::bucket_ready) once the sum is complete. You may hand over buckets in
///    any order.
///
/// A bucket is stepped only after you hand it over. [`Stepper::finish`](crate::Stepper::finish) returns an error if you
/// have not handed a bucket over, or have not requested a gradient. You need not request the gradients of frozen and
/// [unused](crate::Stepper::set_unused) parameters. If all parameters of a bucket are frozen or unused, you need not
/// hand the bucket over. If you do not hand such a bucket over, no sum of the bucket may be in progress when you finish
/// the pass.
///
/// Parameters are not broadcast, so they must be equal on all ranks before the first pass and after every write.
/// Layout, options, learning rates, and the sets of frozen and unused parameters must also be equal on all ranks.
/// Otherwise the ranks' parameters diverge.
///
/// ```
/// use instep::{Borrowed, ForeignBucket, Layout, Sgd, Stepper, Sums};
///
/// # fn all_reduce(_: *mut f32) {}
/// let layout = Layout::builder().param("weight", 3).build()?;
/// let weight = layout.id("weight")?;
/// let (mut weights, mut bucket) = ([1.0f32; 3], [0.5f32; 3]);
/// let (at, described) = (bucket.as_mut_ptr(), ForeignBucket::new(3).gradient(weight, 0));
/// let memory = Borrowed::new().param(weight, weights.as_mut_ptr()).bucket(described, at);
/// let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() });
/// // SAFETY: the arrays outlive the stepper, and are touched as its rules say.
/// let mut stepper = unsafe { builder.host_borrowing(Sums::by_caller(0, 2), memory)? };
/// let mut pass = stepper.begin()?;
/// pass.grads().get_mut(weight)?.fill(2.0); // backward
/// all_reduce(at); // yours, over 2 ranks
/// pass.bucket_ready(0)?;
/// pass.finish()?;
/// stepper.close()?;
/// assert_eq!(weights, [0.0; 3]);
/// # Ok::<(), instep::Error>(())
/// ```
#[derive(Clone)]
pub struct Sums {
    pub(crate) comm: Arc<dyn Collective>,
    pub(crate) are_by_caller: bool,
}

impl Sums {
    /// Returns a `Sums` for a caller that sums gradients itself, on rank `rank` of `world_size` ranks. The stepper's
    /// strategy must be [`Replicated`](crate::Strategy::Replicated).
    pub fn by_caller(rank: u32, world_size: u32) -> Sums {
        Sums { comm: Arc::new(NoCalls { rank, world_size, supports_all: false }), are_by_caller: true }
    }
}

impl<C: Collective + 'static> From<C> for Sums {
    fn from(comm: C) -> Sums {
        Sums { comm: Arc::new(comm), are_by_caller: false }
    }
}

/// Converts a boxed collective, for a caller that chooses the collective at run time.
impl From<Box<dyn Collective>> for Sums {
    fn from(comm: Box<dyn Collective>) -> Sums {
        Sums { comm: comm.into(), are_by_caller: false }
    }
}

impl std::fmt::Debug for Sums {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sums")
            .field("rank", &self.comm.rank())
            .field("world_size", &self.comm.world_size())
            .field("by_caller", &self.are_by_caller)
            .finish()
    }
}

/// A communicator that gets no collective calls: the caller sums the gradients, the device only predicts times, or the
/// communicator belongs to a part that only steps (a GPU stepper's steps on the host, or a bench of single launches).
pub(crate) struct NoCalls {
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    /// Whether this communicator reports that it supports the calls of every strategy. This is safe because no calls
    /// are made.
    pub(crate) supports_all: bool,
}

impl Collective for NoCalls {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    fn reaches(&self, _: Place) -> bool {
        true
    }

    fn sums(&self, _: DType) -> bool {
        true
    }

    fn supports(&self, kind: CollectiveKind) -> bool {
        self.supports_all || matches!(kind, CollectiveKind::AllReduce | CollectiveKind::Broadcast)
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(NoCalls { ..*self }))
    }

    fn subgroup(&self, ranks: &[u32]) -> Result<Arc<dyn Collective>> {
        let rank = place_in(ranks, self.rank, self.world_size)?;
        Ok(Arc::new(NoCalls { rank, world_size: ranks.len() as u32, ..*self }))
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        Err(refused_kind(call.key().kind))
    }

    /// Does nothing. The caller manages the group of ranks, and learns of failures from the stepper's errors.
    fn abort(&self, _: &Error) {}
}
