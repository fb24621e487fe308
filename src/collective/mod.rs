//! The interface of a group of ranks: threads of one process, NCCL, or a [`Collective`] of the user's own.
//!
//! A [`Call`] carries everything that ranks must agree on, so an implementation can return an error where ranks differ,
//! instead of hanging. The sum is a plain sum: the step's launch applies the factor of the mean. This file declares
//! unsafe functions and calls them only to forward a promise.
#![allow(unsafe_code)]

pub mod conformance;
mod key;

use std::any::Any;
use std::sync::Arc;
use std::{fmt, time::Duration};

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::{Place, StreamHandle};
use crate::layout::Plan;
pub use crate::op::CollectiveKind;
pub use key::CallKey;

/// One collective call of one rank.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Which collective.
    pub kind: CollectiveKind,
    /// The pass it belongs to, counted from the stepper's first.
    pub pass: u64,
    /// The bucket it belongs to, if any.
    pub bucket: Option<u32>,
    /// Element type, which says nothing of whole numbers.
    pub dtype: DType,
    /// The source, aligned to 64 bytes, or to the element in memory that the stepper has borrowed and in counts of ranks.
    pub src: *const u8,
    /// The destination. It may equal `src`; of a reduce-scatter it may be this rank's part of the source, and of an
    /// all-gather the source may be this rank's part of it.
    pub dst: *mut u8,
    /// Length of the longer one: [`src_bytes`](Self::src_bytes) and [`dst_bytes`](Self::dst_bytes) say how long each is.
    /// Of gradients and parameters in the stepper's own memory a multiple of world_size x 256 elements, unless a
    /// [hook](crate::overlap::Hooked) asks for it; counts of ranks have any length.
    pub bytes: u64,
    /// One number for layout, options, hyperparameters and frozen parameters; [`difference`](crate::op::difference) says
    /// what two of them differ in.
    pub agreement: u64,
    /// Longest wait for the other ranks.
    pub deadline: Duration,
    /// On a GPU, the stream to enqueue on; on the host device, which calls from the stream's own thread, nothing.
    pub stream: StreamHandle,
}

// SAFETY: addresses and numbers. Only an unsafe call follows the addresses, by the promise of its caller.
unsafe impl Send for Call {}
// SAFETY: as above.
unsafe impl Sync for Call {}

pub(crate) fn refused_kind(kind: CollectiveKind) -> Error {
    let remedy = "use Strategy::Replicated, or a collective that knows it";
    Error::unsupported(kind, "this collective cannot make one", remedy)
}

/// Makes a call about host memory: `source`, or else `target` in place. The rest is as `like` says.
pub(crate) fn enqueue_bytes(
    comm: &dyn Collective,
    like: &Call,
    source: Option<&mut [u8]>,
    target: &mut [u8],
) -> Result<()> {
    let (ranks, rank) = (comm.world_size(), comm.rank() as usize);
    let lengths = [source.as_ref().map_or(target.len(), |source| source.len()), target.len()];
    let bytes = lengths[0].max(lengths[1]);
    let call = Call { bytes: bytes as u64, stream: StreamHandle::default(), ..*like };
    let [src_bytes, dst_bytes] = [call.src_bytes(ranks) as usize, call.dst_bytes(ranks) as usize];
    let call = match source {
        Some(source) => {
            assert!(lengths == [src_bytes, dst_bytes], "{lengths:?} bytes for {}", call.key());
            Call { src: source.as_ptr(), dst: target.as_mut_ptr(), ..call }
        }
        None => {
            let whole = target.as_mut_ptr();
            // The shorter of the two is this rank's part of the longer one.
            let [src, dst] = [src_bytes, dst_bytes]
                .map(|len| whole.wrapping_add(if len < bytes { rank * len } else { 0 }));
            Call { src, dst, ..call }
        }
    };
    // SAFETY: both are that long, and borrowed mutably until the call returns. Without a stream it has ended by then.
    unsafe { comm.enqueue(&call) }
}

/// Memory that a communicator has made for the buffers that it reduces, so that it can reach them faster.
pub struct Allocation {
    pub(crate) address: *mut u8,
    _owner: Box<dyn Any + Send + Sync>,
}

impl Allocation {
    /// Wraps memory whose first byte is at `address`, aligned to 256 bytes, with arbitrary contents; dropping `owner`
    /// gives it back.
    ///
    /// # Safety
    /// As many bytes as were asked for, of a device that the communicator reaches, are valid until `owner` is dropped,
    /// and nothing but the stepper's ops touches them.
    pub unsafe fn new(address: *mut u8, owner: Box<dyn Any + Send + Sync>) -> Allocation {
        Allocation { address, _owner: owner }
    }

