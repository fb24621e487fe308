//! The norm is exact to its last bit: carries, sticky bits, the ends of the range, and leaves that no bucket or thread
//! divides.
//!
//! Sums of many leaves hide a wrong bit in one of them, because the total is rounded again. These inputs have few
//! leaves or exactly known sums, so the tests need no tolerance.

use instep::{Isa, Mode, Sgd};

use crate::support::{Optim, Options, Outcome, layout, open, painted, pass, run};

/// SGD steps nothing here, so only the norm is tested.
const STILL: Sgd =
    Sgd { lr: 0.0, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };

/// Returns the norm of gradients that are zero except for one value in each leaf of 256.
fn norm_of_leaves(values: &[f32], isa: Isa) -> f64 {
    let options = Options { mode: Mode::Normed, isa: Some(isa), ..Options::default() };
    let feed = |_: usize, _: usize, gradient: &mut [f32]| {
        gradient.fill(0.0);
        // Not always in the same lane.
        values.iter().enumerate().for_each(|(leaf, value)| gradient[256 * leaf + leaf * 37 % 256] = *value);
        true
    };
    run(&layout(&[256 * values.len()]), Optim::of(STILL), &options, 1, feed).status.norm.unwrap()
}

#[track_caller]
fn assert_norm(values: &[f32], expected: f64) {
    for isa in Isa::available() {
        let got = norm_of_leaves(values, isa);
        assert_eq!(got.to_bits(), expected.to_bits(), "{got} is not {expected} on {isa}");
    }
}

fn power(exponent: i32) -> f32 {
    2f64.powi(exponent) as f32
}

#[test]
fn a_carry_runs_through_limbs_that_are_full() {
    // Limbs begin at 2^-32, 2^0, 2^32. Three of each 4^j fill the middle one to 2^32 - 1; four quarters overflow the
    // lower one by one; the sum is 2^32.
    let full = (0..16).flat_map(|j| [power(j); 3]);
    let values: Vec<f32> = full.chain([0.5; 4]).collect();
    assert_norm(&values, 65536.0);
}

#[test]
fn what_lies_far_below_the_last_bit_still_breaks_a_tie() {
    // x^2 has its last bit at 2^9, so 2^8 more is a tie, which the even x^2 wins; any more, and the next number up
    // wins, whose root rounds to the next number above x.
    let x = 1.75 * power(30);
    assert_norm(&[x, power(4)], f64::from(x));
    for exponent in [-1, -20, -60, -149] {
        assert_norm(&[x, power(4), power(exponent)], f64::from(x).next_up());
    }
}

#[test]
fn the_norm_reaches_both_ends_of_f32() {
    let smallest = f32::from_bits(1);
    assert_norm(&[smallest], f64::from(smallest));
    assert_norm(&[smallest; 4], 2.0 * f64::from(smallest));
    assert_norm(&[f32::MIN], f64::from(f32::MAX));
    assert_norm(&[f32::MAX; 16], 4.0 * f64::from(f32::MAX));
    assert_norm(&[-0.0, 0.0], 0.0);

    // Whole leaves of the largest value reach the highest limb that any sum can.
    let full = |_: usize, _: usize, gradient: &mut [f32]| {
        gradient.fill(f32::MAX);
        true
    };
    for isa in Isa::available() {
        let options = Options { mode: Mode::Normed, isa: Some(isa), ..Options::default() };
        let norm = run(&layout(&[4096]), Optim::of(STILL), &options, 1, full).status.norm;
        assert_eq!(norm, Some(64.0 * f64::from(f32::MAX)), "{isa}");
    }
}

#[test]
fn thousands_of_leaves_add_up_exactly() {
    // Each is 3 * 2^-22 squared, 9 * 2^-44: the running sum of 2^12 passes a limb, and no addition may round.
    let layout = layout(&[256 << 12]);
    let options = Options { mode: Mode::Normed, threads: Some(2), ..Options::default() };
    let feed = |_: usize, _: usize, gradient: &mut [f32]| {
        gradient.fill(0.0);
        gradient.iter_mut().step_by(256).for_each(|g| *g = 3.0 * power(-22));
        gradient[1] = power(20);
        true
    };
    // 2^40 + 2^12 * 9 * 2^-44 is 2^40 * (1 + 9 * 2^-72): the root is 2^20.
    assert_eq!(run(&layout, Optim::of(STILL), &options, 1, feed).status.norm, Some(f64::from(power(20))));
    let without_the_large = |step: usize, param: usize, gradient: &mut [f32]| {
        feed(step, param, gradient);
        gradient[1] = 0.0;
        true
    };
    let expected = 3.0 * f64::from(power(-16));
    assert_eq!(run(&layout, Optim::of(STILL), &options, 1, without_the_large).status.norm, Some(expected));
}

#[test]
fn the_norm_of_few_leaves_is_the_same_bits_however_the_work_is_cut() {
    // A wrong bit in a leaf shows in the norm of one leaf half the time, and in that of nine a tenth.
    const PASSES: usize = 60;
    let norms = |lengths: &[usize], options: &Options| -> Vec<u64> {
        let mut stepper = open(&layout(lengths), Optim::of(STILL), options);
        let paint = painted(options);
        let one = |step: usize| {
            pass(&mut stepper, options, |param, values| paint(step, param, values)).unwrap();
            Outcome::of(&stepper).unwrap().status.norm.unwrap().to_bits()
        };
        (0..PASSES).map(one).collect()
    };
    let plain = Options { mode: Mode::Normed, world_size: 3, threads: Some(1), ..Options::default() };
    for lengths in [&[256][..], &[255], &[31], &[257], &[1, 300], &[2049, 5], &[7, 2048, 300]] {
        let expected = norms(lengths, &Options { isa: Some(Isa::Baseline), ..plain.clone() });
        for isa in Isa::available() {
            for cap in [Some(1), Some(1000), None] {
                let got = norms(lengths, &Options { isa: Some(isa), cap, ..plain.clone() });
                assert_eq!(got, expected, "{lengths:?} on {isa}, cap {cap:?}");
            }
        }
    }
}

#[test]
fn a_finite_sum_that_overflows_when_the_loss_scale_is_divided_out_is_skipped() {
    // Twice 2^127 is past the largest f32, so the step would see infinity.
    for (gradient, skipped) in [(power(127), true), (power(126), false)] {
        let options =
            Options { mode: Mode::Normed, skip_nonfinite: true, loss_scale: 0.5, ..Options::default() };
        let feed = |_: usize, _: usize, values: &mut [f32]| {
            values.fill(gradient);
            true
        };
        let status = run(&layout(&[3]), Optim::of(STILL), &options, 1, feed).status;
        assert_eq!((status.skipped, status.clip), (skipped, 1.0), "{gradient:e}");
        assert!(status.norm.unwrap().is_finite());
    }
}
