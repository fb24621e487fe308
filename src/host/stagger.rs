//! Chooses the offset within a page at which each array of a step starts. With these offsets, as few arrays as possible
//! alias at 4 KiB or collide in a cache's way predictor.
//!
//! A load may wait for an earlier store to an address with the same low 12 bits. L1 caches also use those bits to find
//! lines. AMD's way predictor also hashes higher bits, and at some distances two arrays have the same hash. Arrays
//! avoid both problems if their starts within a page are at least 512 bytes apart. The hash is that of Lipp et al.,
//! "Take A Way: Exploring the Security Implications of AMD's Cache Way Predictors", ASIA CCS 2020. On loads and stores
//! see Intel, "64 and IA-32 Architectures Optimization Reference Manual", 4 KiB aliasing.

/// 4 KiB, the distance at which addresses alias.
pub(crate) const PAGE: u64 = 4096;

/// Two arrays alias if the distance between their starts within a page is less than this.
const NEAR: u64 = 512;

/// Arrays that are placed here start at multiples of 256 bytes, so they are aligned for any vector.
const GRAIN: u64 = 256;

/// For each array that was placed here: its start within a page, and its number of bytes. For each part of an array of
/// the caller: the start of that array within a page, and the number of bytes of the part.
#[derive(Debug, Default)]
pub(crate) struct Stagger {
    taken: Vec<(u64, u64)>,
}

impl Stagger {
    /// Adds `bytes` bytes of the caller's memory at `address`. These bytes are a part of an array, and begin at byte
    /// `start` of the array.
    pub(crate) fn keep_away_from(&mut self, address: u64, start: u64, bytes: u64) {
        self.taken.push((address.wrapping_sub(start) % PAGE, bytes));
    }

    /// Returns the offset in a page at which another array of `bytes` bytes should start. At this offset, the arrays
    /// with which the new array aliases have the fewest bytes in total. Among such offsets, returns one at which the
    /// nearest other array starts farthest away.
    pub(crate) fn next(&mut self, bytes: u64) -> u64 {
        let cost = |start: u64| {
            let near = self.taken.iter().filter(|(other, _)| distance(start, *other) < NEAR);
            let nearest = self.taken.iter().map(|(other, _)| distance(start, *other)).min();
            (near.map(|(_, bytes)| bytes).sum::<u64>(), PAGE - nearest.unwrap_or(0))
        };
        let start = (0..PAGE / GRAIN).map(|k| k * GRAIN).min_by_key(|start| cost(*start)).unwrap_or(0);
        self.taken.push((start, bytes));
        start
    }
}

/// Returns the distance in bytes between two offsets within a page. Offsets wrap around at the end of the page, and the
/// shorter of the two distances is returned.
fn distance(a: u64, b: u64) -> u64 {
    let ahead = a.wrapping_sub(b) % PAGE;
    ahead.min(PAGE - ahead)
}

#[cfg(test)]
#[path = "../../tests/unit/host/stagger.rs"]
mod tests;
