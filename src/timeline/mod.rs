//! Measured times of a training run: the share of optimizer time that was hidden, a trace and a picture.
//!
//! Callers pass intervals that one clock has measured. Nothing here reads a clock or opens a file.

mod block;
mod canvas;
mod picture;
mod trace;

pub use block::window_of_passes;
pub use picture::draw_picture;
pub use trace::write_trace;

pub use crate::op::{Interval, TimedOp};

/// One rank's part of a timeline. Show only lanes of one process together, because clocks differ between processes.
#[derive(Clone, Copy, Debug)]
pub struct Lane<'a> {
    /// The rank.
    pub rank: u32,
    /// Operations that the rank's streams ran, with their times.
    pub ran: &'a [TimedOp],
    /// Intervals in which the rank's trainer waited.
    pub blocked: &'a [Interval],
}

/// How long one rank's optimizer worked, and for how much of this time the trainer was waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exposure {
    /// The time in which the optimizer stream worked.
    pub busy_ns: u64,
    /// The part of `busy_ns` in which the trainer was blocked.
    pub exposed_ns: u64,
}

impl Exposure {
    /// Returns the share of optimizer time that was hidden behind the trainer's own work, or `None` without optimizer
    /// time.
    pub fn hidden_share(&self) -> Option<f64> {
        (self.busy_ns > 0).then(|| 1.0 - self.exposed_ns as f64 / self.busy_ns as f64)
    }

    /// Adds another rank's times.
    pub fn add(&mut self, other: Exposure) {
        self.busy_ns += other.busy_ns;
        self.exposed_ns += other.exposed_ns;
    }
}

/// Computes the exposure. The optimizer stream worked in the intervals `busy`, and the trainer was blocked in the
/// intervals `blocked`. The intervals of each list must not overlap, and must be in ascending order.
pub fn exposure(busy: &[Interval], blocked: &[Interval]) -> Exposure {
    let sum = |all: &[Interval]| all.iter().map(Interval::ns).fold(0, u64::saturating_add);
    Exposure { busy_ns: sum(busy), exposed_ns: sum(&find_exposed(busy, blocked)) }
}

/// Returns the intervals of exposed time that [`exposure`] adds up.
fn find_exposed(busy: &[Interval], blocked: &[Interval]) -> Vec<Interval> {
    let mut exposed = Vec::new();
    let mut first = 0;
    for work in busy {
        while first < blocked.len() && blocked[first].end_ns <= work.start_ns {
            first += 1;
        }
        let waits = blocked[first..].iter().take_while(|wait| wait.start_ns < work.end_ns);
        exposed.extend(waits.filter_map(|wait| work.overlap(wait)));
    }
    exposed
}

#[cfg(test)]
#[path = "../../tests/unit/timeline.rs"]
mod tests;
