//! The history of each byte of an allocation: who wrote it last, and who has read it since.
//!
//! It is a list of ranges whose bytes have the same history, so a copy of many bytes is one entry. It is pure data: it
//! compares clocks and knows no stream, kernel or context.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::clock::Clock;

/// An operation that touched memory: its lane, its position there, and its name for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Touch {
    pub(crate) lane: usize,
    pub(crate) position: u64,
    pub(crate) name: Arc<str>,
}

impl Touch {
    /// Returns whether an operation with this clock comes after the touch.
    fn comes_before(&self, clock: &Clock) -> bool {
        clock.of(self.lane) >= self.position
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Two accesses of one range that nothing orders.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Conflict {
    pub(crate) range: Range<u64>,
    pub(crate) earlier: Touch,
    pub(crate) earlier_access: Access,
}

#[derive(Clone, PartialEq, Eq)]
struct History {
    /// Whether the bytes have a value.
    written: bool,
    writer: Option<Touch>,
    /// The last reader of each lane since the write.
    readers: Vec<Touch>,
}

/// The history of one allocation; offsets count from its start.
pub(crate) struct Shadow {
    /// The ranges by first offset: the end, and the history of the bytes.
    ranges: BTreeMap<u64, (u64, History)>,
}

impl Shadow {
    /// Returns the history of new memory. Either the host has written it, or nobody has.
    pub(crate) fn new(bytes: u64, written: bool) -> Shadow {
        let history = History { written, writer: None, readers: Vec::new() };
        Shadow { ranges: (bytes > 0).then_some((0, (bytes, history))).into_iter().collect() }
    }

    /// Records an access by an operation with this clock.
    ///
    /// # Errors
    /// The first range that another operation touches at the same time.
    pub(crate) fn touch(
        &mut self,
        range: Range<u64>,
        access: Access,
        by: &Touch,
        clock: &Clock,
    ) -> Result<(), Conflict> {
        self.split(range.start);
        self.split(range.end);
        for (start, (end, history)) in self.ranges.range_mut(range.clone()) {
            let conflict = |earlier: &Touch, earlier_access| {
                Err(Conflict { range: *start..*end, earlier: earlier.clone(), earlier_access })
            };
            if let Some(writer) = history.writer.as_ref().filter(|writer| !writer.comes_before(clock)) {
                return conflict(writer, Access::Write);
            }
            if access == Access::Read {
                history.readers.retain(|reader| !reader.comes_before(clock));
                history.readers.push(by.clone());
                continue;
            }
            if let Some(reader) = history.readers.iter().find(|reader| !reader.comes_before(clock)) {
                return conflict(reader, Access::Read);
            }
            *history = History { written: true, writer: Some(by.clone()), readers: Vec::new() };
        }
        self.merge(range);
        Ok(())
    }

    /// Returns the parts of a range that nobody has written.
    pub(crate) fn unwritten(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let parts = self.ranges.range(..range.end).rev().take_while(|(_, (end, _))| *end > range.start);
        let parts = parts.filter(|(_, (_, history))| !history.written);
        let mut parts: Vec<_> =
            parts.map(|(start, (end, _))| (*start).max(range.start)..(*end).min(range.end)).collect();
        parts.reverse();
        parts
    }

    /// Marks a range as memory without a value, as after an allocation, or after a copy of such memory.
    pub(crate) fn set_unwritten(&mut self, range: Range<u64>) {
        self.split(range.start);
        self.split(range.end);
        self.ranges.range_mut(range).for_each(|(_, (_, history))| history.written = false);
    }

    fn split(&mut self, at: u64) {
        let Some((start, (end, history))) = self.ranges.range_mut(..at).next_back() else { return };
        if *start < at && at < *end {
            let rest = (*end, history.clone());
            *end = at;
            self.ranges.insert(at, rest);
        }
    }

    /// Joins neighbouring ranges in and beside a range if they have the same history.
    fn merge(&mut self, range: Range<u64>) {
        let first = self.ranges.range(..range.start).next_back().map_or(range.start, |(start, _)| *start);
        let starts: Vec<u64> = self.ranges.range(first..=range.end).map(|(start, _)| *start).collect();
        let mut kept = first;
        for start in starts.into_iter().skip(1) {
            let same = self.ranges[&kept].0 == start && self.ranges[&kept].1 == self.ranges[&start].1;
            if !same {
                kept = start;
            } else if let Some((end, _)) = self.ranges.remove(&start) {
                self.ranges.entry(kept).and_modify(|row| row.0 = end);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(lane: usize, position: u64) -> Touch {
        Touch { lane, position, name: "".into() }
    }

    fn clock(positions: &[u64]) -> Clock {
        let mut clock = Clock::default();
        positions.iter().enumerate().for_each(|(lane, position)| clock.advance(lane, *position));
        clock
    }

    #[test]
    fn two_writes_that_nothing_orders_are_a_conflict_where_they_overlap() {
        let mut shadow = Shadow::new(100, false);
        shadow.touch(10..50, Access::Write, &touch(0, 1), &clock(&[1])).unwrap();
        shadow.touch(50..90, Access::Write, &touch(1, 1), &clock(&[0, 1])).unwrap();
        let conflict = shadow.touch(40..60, Access::Write, &touch(1, 2), &clock(&[0, 2])).unwrap_err();
        assert_eq!((conflict.range, conflict.earlier), (40..50, touch(0, 1)));
        shadow.touch(40..60, Access::Write, &touch(1, 3), &clock(&[1, 3])).unwrap();
    }

    #[test]
    fn reads_of_two_lanes_agree_and_a_write_waits_for_both() {
        let mut shadow = Shadow::new(8, true);
        shadow.touch(0..8, Access::Read, &touch(0, 1), &clock(&[1])).unwrap();
        shadow.touch(0..8, Access::Read, &touch(1, 1), &clock(&[0, 1])).unwrap();
        let conflict = shadow.touch(0..4, Access::Write, &touch(1, 2), &clock(&[0, 2])).unwrap_err();
        assert_eq!(conflict.earlier_access, Access::Read);
        shadow.touch(0..4, Access::Write, &touch(1, 3), &clock(&[1, 3])).unwrap();
    }

    #[test]
    fn bytes_without_a_value_are_told_until_they_are_written() {
        let mut shadow = Shadow::new(100, false);
        shadow.touch(20..30, Access::Write, &touch(0, 1), &clock(&[1])).unwrap();
        assert_eq!(shadow.unwritten(0..100), [0..20, 30..100]);
        assert_eq!(shadow.unwritten(22..28), []);
        shadow.set_unwritten(25..26);
        assert_eq!(shadow.unwritten(22..28), vec![25..26; 1]);
    }

    #[test]
    fn neighbours_with_one_history_become_one_range() {
        let mut shadow = Shadow::new(100, false);
        for start in (0..100).step_by(10) {
            shadow.touch(start..start + 10, Access::Write, &touch(0, 1), &clock(&[1])).unwrap();
        }
        assert_eq!(shadow.ranges.len(), 1);
    }
}
