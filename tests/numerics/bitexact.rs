//! The bits stay the same with all instruction sets, bucket caps, threads, modes, hand-over orders and neighbours.
//!
//! One plain run is the reference, and every other run has its bits, the norm included. The tests compare bits, because
//! as values 0 == -0 and NaN != NaN.

use instep::{Isa, Layout, Mode, SegmentAction};

use crate::support::{
    LENGTHS, MODES, Optim, Options, Outcome, Presummed, assert_same_bits, few_optimizers, layout,
    one_per_state_count, optimizers, painted, pass, run,
};

const CAPS: [Option<u64>; 5] = [Some(1), Some(1000), Some(4096), Some(1 << 20), None];
const STEPS: usize = 3;

/// Returns the lengths of the table, one parameter whose norm takes several threads, and one parameter that is
/// averaged.
fn mixed_layout() -> Layout {
    let lengths = LENGTHS.into_iter().chain([400_000, 40_000]);
    let builder = lengths.enumerate().fold(Layout::builder(), |b, (k, len)| b.param(format!("p{k}"), len));
    builder.param("averaged", 40_001).action(SegmentAction::Average).build().unwrap()
}

/// With 3 ranks, 1/(3 x 1000) in f32 is not 1/3 times 1/1000, so a multiplier that is rounded twice changes bits.
const LOSS_SCALE: f64 = 1000.0;

/// The slowest and plainest run: all work in order, on one thread, with instructions of every machine.
fn plain() -> Options {
    let isa = Some(Isa::Baseline);
    Options { isa, threads: Some(1), world_size: 3, loss_scale: LOSS_SCALE, ..Options::default() }
}

#[test]
fn the_loss_scale_of_these_tests_shows_a_multiplier_that_is_rounded_twice() {
    let once = (1.0 / (3.0 * LOSS_SCALE)) as f32;
    assert_ne!(once, (1.0 / 3.0) as f32 * (1.0 / LOSS_SCALE) as f32);
}

