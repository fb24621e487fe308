//! The interface of a group of ranks: threads of one process, NCCL, or a [`Collective`] of the user's own.
//!
//! A [`Call`] carries everything that ranks must agree on, so an implementation can return an error where ranks differ,
//! instead of hanging. The sum is a plain sum: the step's launch applies the factor of the mean.

mod call;
mod comms;
pub mod conformance;
mod key;
mod sums;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::Place;
use crate::layout::Plan;
pub use crate::op::CollectiveKind;
pub(crate) use call::Addresses;
pub use call::{Allocation, Call, Purpose};
pub(crate) use comms::{Comms, place_in};
pub use key::CallKey;
pub(crate) use sums::NoCalls;
pub use sums::Sums;

pub(crate) fn refused_kind(kind: CollectiveKind) -> Error {
    let remedy = "use Strategy::Replicated, or a collective that knows it";
    Error::unsupported(kind, "this collective cannot make one", remedy)
}

/// A group of ranks, as one of them sees it. The crate brings ranks that are threads of one process
/// ([`in_process`](crate::in_process)), one rank alone ([`Solo`](crate::Solo)), processes with a GPU each
/// ([`cuda::Nccl`](crate::cuda::Nccl)) and, with feature `mpi`, processes on the host. An implementation of your own
/// reaches others, and [`conformance::check`] tests it; `examples/tcp_ranks` is one over TCP. Who makes the sums already
/// needs none: [`Sums::by_caller`].
///
/// Sums are plain sums: the mean's factor is folded into the step. Every rank must receive the same bits, or parameters
/// drift apart. A call that differs from the other ranks' ([`Call::key`]) should be a [`mismatch`](CallKey::mismatch), not a
/// hang; a kind that an implementation does not know is `Unsupported`.
///
/// # Ordering
/// Calls of one rank come from one thread at a time, in the same order on every rank.
pub trait Collective: Send + Sync {
    /// Returns the communicator that this one wraps, if it wraps one. Methods that an implementation leaves out then
    /// call the inner one's. [`duplicate`](Self::duplicate) and [`subgroup`](Self::subgroup) are not forwarded, because
    /// their results have to be wrapped too.
    fn inner(&self) -> Option<&dyn Collective> {
        None
    }

    /// This rank, from 0.
    fn rank(&self) -> u32;

    /// Number of ranks whose gradients are summed.
    fn world_size(&self) -> u32;

    /// Returns whether this collective can sum buffers at `place`. A stepper whose device's memory is out of reach is
    /// refused.
    fn reaches(&self, place: Place) -> bool {
        self.inner().map_or(place == Place::Host, |inner| inner.reaches(place))
    }

    /// Returns whether it sums elements of this type. Steppers' gradients are f32 unless their
    /// [precision](crate::StepperBuilder::precision) says otherwise, and [`Compressed`](crate::overlap::Compressed)
    /// sends others: both are refused where those would be taken for f32.
    fn sums(&self, dtype: DType) -> bool {
        self.inner().map_or(dtype == DType::F32, |inner| inner.sums(dtype))
    }

    /// Returns whether it makes calls of this kind. [`Strategy::Replicated`](crate::Strategy) needs all-reduce and
    /// broadcast alone. A stepper with another strategy is refused if a kind that it needs is unknown.
    fn knows(&self, kind: CollectiveKind) -> bool {
        let is_of_whole = matches!(kind, CollectiveKind::AllReduce | CollectiveKind::Broadcast);
        self.inner().map_or(is_of_whole, |inner| inner.knows(kind))
    }

