//! The stochastic choices of a run: a sequence of numbers from a seed.
//!
//! The generator is splitmix64 (Steele, Lea and Flood, 2014), for which any seed is good.

#[derive(Clone, Debug)]
pub(super) struct Choices(u64);

impl Choices {
    pub(super) fn new(seed: u64) -> Choices {
        Choices(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`, which is not 0.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }

    /// Returns a permutation of the first `count` numbers.
    pub(super) fn permutation(&mut self, count: usize) -> Vec<u32> {
        let mut list: Vec<u32> = (0..count as u32).collect();
        for k in (1..count).rev() {
            list.swap(k, self.below(k as u64 + 1) as usize);
        }
        list
    }
}