fn assert_same_run(got: &Outcome, expected: &Outcome, what: &str) {
    got.assert_same(expected, what);
    for (param, (a, b)) in got.grads.iter().zip(&expected.grads).enumerate() {
        assert_same_bits(a, b, &format!("gradient of p{param}: {what}"));
    }
    let decided = |outcome: &Outcome| (outcome.status.norm.map(f64::to_bits), outcome.status.clip.to_bits());
    if got.status.norm.is_some() && expected.status.norm.is_some() {
        assert_eq!(decided(got), decided(expected), "norm and clip: {what}");
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits_for_every_optimizer_and_length() {
    let layout = layout(&LENGTHS);
    for optim in optimizers() {
        let options = plain();
        let expected = run(&layout, optim, &options, STEPS, painted(&options));
        for isa in Isa::available() {
            let options = Options { isa: Some(isa), ..plain() };
            let got = run(&layout, optim, &options, STEPS, painted(&options));
            assert_same_run(&got, &expected, &format!("{isa}, {optim:?}"));
        }
    }
}

#[test]
fn any_bucket_cap_in_any_mode_gives_the_same_bits() {
    let layout = mixed_layout();
    for optim in one_per_state_count() {
        let expected = run(&layout, optim, &plain(), STEPS, painted(&plain()));
        for (cap, mode) in CAPS.into_iter().flat_map(|cap| MODES.map(|mode| (cap, mode))) {
            let options = Options { cap, mode, threads: Some(2), isa: None, ..plain() };
            let got = run(&layout, optim, &options, STEPS, painted(&options));
            assert_same_run(&got, &expected, &format!("cap {cap:?}, {mode:?}, {optim:?}"));
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let layout = mixed_layout();
    for optim in one_per_state_count() {
        let expected = run(&layout, optim, &plain(), STEPS, painted(&plain()));
        for (threads, mode) in (1..=4).flat_map(|threads| MODES.map(|mode| (threads, mode))) {
            let options = Options { threads: Some(threads), mode, ..plain() };
            let got = run(&layout, optim, &options, STEPS, painted(&options));
            assert_same_run(&got, &expected, &format!("{threads} threads, {mode:?}, {optim:?}"));
        }
    }
}

#[test]
fn any_order_of_handing_over_gives_the_same_bits() {
    let layout = mixed_layout();
    let count = layout.ids().len();
    let forward: Vec<usize> = (0..count).collect();
    let rotated = (0..count).map(|k| (k + count / 2) % count).collect();
    let outside_in = (0..count).map(|k| if k % 2 == 0 { k / 2 } else { count - 1 - k / 2 }).collect();
    // 5 and the number of parameters share no factor.
    assert_ne!(count % 5, 0);
    let strided = (0..count).map(|k| k * 5 % count).collect();
    let orders: [Vec<usize>; 4] = [forward, rotated, outside_in, strided];
    for optim in one_per_state_count() {
        let expected = run(&layout, optim, &plain(), STEPS, painted(&plain()));
        for order in &orders {
            for (mode, cap) in MODES.into_iter().flat_map(|mode| [Some(1), Some(4096)].map(|cap| (mode, cap)))
            {
                let options = Options { order: Some(order.clone()), mode, cap, ..plain() };
                let got = run(&layout, optim, &options, STEPS, painted(&options));
                assert_same_run(
                    &got,
                    &expected,
                    &format!("order {order:?}, {mode:?}, cap {cap:?}, {optim:?}"),
                );
            }
        }
    }
}

#[test]
fn the_norm_and_what_clipping_makes_of_it_are_the_same_bits_however_the_work_is_cut() {
    let layout = mixed_layout();
    let optim = few_optimizers()[3];
    let clipped = Options { max_norm: Some(0.5), ..plain() };
    let expected = run(&layout, optim, &clipped, STEPS, painted(&clipped));
    assert!(expected.status.clip < 1.0);
    let forward: Vec<usize> = (0..layout.ids().len()).collect();
    for isa in Isa::available() {
        for mode in [Mode::Sequential, Mode::Normed] {
            for cap in CAPS {
                for (threads, order) in [(1, Some(forward.clone())), (2, None), (4, Some(forward.clone()))] {
                    let what = format!("{isa}, {mode:?}, cap {cap:?}, {threads} threads, {order:?}");
                    let options = Options {
                        isa: Some(isa),
                        mode,
                        cap,
                        threads: Some(threads),
                        order,
                        ..clipped.clone()
                    };
                    let got = run(&layout, optim, &options, STEPS, painted(&options));
                    assert!(got.status.norm.is_some());
                    assert_same_run(&got, &expected, &what);
                }
            }
        }
    }
}

#[test]
fn a_parameter_gives_the_same_bits_alone_and_among_others() {
    // The others have no gradient, so that the norm is that of the parameter alone, too.
    let surroundings: [(&[usize], &[usize]); 4] =
        [(&[], &[]), (&[1], &[]), (&[], &[300, 7]), (&[2049, 0], &[255])];
    // Without elements there is nothing to compare.
    for len in LENGTHS.into_iter().filter(|len| *len > 0) {
        for optim in one_per_state_count() {
            let alone: Vec<Outcome> = surroundings
                .iter()
                .map(|(before, after)| {
                    let lengths = [before, &[len][..], after].concat();
                    let options = Options { mode: Mode::Normed, max_norm: Some(0.1), ..plain() };
                    let paint = painted(&options);
                    let feed = |step: usize, param: usize, values: &mut [f32]| {
                        let feeds = param == before.len();
                        if feeds {
                            paint(step, 0, values);
                        }
                        feeds
                    };
                    only(run_from_zero(&lengths, optim, &options, feed), before.len())
                })
                .collect();
            for (other, (before, after)) in alone[1..].iter().zip(&surroundings[1..]) {
                let what = format!("{len} elements between {before:?} and {after:?}, {optim:?}");
                assert_same_run(other, &alone[0], &what);
            }
        }
    }
}

/// Does the same as [`run`], but all parameters start at zero.
fn run_from_zero(
    lengths: &[usize],
    optim: Optim,
    options: &Options,
    feed: impl Fn(usize, usize, &mut [f32]) -> bool,
) -> Outcome {
    let layout = layout(lengths);
    let mut stepper = options.stepper(&layout, optim, Presummed(options.world_size)).unwrap();
    for step in 0..STEPS {
        pass(&mut stepper, options, |param, values| feed(step, param, values)).unwrap();
    }
    Outcome::of(&stepper).unwrap()
}

/// Returns the part of an outcome for one parameter.
fn only(outcome: Outcome, param: usize) -> Outcome {
    Outcome {
        params: vec![outcome.params[param].clone()],
        states: vec![outcome.states[param].clone()],
        grads: vec![outcome.grads[param].clone()],
        step_counts: vec![outcome.step_counts[param]],
        carried: vec![outcome.carried[param].clone()],
        status: outcome.status,
    }
}