    /// Makes another communicator of the same ranks with an order of calls of its own: all-gathers of stepped
    /// parameters go beside the next bucket's sum. Every rank calls it at the same point, once for each stepper that is
    /// not [replicated](crate::Strategy). After a failure of one, both are aborted.
    ///
    /// # Errors
    /// `Unsupported` unless an implementation says otherwise; else as for [`enqueue`](Self::enqueue).
    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        let remedy = "use Strategy::Replicated, or a collective that can";
        Err(Error::unsupported("collective", "cannot make a second communicator of its ranks", remedy))
    }

    /// Makes a communicator of some of the ranks, this one among them, which are numbered from 0 there in this order. Every
    /// rank calls it at the same point, with its own group's ranks; groups have no rank in common. After a failure of one
    /// communicator, all are aborted. [Replicas of shards](crate::StepperBuilder::shard_size) need it.
    ///
    /// # Errors
    /// `Unsupported` unless an implementation says otherwise; else as for [`enqueue`](Self::enqueue).
    fn subgroup(&self, ranks: &[u32]) -> Result<Arc<dyn Collective>> {
        let thing = format_args!("collective of {} ranks", ranks.len());
        let remedy = "leave shard_size out, or use a collective that can";
        Err(Error::unsupported(thing, "this one cannot make groups of its ranks", remedy))
    }

    /// Told of the buckets that a stepper has cut, before any call for them: when it is built, and again should it ever
    /// cut them anew. Lets an implementation size its buffers, or reject the plan.
    ///
    /// # Errors
    /// The reason why the buckets cannot be served; the stepper is refused with it.
    fn prepare(&self, plan: &Plan) -> Result<()> {
        self.inner().map_or(Ok(()), |inner| inner.prepare(plan))
    }

    /// Memory of its own for `bytes` of a stepper's buckets there, or `None` if the device's own serves it as well. Asked when a
    /// stepper is built, after [`prepare`](Self::prepare), on each rank for as many bytes. It is not asked about borrowed
    /// memory, nor about memory that comes and goes: [released](crate::Gradients::Release) gradients, and the parameters of
    /// [`Strategy::Fsdp`](crate::Strategy).
    ///
    /// # Errors
    /// `Device` or `Collective` if there is none left.
    fn allocate(&self, purpose: Purpose, place: Place, bytes: u64) -> Result<Option<Allocation>> {
        self.inner().map_or(Ok(None), |inner| inner.allocate(purpose, place, bytes))
    }

    /// Compares a number with the other ranks': on a GPU when a stepper is built, and in a pass that broadcasts
    /// parameters which were written. Ranks that differ get an error then, where it could be a hang later. In-process
    /// ranks compare it at every call instead.
    ///
    /// # Errors
    /// `Mismatch`, `PeerLost` or `Deadline`.
    fn agree(&self, number: u64, deadline: Duration) -> Result<()> {
        self.inner().map_or(Ok(()), |inner| inner.agree(number, deadline))
    }

    /// Takes part in one collective. On the host device it may block the calling stream's thread until all ranks are
    /// done, and the result is there when it returns. On a GPU it only enqueues work on [`Call::stream`], and the
    /// result is there when the stream has passed that work. The stepper's caller makes this call, with the device's
    /// primary context current. In [`Stepper::capture`](crate::Stepper::capture) that stream is being captured; replays
    /// do not come here.
    ///
    /// # Errors
    /// `Mismatch`, `LeftPass`, `PeerLost`, `Deadline` or `Collective`; the buffer's content is then unspecified, and so is every
    /// later call. `Unsupported` for memory that is out of its [reach](Self::reaches).
    fn enqueue(&self, call: &mut Call<'_>) -> Result<()>;

    /// Reports what has gone wrong since `enqueue` returned: on a GPU, a peer may be lost while a sum is in progress.
    /// It is called while the host waits, so it must not block. [`cuda::Nccl::beside`](crate::cuda::Nccl::beside)
    /// learns of a failure from this call.
    ///
    /// # Errors
    /// Errors as for [`enqueue`](Self::enqueue).
    fn check(&self) -> Result<()> {
        self.inner().map_or(Ok(()), |inner| inner.check())
    }

    /// Returns a hold, which a captured pass keeps until its graph has been freed; `None` if graphs need none. A
    /// communicator that cannot end while a graph has its calls counts them, and refuses to be closed.
    fn hold(&self) -> Option<Box<dyn Any + Send + Sync>> {
        self.inner()?.hold()
    }

    /// Ends the group: every rank's current and later calls fail with the cause. This must not block.
    fn abort(&self, cause: &Error);

    /// Threads that all ranks of this process share for their kernels; `None`: each stepper has its own.
    fn pool(&self) -> Option<crate::pool::Pool> {
        self.inner()?.pool()
    }
}
