//! Vector clocks: the position of each lane when an operation was enqueued, so that two operations can be compared.
//!
//! A lane is a queue of work: a stream, or one branch of a graph. Positions on a lane count from 1. The host is not a
//! lane. It has a separate clock, which grows when a call waits for work.

/// For each lane, the last position that comes before something.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    /// Returns the last position of a lane that comes before.
    pub(crate) fn of(&self, lane: usize) -> u64 {
        self.0.get(lane).copied().unwrap_or(0)
    }

    pub(crate) fn advance(&mut self, lane: usize, position: u64) {
        if self.0.len() <= lane {
            self.0.resize(lane + 1, 0);
        }
        self.0[lane] = self.0[lane].max(position);
    }

    /// Adds everything that comes before something else.
    pub(crate) fn join(&mut self, other: &Clock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        self.0.iter_mut().zip(&other.0).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_has_what_comes_before_either() {
        let (mut first, mut second) = (Clock::default(), Clock::default());
        first.advance(0, 3);
        second.advance(2, 5);
        second.advance(0, 1);
        first.join(&second);
        assert_eq!([0, 1, 2, 3].map(|lane| first.of(lane)), [3, 0, 5, 0]);
    }
}
