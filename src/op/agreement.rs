//! The agreement: one number for all that ranks must have in common, and what differs between two of them.
//!
//! The number has four lanes of 16 bits. Each part of it is a hash of 48 bits, spread over the three lanes that are not
//! its own, and the parts are combined by exclusive or. If one part differs, its own lane alone is equal: the number
//! says which part it is, and a difference goes unnoticed once in 2^48, not once in 2^16.

const LANE_BITS: u32 = 16;
const LANE_MASK: u64 = (1 << LANE_BITS) - 1;
const HASH_MASK: u64 = (1 << (3 * LANE_BITS)) - 1;

/// A part of the agreement, by the number of its own lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Agreed {
    /// Parameters, buckets, and the optimizers that step them.
    Layout,
    /// Options of the stepper, and the type in which gradients travel.
    Options,
    /// Learning rates and all other hyperparameters.
    Hyperparameters,
    /// Frozen, unused and written parameters, values that were loaded or set by hand, and the number of micro-batches if each
    /// is summed.
    Loaded,
}

impl Agreed {
    const ALL: [Agreed; 4] = [Agreed::Layout, Agreed::Options, Agreed::Hyperparameters, Agreed::Loaded];

    fn name(self) -> &'static str {
        match self {
            Agreed::Layout => "layout: parameters, buckets, or the optimizers that step them",
            Agreed::Options => "options",
            Agreed::Hyperparameters => "learning rates or other hyperparameters",
            Agreed::Loaded => {
                "frozen, unused or written parameters, loaded values, or how many micro-batches"
            }
        }
    }

    /// Returns the parts that a text names at its end, as [`difference`] does.
    pub(super) fn named_by(text: &str) -> impl Iterator<Item = Agreed> {
        Agreed::ALL.into_iter().filter(move |part| text.ends_with(SEVERAL) || text.ends_with(part.name()))
    }

    /// The part's share of the number.
    pub(crate) fn share(self, hash: u64) -> u64 {
        let at = self as u32 * LANE_BITS;
        let below = (1u64 << at) - 1;
        let hash = mixed(hash) & HASH_MASK;
        // The part of the last lane has no lane above its own.
        let above = (hash & !below).checked_shl(LANE_BITS).unwrap_or(0);
        hash & below | above
    }
}

/// Returns what two ranks' [agreements](crate::collective::CallKey::agreement) say about where the ranks differ; `None` if
/// the numbers are equal.
///
/// ```
/// use instep::op::difference;
/// assert_eq!(difference(7, 7), None);
/// ```
pub fn difference(ours: u64, theirs: u64) -> Option<&'static str> {
    match differing(ours, theirs)[..] {
        _ if ours == theirs => None,
        // How a rank says that it could not build what the others have built.
        _ if ours == !theirs => Some("whether it was built"),
        [part] => Some(part.name()),
        _ => Some(SEVERAL),
    }
}

const SEVERAL: &str = "several of layout, options, hyperparameters, frozen, unused or written parameters, loaded values, and micro-batches";

/// Returns the part that differs, or all parts if several do.
pub(super) fn differing(ours: u64, theirs: u64) -> Vec<Agreed> {
    let is_equal = |part: &Agreed| (ours ^ theirs) >> (*part as u32 * LANE_BITS) & LANE_MASK == 0;
    let own: Vec<Agreed> = Agreed::ALL.into_iter().filter(is_equal).collect();
    if own.len() == 1 { own } else { Agreed::ALL.to_vec() }
}

/// Spreads a change of any bit over all bits (the finaliser of SplitMix64): FNV-1a leaves the low ones weak.
fn mixed(hash: u64) -> u64 {
    let hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ hash >> 31
}

#[cfg(test)]
mod tests {
    use super::{Agreed, difference};

    fn number(hashes: [u64; 4]) -> u64 {
        Agreed::ALL.into_iter().zip(hashes).fold(0, |number, (part, hash)| number ^ part.share(hash))
    }

    #[test]
    fn one_part_that_differs_is_named_and_several_are_not_taken_for_one() {
        let words = ["layout", "options", "learning rates", "frozen, unused"];
        let mut several = 0;
        for k in 0..1000u64 {
            let ours = [k, k + 1, 7, k << 40];
            assert_eq!(difference(number(ours), number(ours)), None);
            for (part, word) in words.into_iter().enumerate() {
                let mut theirs = ours;
                theirs[part] += 1;
                let told = difference(number(ours), number(theirs)).unwrap();
                assert!(told.starts_with(word), "{k}, {part}: {told}");
                theirs[(part + 1) % 4] ^= 1;
                let told = difference(number(ours), number(theirs)).unwrap();
                several += u32::from(told.starts_with("several"));
            }
        }
        // A lane of 16 bits is equal by accident once in 2^16.
        assert!(several > 3990, "{several}");
        assert!(difference(5, !5).unwrap().contains("built"));
    }

    #[test]
    fn each_part_leaves_its_own_lane_empty_and_fills_the_others() {
        for (lane, part) in Agreed::ALL.into_iter().enumerate() {
            let seen = (0..100).fold(0, |seen, hash| seen | part.share(hash));
            assert_eq!(seen, !(0xffff << (16 * lane)), "{part:?}");
        }
    }
}
