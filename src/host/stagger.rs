//! Chooses the offset within a page at which each array of a step starts. Arrays then alias neither at 4 KiB nor in a
//! cache's way predictor.
//!
//! A load may wait for an earlier store whose address has the same low 12 bits. First-level caches also use those bits
//! to find lines. AMD's way predictor also hashes higher bits, and at some distances two arrays have the same hash.
//! Starts with distances of at least 512 bytes avoid both problems. The hash is that of Lipp et al., "Take A Way:
//! Exploring the Security Implications of AMD's Cache Way Predictors", ASIA CCS 2020. On loads and stores see Intel,
//! "64 and IA-32 Architectures Optimization Reference Manual", 4 KiB aliasing.

/// 4 KiB, the distance at which addresses alias.
pub(crate) const PAGE: u64 = 4096;

/// Arrays alias if their starts within a page are nearer than this.
const NEAR: u64 = 512;

/// Starts are multiples of 256 bytes, which aligns them for any vector.
const GRAIN: u64 = 256;

/// The chosen starts within a page, and those of the caller's memory, each with its number of bytes.
#[derive(Debug, Default)]
pub(crate) struct Stagger {
    taken: Vec<(u64, u64)>,
}

impl Stagger {
    /// Adds `bytes` of the caller's memory at `address`. These bytes are a part of an array and begin at its byte
    /// `start`.
    pub(crate) fn keep_away_from(&mut self, address: u64, start: u64, bytes: u64) {
        self.taken.push((address.wrapping_sub(start) % PAGE, bytes));
    }

    /// Returns the offset in a page at which another array of `bytes` should start. The offset aliases with the fewest
    /// bytes of other arrays, and of all such offsets it is the one farthest from its neighbours.
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

/// Returns the distance of two starts within a page. The page wraps around, and the shorter way counts.
fn distance(a: u64, b: u64) -> u64 {
    let ahead = a.wrapping_sub(b) % PAGE;
    ahead.min(PAGE - ahead)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// AMD's way predictor distinguishes the lines of a set only by the xor of these pairs of address bits (Lipp et
    /// al.).
    fn way_hash(address: u64) -> u64 {
        let pairs = [(12, 27), (13, 26), (14, 25), (15, 20), (16, 21), (17, 22), (18, 23), (19, 24)];
        pairs.iter().fold(0, |hash, (a, b)| hash << 1 | (address >> a ^ address >> b) & 1)
    }

    fn set(address: u64) -> u64 {
        address >> 6 & 63
    }

    #[test]
    fn up_to_eight_arrays_of_any_size_share_neither_low_bits_nor_a_predicted_way() {
        for log_bytes in 10..=34 {
            for arrays in 2..=8 {
                let mut stagger = Stagger::default();
                // A multiple of 2^28, at which all hashes agree, that is at least as long as the array.
                let apart = (1u64 << log_bytes).next_multiple_of(1 << 28);
                let starts: Vec<u64> =
                    (0..arrays).map(|k| (1 << 46) + k * apart + stagger.next(1 << log_bytes)).collect();
                for (k, a) in starts.iter().enumerate() {
                    for b in &starts[..k] {
                        assert!(
                            distance(*a, *b) >= NEAR,
                            "2^{log_bytes} bytes, {arrays} arrays: {starts:x?}"
                        );
                        assert_ne!(
                            (set(*a), way_hash(*a)),
                            (set(*b), way_hash(*b)),
                            "2^{log_bytes} bytes, {arrays} arrays: {starts:x?}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn without_a_stagger_the_predictor_takes_all_of_them_for_one() {
        let starts = [0, 1, 2, 3].map(|k| (1u64 << 46) + (k << 28));
        assert!(starts.iter().all(|a| (set(*a), way_hash(*a)) == (set(starts[0]), way_hash(starts[0]))));
    }

    #[test]
    fn states_keep_away_from_most_of_what_is_borrowed() {
        let mut stagger = Stagger::default();
        let (large, small) = (1 << 20, 1 << 10);
        stagger.keep_away_from(0x7000_0010, 0, large);
        stagger.keep_away_from(0x7100_0810, 1 << 12, large);
        (0..16).for_each(|k| stagger.keep_away_from(0x7200_0000 + 256 * k, 0, small));
        for _ in 0..3 {
            let start = stagger.next(large);
            assert!(distance(start, 0x10) >= NEAR && distance(start, 0x810) >= NEAR, "{start:x}");
        }
    }
}
