//! Tests of the addresses of arrays that one step reads together.
//!
//! Up to eight arrays of a step share no low bits by which caches and predictors find them.

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
                    assert!(distance(*a, *b) >= NEAR, "2^{log_bytes} bytes, {arrays} arrays: {starts:x?}");
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
