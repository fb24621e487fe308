//! The interface to a group of ranks. The ranks are threads of one process, or use NCCL, or use a [`Collective`] that
//! the user implements.
//!
//! A [`Call`] carries everything on which ranks must agree. An implementation can therefore detect ranks that differ,
//! and return an error instead of hanging. A collective does not divide sums, because the step divides them by the
//! number of ranks.

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
    let remedy = "use Strategy::Replicated, or a collective that supports it";
    Error::unsupported(kind, "this collective cannot make one", remedy)
}

/// One rank's communicator in a group of ranks. This crate has implementations for threads of one process
/// ([`in_process`](crate::in_process)), for one rank alone ([`Solo`](crate::Solo)), and for processes that have one GPU
/// each ([`cuda::Nccl`](crate::cuda::Nccl)). Feature `mpi` adds an implementation for processes on the host. For any
/// other transport, implement this trait, and test the implementation with [`conformance::check`]. `examples/tcp_ranks`
/// is an implementation over TCP. If your program already sums the gradients, use [`Sums::by_caller`] instead.
///
/// An implementation must not divide sums, because the step divides them by the number of ranks. Every rank must
/// receive the same bits, or parameters diverge. If the ranks' calls differ ([`Call::key`]), an implementation should
/// return a [`mismatch`](CallKey::mismatch) instead of hanging. If an implementation does not support a
/// [kind](Self::supports) of call, it returns `Unsupported`.
///
/// # Ordering
/// A stepper makes the calls of one rank from one thread at a time. The order of the calls is the same on every rank.
pub trait Collective: Send + Sync {
    /// Returns the inner communicator, if this communicator wraps another. If there is an inner communicator, most
    /// default methods of this trait call the inner communicator's method of the same name.
    /// [`duplicate`](Self::duplicate) and [`subgroup`](Self::subgroup) are not forwarded, because their results have to
    /// be wrapped too. [`enqueue_all`](Self::enqueue_all) calls this communicator's [`enqueue`](Self::enqueue).
    fn inner(&self) -> Option<&dyn Collective> {
        None
    }

    /// Returns this rank, counted from 0.
    fn rank(&self) -> u32;

    /// Returns the number of ranks that sum gradients together.
    fn world_size(&self) -> u32;

    /// Returns whether this collective can sum buffers at `place`. If this method returns false, building a stepper
    /// with memory at `place` returns an error.
    fn reaches(&self, place: Place) -> bool {
        self.inner().map_or(place == Place::Host, |inner| inner.reaches(place))
    }

    /// Returns whether this collective can sum elements of this type. A stepper sums gradients in f32, or in the type
    /// that its [precision](crate::StepperBuilder::precision) sets. [`Compressed`](crate::overlap::Compressed) sums
    /// bf16 or f16. If the collective cannot sum the type, building the stepper or the `Compressed` returns an error.
    fn sums(&self, dtype: DType) -> bool {
        self.inner().map_or(dtype == DType::F32, |inner| inner.sums(dtype))
    }

    /// Returns whether this collective supports calls of this kind. [`Strategy::Replicated`](crate::Strategy) needs
    /// only all-reduce and broadcast. Building a stepper with another strategy returns an error if the collective does
    /// not support a kind that the strategy needs.
    fn supports(&self, kind: CollectiveKind) -> bool {
        let is_of_whole = matches!(kind, CollectiveKind::AllReduce | CollectiveKind::Broadcast);
        self.inner().map_or(is_of_whole, |inner| inner.supports(kind))
    }