    /// Returns the first byte.
    pub fn address(&self) -> *mut u8 {
        self.address
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Call {
    /// Returns what must be equal on all ranks.
    pub fn key(&self) -> CallKey {
        let Call { kind, pass, bucket, dtype, bytes, agreement, .. } = *self;
        CallKey { kind, pass, bucket, dtype, bytes, agreement }
    }

    /// Returns the length of the source, in a group of so many ranks.
    pub fn src_bytes(&self, world_size: u32) -> u64 {
        if self.kind == CollectiveKind::AllGather { self.bytes / u64::from(world_size) } else { self.bytes }
    }

    /// Returns the length of the destination.
    pub fn dst_bytes(&self, world_size: u32) -> u64 {
        if self.kind == CollectiveKind::ReduceScatter {
            self.bytes / u64::from(world_size)
        } else {
            self.bytes
        }
    }

    /// Returns the error of a collective that does not [know](Collective::knows) the kind of this call.
    pub fn unknown_kind(&self) -> Error {
        refused_kind(self.kind)
    }

    /// Returns whether two ranks' calls belong together.
    pub fn agrees_with(&self, other: &Call) -> bool {
        self.key() == other.key()
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.key().fmt(f)
    }
}

/// A group of ranks, as one of them sees it. The crate brings ranks that are threads of one process
/// ([`in_process`](crate::in_process)), one that is fed sums ([`Solo`](crate::Solo)), processes with a GPU each
/// ([`cuda::Nccl`](crate::cuda::Nccl)) and a framework's own all-reduce, on the
/// host ([`External`](crate::External)) and on a GPU ([`cuda::External`](crate::cuda::External)); with feature `mpi`, processes on the host. An implementation of your own
/// reaches others, and [`conformance::check`] tests it; `examples/tcp_ranks` is one over TCP.
///
/// Sums are plain sums: the mean's factor is folded into the step. Every rank must receive the same bits, or parameters
/// drift apart. A call that differs from the other ranks' ([`Call::key`]) should be a [`mismatch`](CallKey::mismatch), not a
/// hang; a kind that an implementation does not know is `Unsupported`.
///
/// # Ordering
/// Calls of one rank come from one thread at a time, in the same order on every rank unless
/// [`keeps_order`](Self::keeps_order) says otherwise.
pub trait Collective: Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> u32;

    /// Number of ranks whose gradients are summed.
    fn world_size(&self) -> u32;

    /// Whether it can sum buffers that lie there. A stepper is refused where its device's memory is out of reach.
    fn reaches(&self, place: Place) -> bool {
        place == Place::Host
    }

    /// Whether it sums elements of this type. Steppers' gradients are f32 unless their
    /// [precision](crate::StepperBuilder::precision) says otherwise, and [`Compressed`](crate::overlap::Compressed)
    /// sends others: both are refused where those would be taken for f32.
    fn sums(&self, dtype: DType) -> bool {
        dtype == DType::F32
    }

    /// Whether it makes calls of this kind. All-reduce and broadcast are all that
    /// [`Strategy::Replicated`](crate::Strategy) needs; a stepper with another strategy is refused where a kind is unknown.
    fn knows(&self, kind: CollectiveKind) -> bool {
        matches!(kind, CollectiveKind::AllReduce | CollectiveKind::Broadcast)
    }

    /// Makes another communicator of the same ranks, whose calls have an order of their own: all-gathers of stepped
    /// parameters go beside the next bucket's sum. Every rank calls it at the same point, once for each stepper that is
    /// not [replicated](crate::Strategy). After a failure of one, both are aborted.
    ///
    /// # Errors
    /// `Unsupported` unless an implementation says otherwise; else as for [`enqueue`](Self::enqueue).
    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        let remedy = "use Strategy::Replicated, or a collective that can";
        Err(Error::unsupported("collective", "cannot make a second communicator of its ranks", remedy))
    }

    /// Whether another library makes the sums, and holds gradients before a bucket is handed over. The stepper then
    /// writes no gradient before its step, so every gradient of a pass must have been asked for. No counts of ranks come
    /// with such sums, so steppers need [`Unused::Refuse`](crate::Unused) or [`Unused::StepZero`](crate::Unused).
    fn sums_outside(&self) -> bool {
        false
    }

    /// Whether its calls must come in the order of the buckets, which is the same on every rank. One that sends nothing says
    /// no; each bucket then launches once it is complete, so it may be handed over in any order.
    fn keeps_order(&self) -> bool {
        true
    }

