//! The interface of a device: [`Device`] runs ops, and [`Executor`] has the calls that only the stepper makes.
//!
//! `Executor` is private, so no other crate can add a device. Each device guarantees what the checker assumes: ops of a
//! stream run in order, a `Wait` ends after the `Record` of its ticket, and an op touches only the memory that
//! `Op::accesses` lists. The schedule, not the device, decides when an op runs. Every access to a device's memory
//! requires a [`Claimed`] value, which only `unsafe` code can make.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::abi::{InstepControl, InstepStatus};
use crate::collective::Comms;
use crate::error::{Error, Result};
use crate::handle::Place;
use crate::launch::{Assignment, BorrowedPieces, Progress, Settings};
use crate::layout::Plan;
use crate::op::{Interval, Memory, Op, Span, Ticket, TimedOp, Words};

/// A device that runs ops.
pub trait Device: Executor {
    /// Queues each op after the earlier ops of its stream, without waiting for those ops. Once an op has failed, later
    /// ops are skipped and [`wait`](Device::wait) reports the failure. (The host device still runs `Record` ops, so no
    /// wait can hang.) A `Wait` op on the compute stream is not submitted here, because the stepper calls
    /// [`wait`](Device::wait) instead.
    ///
    /// If one of these ops [waits](crate::op::Action::AwaitSum) for the caller's sum, `sum` reports when that sum is
    /// complete.
    fn submit(&mut self, ops: &[Op], sum: Option<Self::Sum>);

    /// Orders the trainer's next work after the ticket's position. On the host device the calling thread waits. On a
    /// GPU the trainer's stream waits.
    ///
    /// # Errors
    /// `Poisoned` if any op has failed by then.
    fn wait(&mut self, ticket: Ticket) -> Result<()>;

    /// Blocks the calling thread until the trainer's stream has run all its work. Does nothing if the trainer is the
    /// calling thread.
    ///
    /// # Errors
    /// Errors as for [`wait`](Device::wait).
    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }

    /// Blocks until every op has ended or been skipped. Nothing may be submitted afterwards.
    ///
    /// # Errors
    /// `Poisoned` if any op has failed. On a GPU, this call may be the first that reports a failure.
    fn end(&mut self) -> Result<()>;

    /// Returns the current time in nanoseconds, on the clock that times ops.
    fn now_ns(&self) -> u64;
}

/// The parts from which a device is built.
pub(crate) struct Blueprint {
    pub(crate) plan: Arc<Plan>,
    pub(crate) assignment: Arc<Assignment>,
    pub(crate) comms: Comms,
    pub(crate) borrowed: Option<BorrowedPieces>,
    /// Whether the device measures the times of ops.
    pub(crate) timed: bool,
}

/// The caller's promise about one access to memory: during the access, no op touches the same bytes.
#[derive(Debug)]
pub struct Claimed(());

impl Claimed {
    /// Makes the promise.
    ///
    /// # Safety
    /// The access was announced to the schedule, and the waits for it have ended. No op that is running, or was
    /// submitted, touches the same bytes. If the access rebinds memory, the new memory has the plan's offsets and
    /// lengths.
    pub(crate) unsafe fn promise() -> Claimed {
        Claimed(())
    }
}

/// The stepper's private interface to a device: memory, settings, records and measured times. It seals [`Device`].
pub trait Executor {
    /// Whether the trainer is a stream and not the calling thread. A stream touches memory long after the call that
    /// announces the access.
    const TRAINER_IS_A_STREAM: bool;

    /// A value that reports when the caller's sum of a bucket is complete. On a GPU, this is an event.
    type Sum;

    /// Returns where the device's memory lies.
    fn place(&self) -> Place;

    /// Compares this rank's number with the numbers of the other ranks, and returns an error if they differ. Each rank
    /// computes its number from the values that must be equal on all ranks. The default does nothing, because each
    /// collective of host ranks compares this number.
    ///
    /// # Errors
    /// Errors as for [`Collective::agree`](crate::Collective::agree).
    fn agree(&self, _number: u64) -> Result<()> {
        Ok(())
    }

    /// Returns the address of a span's first byte in the device's memory.
    fn resolve(&self, span: Span) -> *mut u8;

    /// Returns the size in bytes of each [`Memory`].
    fn sizes(&self) -> Vec<(Memory, u64)>;

    /// Replaces the settings, which the next Begin reads.
    fn write_settings(&mut self, settings: &Settings, claimed: Claimed);

    /// Sets the progress of a record.
    ///
    /// # Errors
    /// Errors as for [`Device::wait`].
    fn write_progress(&mut self, record: usize, progress: Progress, claimed: Claimed) -> Result<()>;

    /// Returns the progress of a record.
    ///
    /// # Errors
    /// Errors as for [`Device::wait`].
    fn read_progress(&mut self, record: usize, claimed: Claimed) -> Result<Progress>;

    /// Returns a copy of the control block.
    ///
    /// # Errors
    /// Errors as for [`Device::wait`].
    fn read_control(&mut self, claimed: Claimed) -> Result<InstepControl>;

    /// Returns whether a failure occurred after a bucket's step and before its all-gather, so that only this rank's
    /// shard is stepped.
    fn is_partly_gathered(&self, _bucket: u32) -> bool {
        false
    }

    /// Returns the newest status that has been published completely. Never waits.
    fn latest(&self) -> Option<InstepStatus>;

    /// Copies a span to the host. `into` is as long as the span.
    ///
    /// # Errors
    /// Errors as for [`Device::wait`].
    fn read(&mut self, span: Span, into: &mut [u8], claimed: Claimed) -> Result<()>;

    /// Copies the host's bytes `from` to a span. `from` is as long as the span.
    ///
    /// # Errors
    /// Errors as for [`Device::wait`].
    fn write(&mut self, span: Span, from: &[u8], claimed: Claimed) -> Result<()>;

    /// Replaces the addresses of the caller's tensors. The caller has claimed all tensors and control memory. On a GPU,
    /// this call does not wait for the launches that read the old addresses.
    ///
    /// # Errors
    /// `Layout` if the device cannot reach a tensor. Nothing has changed then. `Poisoned` if any op has failed.
    fn rebind(&mut self, pieces: BorrowedPieces, claimed: Claimed) -> Result<()>;

    /// Builds a device for another plan or other optimizers, with this device's driver or threads. The new device's own
    /// tensors and counts are zeros. The new device's control block has a copy of this device's pass results. This
    /// device does not change. `words` is the text of the new agreement.
    ///
    /// # Errors
    /// Errors as for the builder. `Mismatch` if the ranks compare their results and this call has failed on another
    /// rank.
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

    /// Returns the ops that have ended since this function was last called, with their times. The list is empty unless
    /// the device measures times.
    ///
    /// # Errors
    /// Errors as for [`Device::wait`].
    fn take_timed_ops(&mut self) -> Result<Vec<TimedOp>>;

    /// Returns the intervals in which the trainer's stream has waited since this function was last called. The list is
    /// empty unless the device measures times and the trainer is a stream. If the trainer is a thread, the code that
    /// waits measures the time.
    ///
    /// # Errors
    /// Errors as for [`Device::wait`].
    fn take_stalls(&mut self) -> Result<Vec<Interval>> {
        Ok(Vec::new())
    }
}

/// Returns the error for a bucket that the caller sums but hands over without an event. Without an event, the device
/// cannot know when the sum is complete.
pub(crate) fn unknown_sum(bucket: u32) -> Error {
    let thing = format_args!("sum of bucket {bucket}");
    Error::order(thing, "nothing says when it is there", "call bucket_ready_after")
}
