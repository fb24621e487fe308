//! The interface of a device: [`Device`] runs ops, [`Executor`] is what the stepper alone asks of one.
//!
//! `Executor` is private, so the crate's two devices are the only ones. Each keeps what the checker assumes: ops of a
//! stream run in order, a wait ends after its record, addresses come from `Op::accesses`. A device never decides when an
//! op runs; the schedule does. Access to a device's memory takes a [`Claimed`], and making one is `unsafe`.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::abi::{InstepControl, InstepStatus};
use crate::error::{Error, Result};
use crate::handle::Place;
use crate::launch::{Assignment, BorrowedPieces, Progress, Settings};
use crate::layout::Plan;
use crate::op::{Interval, Memory, Op, Span, Ticket, TimedOp, Words};

/// An executor of ops.
pub trait Device: Executor {
    /// Queues each op after the earlier ones of its stream, without waiting for them. Once an op has failed, later ones
    /// are skipped (on the host device Records excepted, so that no wait can hang) and [`wait`](Device::wait) reports
    /// it. Waits of the compute stream do not come here, but to [`wait`](Device::wait).
    ///
    /// `sum` says when the caller's sum is there, for which an op of these [waits](crate::op::Action::AwaitSum).
    fn submit(&mut self, ops: &[Op], sum: Option<Self::Sum>);

    /// Orders the trainer's next work after the ticket's position: the calling thread waits on the host device, the
    /// trainer's stream on a GPU.
    ///
    /// # Errors
    /// `Poisoned` if any op has failed by then.
    fn wait(&mut self, ticket: Ticket) -> Result<()>;

    /// Blocks the calling thread until the trainer's stream has passed all that it has been given; nothing to do on the
    /// host device, where the trainer is that thread.
    ///
    /// # Errors
    /// Errors as for [`wait`](Device::wait).
    fn synchronize(&mut self) -> Result<()>;

    /// Blocks until every op has ended or been skipped. Nothing may be submitted afterwards.
    ///
    /// # Errors
    /// Errors as for [`wait`](Device::wait); a GPU tells of some failures only now.
    fn end(&mut self) -> Result<()>;

    /// Now, on the clock that measured ops use, in nanoseconds.
    fn now_ns(&self) -> u64;
}

/// The promise that memory is the caller's for one access.
#[derive(Debug)]
pub struct Claimed(());

impl Claimed {
    /// Makes the promise.
    ///
    /// # Safety
    /// The schedule has been told of the access, and the waits that it wrote have been paid, so that no op that runs or is
    /// still to run touches the same bytes. What is rebound has the plan's offsets and lengths.
    pub(crate) unsafe fn promise() -> Claimed {
        Claimed(())
    }
}

/// The stepper's private interface to a device: memory, settings, records and measured times. It keeps [`Device`]
/// sealed.
pub trait Executor {
    /// Whether the trainer is a stream, and not the calling thread: it touches memory long after the calls that
    /// announce it.
    const TRAINER_IS_A_STREAM: bool;

    /// The proof that the caller's sum of a bucket is complete: an event on a GPU.
    type Sum;

    /// Returns the place of its memory.
    fn place(&self) -> Place;

    /// Compares a number with the other ranks', where their collectives do not compare it at each call.
    ///
    /// # Errors
    /// Errors as for [`Collective::agree`](crate::Collective::agree).
    fn agree(&self, number: u64) -> Result<()>;

    /// The first byte of a span, in the device's memory.
    fn resolve(&self, span: Span) -> *mut u8;

    /// Returns the size of each memory in bytes.
    fn sizes(&self) -> Vec<(Memory, u64)>;

    /// Replaces the settings, which the next Begin reads.
    fn write_settings(&mut self, settings: &Settings, claimed: Claimed);

    /// Says how far a record has come.
    ///
    /// # Errors
    /// Errors as for [`Device::wait`].
    fn write_progress(&mut self, record: usize, progress: Progress, claimed: Claimed) -> Result<()>;

    /// Returns the progress of a record.
    ///
    /// # Errors
    /// Errors as for [`Device::wait`].
    fn read_progress(&mut self, record: usize, claimed: Claimed) -> Result<Progress>;

    /// A copy of the control block.
    ///
    /// # Errors
    /// Errors as for [`Device::wait`].
    fn read_control(&mut self, claimed: Claimed) -> Result<InstepControl>;

    /// Returns whether a failure has left a bucket with this rank's part of a step, and without the other ranks' parts.
    fn is_partly_gathered(&self, _bucket: u32) -> bool {
        false
    }

    /// The status of the newest pass that has been published whole, without waiting.
    fn latest(&self) -> Option<InstepStatus>;

    /// Copies a span to the host, whose length it has.
    ///
    /// # Errors
    /// Errors as for [`Device::wait`].
    fn read(&mut self, span: Span, into: &mut [u8], claimed: Claimed) -> Result<()>;

    /// Copies to a span from the host.
    ///
    /// # Errors
    /// Errors as for [`Device::wait`].
    fn write(&mut self, span: Span, from: &[u8], claimed: Claimed) -> Result<()>;

    /// Takes the caller's tensors at other addresses, after a claim on all tensors and on control memory. On a GPU it does not wait for the launches that read the old ones.
    ///
    /// # Errors
    /// `Layout` if a tensor is out of the device's reach, and then nothing has changed; else as for [`Device::wait`].
    fn rebind(&mut self, pieces: BorrowedPieces, claimed: Claimed) -> Result<()>;

    /// Builds a device of the same parts for another plan or other optimizers. Its own tensors and counts are zeros, and
    /// the control block's results of passes are kept. This device stays as it is in every case. `words` are those of
    /// the new agreement.
    ///
    /// # Errors
    /// As the builder's; `Mismatch`, if ranks compare it, where another rank has failed.
    fn rebuilt(
        &mut self,
        plan: &Arc<Plan>,
        assignment: &Arc<Assignment>,
        borrowed: Option<BorrowedPieces>,
        words: &Arc<Words>,
        claimed: Claimed,
    ) -> Result<Self>
    where
        Self: Sized;

    /// The ops that have ended since the last call, if the device measures.
    ///
    /// # Errors
    /// Errors as for [`Device::wait`].
    fn take_timed_ops(&mut self) -> Result<Vec<TimedOp>>;

    /// When the trainer's stream stood still since the last call, if the device measures and the trainer is a stream: a
    /// thread that waits is timed by who waits.
    ///
    /// # Errors
    /// Errors as for [`Device::wait`].
    fn take_stalls(&mut self) -> Result<Vec<Interval>>;
}

/// Refuses to step a bucket of whose sum by the caller nothing says that it is there.
pub(crate) fn unknown_sum(bucket: u32) -> Error {
    let thing = format_args!("sum of bucket {bucket}");
    Error::order(thing, "nothing says when it is there", "call bucket_ready_after")
}