    /// Told of the buckets that a stepper has cut, before any call for them: when it is built, and again should it ever
    /// cut them anew. Lets an implementation size its buffers, or reject the plan.
    ///
    /// # Errors
    /// The reason why the buckets cannot be served; the stepper is refused with it.
    fn prepare(&self, plan: &Plan) -> Result<()> {
        let _ = plan;
        Ok(())
    }

    /// Memory of its own for `bytes` of gradients on a GPU, or `None` if the device's own serves it as well.
    ///
    /// # Errors
    /// `Device` or `Collective` if there is none left.
    fn allocate(&self, bytes: u64) -> Result<Option<Allocation>> {
        let _ = bytes;
        Ok(None)
    }

    /// Compares a number with the other ranks': on a GPU when a stepper is built, and in a pass that broadcasts
    /// parameters which were written. Ranks that differ get an error then, where it could be a hang later. In-process
    /// ranks compare it at every call instead.
    ///
    /// # Errors
    /// `Mismatch`, `PeerLost` or `Deadline`.
    fn agree(&self, number: u64, deadline: Duration) -> Result<()> {
        let _ = (number, deadline);
        Ok(())
    }

    /// Takes part in one collective. On the host device this may block the calling stream's thread until all ranks are
    /// through, and the result is there when it returns. On a GPU it only enqueues on [`Call::stream`], on the thread
    /// that called the stepper, with the device's primary context current, and the result is there when the stream has
    /// passed it. In [`Stepper::capture`](crate::Stepper::capture) that stream is being captured; replays do not come
    /// here.
    ///
    /// # Errors
    /// `Mismatch`, `LeftPass`, `PeerLost`, `Deadline` or `Collective`; the buffer's content is then unspecified, and so is every
    /// later call.
    ///
    /// # Safety
    /// `src` and `dst` are valid for their lengths, and nothing else touches them, until the call returns; on a GPU,
    /// until the stream has passed it.
    unsafe fn enqueue(&self, call: &Call) -> Result<()>;

    /// Reports what has gone wrong since `enqueue` returned: on a GPU, a peer may be lost while a sum is under way.
    /// Asked while the host waits; must not block.
    ///
    /// # Errors
    /// Errors as for [`enqueue`](Self::enqueue).
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Returns a hold, which a captured pass keeps until its graph has been freed; `None` if graphs need none. A
    /// communicator that cannot end while a graph has its calls counts them, and refuses to be closed.
    fn hold(&self) -> Option<Box<dyn Any + Send + Sync>> {
        None
    }

    /// Ends the group: every rank's current and later calls fail with the cause. This must not block.
    fn abort(&self, cause: &Error);

    /// Threads that all ranks of this process share for their kernels; `None`: each stepper has its own.
    fn pool(&self) -> Option<crate::pool::Pool> {
        None
    }
}

/// A communicator that is chosen at run time.
impl<C: Collective + ?Sized> Collective for Box<C> {
    fn rank(&self) -> u32 {
        (**self).rank()
    }

    fn world_size(&self) -> u32 {
        (**self).world_size()
    }

    fn reaches(&self, place: Place) -> bool {
        (**self).reaches(place)
    }

    fn sums(&self, dtype: DType) -> bool {
        (**self).sums(dtype)
    }

    fn knows(&self, kind: CollectiveKind) -> bool {
        (**self).knows(kind)
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        (**self).duplicate()
    }

    fn sums_outside(&self) -> bool {
        (**self).sums_outside()
    }

    fn keeps_order(&self) -> bool {
        (**self).keeps_order()
    }

    fn prepare(&self, plan: &Plan) -> Result<()> {
        (**self).prepare(plan)
    }

    fn allocate(&self, bytes: u64) -> Result<Option<Allocation>> {
        (**self).allocate(bytes)
    }

    fn agree(&self, number: u64, deadline: Duration) -> Result<()> {
        (**self).agree(number, deadline)
    }

    unsafe fn enqueue(&self, call: &Call) -> Result<()> {
        // SAFETY: the caller's promise, passed on.
        unsafe { (**self).enqueue(call) }
    }

    fn check(&self) -> Result<()> {
        (**self).check()
    }

    fn hold(&self) -> Option<Box<dyn Any + Send + Sync>> {
        (**self).hold()
    }

    fn abort(&self, cause: &Error) {
        (**self).abort(cause);
    }

    fn pool(&self) -> Option<crate::pool::Pool> {
        (**self).pool()
    }
}
