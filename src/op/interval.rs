//! When an op ran: what a device measures, and the timeline draws.
//!
//! Each device has its own clock, so only the zero of times is defined here.

use crate::op::Op;

/// A stretch of time on one clock, in nanoseconds since the first stepper of the process was built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    /// Start.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
}

impl Interval {
    /// Its length.
    pub fn ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    /// Returns the part that lies in both, if they overlap.
    pub fn overlap(&self, other: &Interval) -> Option<Interval> {
        let (start_ns, end_ns) = (self.start_ns.max(other.start_ns), self.end_ns.min(other.end_ns));
        (start_ns < end_ns).then_some(Interval { start_ns, end_ns })
    }
}

/// An op that ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOp {
    /// Which one.
    pub op: Op,
    /// When.
    pub interval: Interval,
}
