//! The seam for execution: a device is whatever runs an `Op`.
//!
//! Few methods, sealed, because an executor must honour what the checker assumes: ops of a stream in order, a wait
//! after its record, pointers from `Op::accesses`. Must never decide what runs when; that is the schedule's.

use crate::error::Result;
use crate::op::{Op, Ticket};

/// Keeps [`Device`] closed.
pub trait Sealed {}

/// An executor of ops.
pub trait Device: Sealed {
    /// Queues each op behind the earlier ones of its stream. Does not wait for them. Once an op has failed, later
    /// ones are skipped (Records excepted, so that no wait can hang) and [`wait`](Device::wait) reports it.
    fn submit(&mut self, ops: &[Op]);

    /// Blocks the calling thread until the ticket's position has been passed.
    ///
    /// # Errors
    /// `Poisoned` if any op has failed by then.
    fn wait(&mut self, ticket: Ticket) -> Result<()>;

    /// Blocks until every op has ended or been skipped. Nothing may be submitted afterwards.
    fn end(&mut self);

    /// Now, on the clock that measured ops use, in nanoseconds.
    fn now_ns(&self) -> u64;
}
