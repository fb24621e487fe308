//! Tests of the trial that decides whether a bucket's step prefetches.
//!
//! The first launch and skipped ones take no part in the comparison of times.

use super::*;

/// Returns the choice of a launch of 64 chunks after two launches with these times per tile.
fn chosen(picoseconds: [u64; 2]) -> u64 {
    let trial = Trial::new(Prefetches::WhereFaster, 64);
    for chunk in 0..128 {
        let is_ahead = chunk % 2 == 1;
        let time = if chunk < 64 { [2, 1] } else { picoseconds }[usize::from(is_ahead)];
        assert_ne!(trial.pairs_left.load(Ordering::Relaxed), 0);
        trial.count(is_ahead, time);
    }
    let mut chosen = u64::MAX;
    trial.run(1, || true, |ahead_bytes| chosen = ahead_bytes);
    chosen
}

#[test]
fn prefetches_stay_where_the_second_launch_was_faster_with_them() {
    assert_eq!(chosen([500, 400]), AHEAD_BYTES);
    assert_eq!(chosen([400, 400]), 0);
    assert_eq!(chosen([400, 500]), 0);
}

#[test]
fn what_is_asked_for_or_lies_in_a_cache_needs_no_trial() {
    for (prefetches, expected) in [(Prefetches::Always, AHEAD_BYTES), (Prefetches::Never, 0)] {
        let mut chosen = u64::MAX;
        Trial::new(prefetches, 64).run(1, || true, |ahead_bytes| chosen = ahead_bytes);
        assert_eq!(chosen, expected);
    }
}

#[test]
fn launches_of_one_chunk_end_their_trial_and_skipped_ones_take_no_part() {
    let trial = Trial::new(Prefetches::WhereFaster, 1);
    for _ in 0..100 {
        trial.run(1, || false, |ahead_bytes| assert_eq!(ahead_bytes, 0));
    }
    assert_eq!(trial.pairs_left.load(Ordering::Relaxed), PAIRS + 1);
    for _ in 0..2 * (PAIRS + 1) {
        assert_ne!(trial.pairs_left.load(Ordering::Relaxed), 0);
        trial.run(1, || true, |_| {});
    }
    assert_eq!(trial.pairs_left.load(Ordering::Relaxed), 0);
}
