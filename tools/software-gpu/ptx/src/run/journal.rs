//! The accesses of a launch to global memory, and the check whether two of them race.
//!
//! Blocks run one after the other here, so a race may not change a bit. Two accesses race if they share a byte, one
//! writes, not both are atomic, and no barrier of their block, nor of their warp, lies between. Two stores of the same
//! value are allowed, because in any order they give the same bits. All accesses are compared when the launch is done.

use super::registers::LANES;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    Atomic,
}

/// Lanes of a warp, from `lane` on, that touch consecutive places of `each` bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub start: u64,
    pub bytes: u32,
    pub each: u32,
    pub kind: Kind,
    /// Whether all lanes of the instruction touch the same place.
    pub for_all: bool,
    pub lane: u8,
    pub warp: u8,
    pub block: u32,
    pub barriers: u32,
    pub warp_barriers: u32,
    pub line: u32,
    /// The position in the journal of the values that a store wrote.
    pub data: usize,
}

impl Record {
    fn end(&self) -> u64 {
        self.start + u64::from(self.bytes)
    }

    /// Returns the lane that touches a byte, if it is a single lane.
    fn lane_at(&self, address: u64) -> Option<u64> {
        (!self.for_all).then(|| u64::from(self.lane) + (address - self.start) / u64::from(self.each))
    }

    /// Returns the number of a thread in its block, for messages.
    pub(super) fn thread(&self, address: u64) -> u32 {
        u32::from(self.warp) * LANES as u32 + self.lane_at(address).unwrap_or(self.lane.into()) as u32
    }

    /// Returns the first byte at which this access and another one race.
    fn races_at(&self, other: &Record, stored: &[u8]) -> Option<u64> {
        let (start, end) = (self.start.max(other.start), self.end().min(other.end()));
        if start >= end || self.kind == Kind::Atomic && other.kind == Kind::Atomic {
            return None;
        }
        let both_write = self.kind == Kind::Write && other.kind == Kind::Write;
        let value = |record: &Record, at: u64| stored[record.data + (at - record.start) as usize];
        let differ = |at: &u64| !both_write || value(self, *at) != value(other, *at);
        let is_same_thread =
            |at: &u64| self.lane_at(*at).is_some() && self.lane_at(*at) == other.lane_at(*at);
        if self.block == other.block {
            if self.barriers != other.barriers {
                return None;
            }
            if self.warp == other.warp {
                let is_ordered = self.warp_barriers != other.warp_barriers;
                return (start..end).find(|at| !is_ordered && !is_same_thread(at) && differ(at));
            }
        }
        (start..end).find(differ)
    }
}

#[derive(Debug, Default)]
pub(super) struct Journal {
    reads: Vec<Record>,
    writes: Vec<Record>,
    atomics: Vec<Record>,
    stored: Vec<u8>,
}

impl Journal {
    /// Adds an access, and its values if it is a store.
    pub(super) fn note(&mut self, mut record: Record, stored: &[u8]) {
        record.data = self.stored.len();
        self.stored.extend_from_slice(stored);
        match record.kind {
            Kind::Read => self.reads.push(record),
            Kind::Write => self.writes.push(record),
            Kind::Atomic => self.atomics.push(record),
        }
    }

    /// Returns the first race: its byte, and both accesses.
    pub(super) fn race(mut self) -> Option<(u64, Record, Record)> {
        self.writes.sort_by_key(|record| record.start);
        let (reads, atomics) = (Sorted::of(self.reads), Sorted::of(self.atomics));
        for (k, write) in self.writes.iter().enumerate() {
            let later = self.writes[k + 1..].iter().take_while(|other| other.start < write.end());
            let found = later.chain(reads.near(write)).chain(atomics.near(write));
            if let Some(race) = first_race(write, found, &self.stored) {
                return Some(race);
            }
        }
        let mut atomics = atomics.short.iter();
        atomics.find_map(|atomic| first_race(atomic, reads.near(atomic), &self.stored))
    }
}

/// Records of one kind by their first byte. Short records are separate, because a search must begin as far ahead as the
/// longest record.
struct Sorted {
    /// Records of one lane, or of one place.
    short: Vec<Record>,
    long: Vec<Record>,
}

const SHORT: u64 = 16;
const LONG: u64 = SHORT * LANES as u64;

impl Sorted {
    /// Leaves out records that would find no further race. All blocks may read a place. Two of these reads
    /// are enough: a write that races with another read also races with one of the two.
    fn of(mut list: Vec<Record>) -> Sorted {
        let order = |record: &Record| (record.start, record.bytes, record.block);
        let access = |record: &Record| {
            (record.warp, record.barriers, record.warp_barriers, record.lane, record.for_all)
        };
        list.sort_unstable_by_key(|record| (order(record), access(record)));
        list.dedup_by_key(|record| (order(record), access(record)));
        let mut sorted = Sorted { short: Vec::new(), long: Vec::new() };
        for same in list.chunk_by(|one, other| (one.start, one.bytes) == (other.start, other.bytes)) {
            let into = if u64::from(same[0].bytes) > SHORT { &mut sorted.long } else { &mut sorted.short };
            let (first, last) = (same[0], same[same.len() - 1]);
            if first.block == last.block {
                into.extend_from_slice(same);
            } else {
                into.extend([first, last]);
            }
        }
        sorted
    }

    /// Returns the records that may share a byte with this one.
    fn near(&self, record: &Record) -> impl Iterator<Item = &Record> {
        let (start, end) = (record.start, record.end());
        let of =
            |list: &'_ [Record], longest: u64| list.partition_point(|other| other.start + longest <= start);
        let (short, long) = (&self.short[of(&self.short, SHORT)..], &self.long[of(&self.long, LONG)..]);
        let near = move |other: &&Record| other.start < end;
        short.iter().take_while(near).chain(long.iter().take_while(near))
    }
}

fn first_race<'a>(
    record: &Record,
    others: impl Iterator<Item = &'a Record>,
    stored: &[u8],
) -> Option<(u64, Record, Record)> {
    others.filter_map(|other| Some((record.races_at(other, stored)?, *record, *other))).next()
}