    /// Makes another communicator of the same ranks. Calls on the new communicator are not ordered with calls on this
    /// communicator, so all-gathers of stepped parameters can overlap with the next bucket's reduce. Every rank makes
    /// this call at the same point, once for each stepper that is not [replicated](crate::Strategy). If one of the two
    /// communicators fails, the stepper aborts both.
    ///
    /// # Errors
    /// `Unsupported` by default. Implementations return the errors of [`enqueue`](Self::enqueue).
    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        let remedy = "use Strategy::Replicated, or a collective that can";
        Err(Error::unsupported("collective", "cannot make a second communicator of its ranks", remedy))
    }

    /// Makes a communicator of the given ranks, and numbers these ranks from 0 in the given order. This rank is one of
    /// the given ranks. Every rank makes this call at the same point with the ranks of its own group. Groups have no
    /// rank in common. If one communicator fails, the stepper aborts all its communicators. Steppers make groups for
    /// [replicas of shards](crate::StepperBuilder::shard_size).
    ///
    /// # Errors
    /// `Unsupported` by default. Implementations return the errors of [`enqueue`](Self::enqueue).
    fn subgroup(&self, ranks: &[u32]) -> Result<Arc<dyn Collective>> {
        let thing = format_args!("collective of {} ranks", ranks.len());
        let remedy = "leave shard_size out, or use a collective that can";
        Err(Error::unsupported(thing, "this one cannot make groups of its ranks", remedy))
    }

    /// Receives the plan of a stepper's buckets, before any collective on these buckets. A stepper makes this call when
    /// it is built, and again if it rebuilds its buckets. An implementation can size its buffers here, or reject the
    /// plan.
    ///
    /// # Errors
    /// Returns the reason why the collective does not support the plan. Building the stepper then fails with this
    /// error.
    fn prepare(&self, plan: &Plan) -> Result<()> {
        self.inner().map_or(Ok(()), |inner| inner.prepare(plan))
    }

    /// Allocates `bytes` bytes at `place` for a stepper's buckets, or returns `None` if special memory has no advantage
    /// for this collective. A stepper calls this method when it is built, and again if it rebuilds its buckets, after
    /// [`prepare`](Self::prepare), with the same number of bytes on each rank. The stepper does not call this method
    /// for borrowed memory, or for memory that is freed and allocated again: [released](crate::Gradients::Release)
    /// gradients, and the parameters of [`Strategy::Fsdp`](crate::Strategy).
    ///
    /// # Errors
    /// `Device` or `Collective` if there is no memory left.
    fn allocate(&self, purpose: Purpose, place: Place, bytes: u64) -> Result<Option<Allocation>> {
        self.inner().map_or(Ok(None), |inner| inner.allocate(purpose, place, bytes))
    }

    /// Compares a number with the numbers of the other ranks, and returns an error if they differ. A stepper on a GPU
    /// makes this call when it is built, when it rebuilds its buckets, and at the start of a pass (except the first) if
    /// a parameter was written since the last pass began. Without this comparison, ranks that differ might hang in a
    /// later call. Ranks that are threads of one process need no such call, because they compare the key of every call.
    ///
    /// # Errors
    /// `Mismatch` if the numbers differ, `PeerLost` if a rank is gone, `Deadline` if a rank is late.
    fn agree(&self, number: u64, deadline: Duration) -> Result<()> {
        self.inner().map_or(Ok(()), |inner| inner.agree(number, deadline))
    }

    /// Takes part in one collective. On the host device, this call may block the thread of the stream until all ranks
    /// are done, and the result must be complete when the call returns. On a GPU, this call only enqueues work on
    /// [`Call::stream`], and the result must be complete once the stream has passed that work. On a GPU, the call is
    /// made on the thread that calls the stepper, with the device's primary context current. Inside
    /// [`Stepper::capture`](crate::Stepper::capture) the stream is being captured. Replays of the captured graph do not
    /// call this method.
    ///
    /// # Errors
    /// `Mismatch`, `LeftPass`, `PeerLost`, `Deadline` or `Collective`. After one of these errors, the contents of the
    /// buffers and the results of later calls are unspecified. `Unsupported` for memory that the collective cannot
    /// [reach](Self::reaches).
    fn enqueue(&self, call: &mut Call<'_>) -> Result<()>;

    /// Takes part in several collectives on one stream. The collectives access different memory, and are in the same
    /// order on every rank. An implementation may start the collectives together. The default starts them one after
    /// another, and a wrapper may use the default. All ranks must start the collectives in the same way. Therefore, if
    /// you wrap a GPU's communicator on one rank, wrap it on all ranks.
    ///
    /// # Errors
    /// Errors as for [`enqueue`](Self::enqueue).
    fn enqueue_all<'a>(&self, calls: &mut dyn Iterator<Item = Call<'a>>) -> Result<()> {
        for mut call in calls {
            self.enqueue(&mut call)?;
        }
        Ok(())
    }

    /// Returns an error if a collective has failed after its `enqueue` returned. For example, another rank may be lost
    /// during a sum on a GPU. The stepper makes this call while the host waits for the device, so the call must not
    /// block. The communicator of [`cuda::Nccl::beside`](crate::cuda::Nccl::beside) makes this call on its host
    /// collective to detect failures.
    ///
    /// # Errors
    /// Errors as for [`enqueue`](Self::enqueue).
    fn check(&self) -> Result<()> {
        self.inner().map_or(Ok(()), |inner| inner.check())
    }

    /// Returns a value that is stored with a captured graph and dropped when the graph is freed, or `None` if the
    /// communicator needs no such value. Some communicators cannot be closed while a graph contains their calls. Such a
    /// communicator can count these values, and refuse to be closed while one of them exists.
    fn hold(&self) -> Option<Box<dyn Any + Send + Sync>> {
        self.inner()?.hold()
    }

    /// Ends the group: every rank's current and later calls fail with `cause`. This call must not block.
    fn abort(&self, cause: &Error);

    /// Returns the threads that all ranks of this process share for their kernels, or `None` if each stepper has its
    /// own threads.
    fn pool(&self) -> Option<crate::pool::Pool> {
        self.inner()?.pool()
    }
}
