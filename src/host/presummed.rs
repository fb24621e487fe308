//! Groups that sum gradients elsewhere: collectives that send nothing and compare nothing.
//!
//! `Solo`'s calls copy at most, from the source to another destination; tests compare many ranks with it, and `instep
//! replay` uses it. `External` is an engine's own all-reduce, whose counterpart on a GPU is `cuda::External`. The step
//! still divides by `world_size`.

use std::sync::Arc;

use crate::collective::{Call, Collective, CollectiveKind};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::Place;

/// A group whose gradients are already summed over its ranks: those of single-process training, or of an engine that makes
/// its own all-reduce and hands a bucket over once its sum is there, in any order of buckets; [`External`](crate::External)
/// does that too, with a rank, and refuses forgotten gradients. With several ranks, a gradient must be handed over:
/// [`Stepper::finish`](crate::Stepper::finish) does not claim that its sum is there.
///
/// It cannot ask other ranks what they used. A parameter that this rank uses counts as used by all, and one whose gradient it
/// did not ask for counts as used by none. If ranks may use different parameters, ask for every gradient that your sum
/// writes, also where this rank has none of its own: [`Stepper::bucket_mut`](crate::Stepper::bucket_mut) asks for a whole
/// bucket. Otherwise ranks drift apart, with [`Unused::StepZero`](crate::Unused) too, which overwrites that sum with zeros.
/// [`Unused::Refuse`](crate::Unused) makes a gradient that was not asked for an error.
#[derive(Clone, Copy, Debug)]
pub struct Solo {
    world_size: u32,
}

impl Solo {
    /// Takes gradients that are sums over `world_size` ranks; 1 is single-process training.
    pub fn new(world_size: u32) -> Self {
        Solo { world_size }
    }
}

impl Default for Solo {
    fn default() -> Self {
        Solo::new(1)
    }
}

impl Collective for Solo {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Reaches every place, because it never touches a buffer that is reduced in place.
    fn reaches(&self, _: Place) -> bool {
        true
    }

    fn sums(&self, _: DType) -> bool {
        true
    }

    /// All kinds if there is one rank: sums of other ranks' shards are nowhere to be had.
    fn knows(&self, kind: CollectiveKind) -> bool {
        self.world_size == 1 || matches!(kind, CollectiveKind::AllReduce | CollectiveKind::Broadcast)
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(*self))
    }

    /// Nothing is sent.
    fn keeps_order(&self) -> bool {
        false
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        if !self.knows(call.kind) {
            return Err(call.unknown_kind());
        }
        // On a GPU, where the call has a stream, steppers sum in place.
        if call.stream().is_none() {
            call.in_place()?;
        }
        Ok(())
    }

    fn abort(&self, _: &Error) {}
}

/// Steps buckets on the CPU that another engine has summed: gloo, MPI, or one of your own. In each pass:
///
/// 1. Ask for every gradient of a bucket ([`Grads::get_mut`](crate::Grads::get_mut)) and write it.
/// 2. Sum the whole bucket over the ranks, in place: a plain sum, which the step divides by `world_size`. If your all-reduce
///    already averages, construct this as rank 0 of 1.
/// 3. Call [`Stepper::bucket_ready`](crate::Stepper::bucket_ready) once the sum is there, in any order of buckets and with any thread.
///
/// The stepper writes no gradient before its step, and a hand-over alone says that a sum is there. So
/// [`Stepper::finish`](crate::Stepper::finish) refuses a gradient that was not asked for, unless it is frozen or
/// [named as unused](crate::Stepper::set_unused), and a bucket that was not handed over. Parameters are not sent, so they must be equal on all
/// ranks before the first pass and after every write; layout, options, rates, frozen and unused parameters too: ranks that
/// differ drift apart.
///
/// ```
/// use instep::{Borrowed, External, ForeignBucket, Layout, Sgd, Stepper};
///
/// # fn all_reduce(_: *mut f32) {}
/// let layout = Layout::builder().param("weight", 3).build()?;
/// let weight = layout.id("weight")?;
/// let (mut weights, mut bucket) = ([1.0f32; 3], [0.5f32; 3]);
/// let (at, described) = (bucket.as_mut_ptr(), ForeignBucket::new(3).gradient(weight, 0));
/// let memory = Borrowed::new().param(weight, weights.as_mut_ptr()).bucket(described, at);
/// let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() });
/// // SAFETY: the arrays outlive the stepper, and are touched as its rules say.
/// let mut stepper = unsafe { builder.host_borrowing(External::new(0, 2), memory)? };
/// let mut pass = stepper.begin()?;
/// pass.grads().get_mut(weight)?.fill(2.0); // backward
/// all_reduce(at); // yours, over 2 ranks
/// pass.bucket_ready(0)?;
/// pass.finish()?;
/// stepper.close()?;
/// assert_eq!(weights, [0.0; 3]);
/// # Ok::<(), instep::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct External {
    rank: u32,
    world_size: u32,
}

impl External {
    /// Makes rank `rank`'s end of a group of `world_size` ranks.
    pub fn new(rank: u32, world_size: u32) -> External {
        External { rank, world_size }
    }
}

impl Collective for External {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    fn sums(&self, _: DType) -> bool {
        true
    }

    fn sums_outside(&self) -> bool {
        true
    }

    /// A hand-over says that the sum is there.
    fn keeps_order(&self) -> bool {
        false
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        if self.knows(call.kind) { Ok(()) } else { Err(call.unknown_kind()) }
    }

    /// Does nothing: the group is the engine's, which learns of a failure from its stepper's errors.
    fn abort(&self, _: &Error) {}
}
