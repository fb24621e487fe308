//! When things ran: measured intervals, what they say about overlap, and files that show them.
//!
//! Pure: executors hand in intervals of one clock, nothing here reads a clock or opens a file. A share is reported,
//! never judged.

mod block;
mod canvas;
mod picture;
mod trace;

pub use block::window_of_passes;
pub use picture::draw_picture;
pub use trace::write_trace;

pub use crate::op::{Interval, TimedOp};

/// One rank's part of a timeline. Lanes that are shown together are of one process, or their clocks differ.
#[derive(Clone, Copy, Debug)]
pub struct Lane<'a> {
    /// Whose.
    pub rank: u32,
    /// What its streams ran.
    pub ran: &'a [TimedOp],
    /// When its trainer stood waiting.
    pub blocked: &'a [Interval],
}

/// Time of one rank's optimizer, and how much of it the trainer stood waiting for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exposure {
    /// Optimizer stream at work.
    pub busy_ns: u64,
    /// Of that, with the trainer blocked.
    pub exposed_ns: u64,
}

impl Exposure {
    /// Share of optimizer time that was hidden behind the trainer's own work; `None` if it did nothing.
    pub fn hidden_share(&self) -> Option<f64> {
        (self.busy_ns > 0).then(|| 1.0 - self.exposed_ns as f64 / self.busy_ns as f64)
    }

    /// Adds another rank's.
    pub fn add(&mut self, other: Exposure) {
        self.busy_ns += other.busy_ns;
        self.exposed_ns += other.exposed_ns;
    }
}

/// Intersects busy and blocked intervals. Each list is disjoint and ascending, as one thread produces it.
pub fn exposure(busy: &[Interval], blocked: &[Interval]) -> Exposure {
    let exposed_ns = find_exposed(busy, blocked).iter().map(Interval::ns).sum();
    Exposure { busy_ns: busy.iter().map(Interval::ns).sum(), exposed_ns }
}

/// The stretches that [`exposure`] adds up, for whoever shows them.
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
mod tests {
    use super::*;

    #[test]
    fn exposed_time_is_the_overlap_of_work_and_waiting() {
        let intervals = |list: &[(u64, u64)]| -> Vec<Interval> {
            list.iter().map(|&(start_ns, end_ns)| Interval { start_ns, end_ns }).collect()
        };
        let busy = intervals(&[(0, 10), (20, 30), (40, 50)]);
        let blocked = intervals(&[(5, 22), (24, 26), (48, 60)]);
        let found = exposure(&busy, &blocked);
        assert_eq!((found.busy_ns, found.exposed_ns), (30, 5 + 2 + 2 + 2));
        assert_eq!(exposure(&busy, &[]).hidden_share(), Some(1.0));
        assert_eq!(exposure(&[], &blocked).hidden_share(), None);
    }
}
