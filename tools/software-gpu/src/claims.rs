//! A program's claims on the memory that the work of a stream may touch. An access to any other byte is a fault.
//!
//! The real driver has no such function. A program that knows which bytes its kernels touch, as instep does by
//! `Op::accesses`, can have this knowledge compared with the real accesses. A graph keeps the claims of its capture.
#![allow(unsafe_code, missing_docs)]

use std::ffi::{CStr, c_char};
use std::ops::Range;

use crate::shadow::Access;

/// The bytes of an f32.
const ELEMENT: u64 = 4;

/// A range of addresses that work may read, or read and write, or that it may touch only if another range allows it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Claimed {
    pub address: u64,
    pub bytes: u64,
    pub kind: u64,
}

impl Claimed {
    pub const READ: u64 = 0;
    pub const WRITTEN: u64 = 1;
    pub const GUARDED: u64 = 2;
}

/// All memory that one piece of work may touch. Ranges are in order, and no two ranges touch each other.
pub(crate) struct Claim {
    /// The name of the claimant.
    pub(crate) name: String,
    read: Vec<Range<u64>>,
    written: Vec<Range<u64>>,
    /// The memory for which the claim holds; if empty, it holds for all memory.
    guarded: Vec<Range<u64>>,
}

impl Claim {
    /// # Safety
    /// `name` is a string, and `claimed` has `count` ranges.
    pub(crate) unsafe fn new(name: *const c_char, claimed: *const Claimed, count: usize) -> Claim {
        // SAFETY: by the contract.
        let (name, claimed) = unsafe {
            let claimed = if count == 0 { &[] } else { std::slice::from_raw_parts(claimed, count) };
            (CStr::from_ptr(name).to_string_lossy().into_owned(), claimed)
        };
        let of = |kinds: &[u64]| {
            let of_kinds = claimed.iter().filter(|range| kinds.contains(&range.kind) && range.bytes > 0);
            merged(of_kinds.map(|range| range.address..range.address + range.bytes).collect())
        };
        let (read, written) = (of(&[Claimed::READ, Claimed::WRITTEN]), of(&[Claimed::WRITTEN]));
        Claim { name, read, written, guarded: of(&[Claimed::GUARDED]) }
    }

    /// Returns the claim without the first element of each range that it may write.
    pub(crate) fn narrower(self) -> Claim {
        // The end of a range is often padding, which nothing touches.
        let shorter = |range: Range<u64>| (range.start + ELEMENT).min(range.end)..range.end;
        Claim { written: self.written.into_iter().map(shorter).collect(), ..self }
    }

    /// Returns the claimed ranges for reads and for writes, if the claim holds for all memory; otherwise none.
    pub(crate) fn whole(&self) -> [&[Range<u64>]; 2] {
        if self.guarded.is_empty() { [&self.read, &self.written] } else { [&[], &[]] }
    }

    /// Returns the first bytes of a range that this claim does not have.
    pub(crate) fn lacks(&self, range: Range<u64>, access: Access) -> Option<Range<u64>> {
        let claimed = if access == Access::Read { &self.read } else { &self.written };
        let beyond = outside(&range, claimed);
        if self.guarded.is_empty() {
            return beyond.into_iter().next();
        }
        let common = |gap: &Range<u64>, held: &Range<u64>| gap.start.max(held.start)..gap.end.min(held.end);
        let held = beyond.iter().flat_map(|gap| self.guarded.iter().map(move |held| common(gap, held)));
        held.into_iter().find(|part| !part.is_empty())
    }
}

/// Puts ranges in order and joins ranges that touch each other.
fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// Returns the parts of a range that lie in none of the other ranges; those ranges are in order.
fn outside(range: &Range<u64>, others: &[Range<u64>]) -> Vec<Range<u64>> {
    let (mut gaps, mut from) = (Vec::new(), range.start);
    let first = others.partition_point(|other| other.end <= range.start);
    for other in others[first..].iter().take_while(|other| other.start < range.end) {
        if from < other.start {
            gaps.push(from..other.start);
        }
        from = other.end;
    }
    if from < range.end {
        gaps.push(from..range.end);
    }
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_lacks_the_first_bytes_that_none_of_its_ranges_has() {
        let range = |address, bytes, kind| Claimed { address, bytes, kind };
        let rows =
            [range(20, 10, Claimed::WRITTEN), range(0, 10, Claimed::READ), range(10, 10, Claimed::READ)];
        // SAFETY: a string, and three ranges.
        let claim = unsafe { Claim::new(c"step".as_ptr(), rows.as_ptr(), rows.len()) };
        assert_eq!(claim.lacks(0..30, Access::Read), None);
        assert_eq!(claim.lacks(28..31, Access::Read), Some(30..31));
        assert_eq!(claim.lacks(20..30, Access::Write), None);
        assert_eq!(claim.lacks(19..32, Access::Write), Some(19..20));
    }

    #[test]
    fn a_claim_on_guarded_memory_leaves_other_memory_alone() {
        let range = |address, bytes, kind| Claimed { address, bytes, kind };
        let rows = [range(0, 100, Claimed::GUARDED), range(0, 10, Claimed::WRITTEN)];
        // SAFETY: a string, and two ranges.
        let claim = unsafe { Claim::new(c"step".as_ptr(), rows.as_ptr(), rows.len()) };
        assert_eq!(claim.lacks(200..300, Access::Write), None);
        assert_eq!(claim.lacks(90..300, Access::Read), Some(90..100));
    }
}
