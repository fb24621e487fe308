//! Clipping and skipping as a table: the decision, and that a skipped step changes nothing. The cause may lie anywhere.
//!
//! The norms of the table and their coefficients are exact. PyTorch's own test of a found infinity compares parameters;
//! this test also compares every state, at the first step and later.

use instep::{Adam, Layout, Mode, SegmentAction, Sgd};

use crate::support::reference::clip_coefficient;
use crate::support::{
    Optim, Options, Outcome, assert_same_bits, layout, one_per_state_count, open, paint, painted, pass, run,
};

/// These modes know the norm before they step.
const MODES: [Mode; 2] = [Mode::Sequential, Mode::Normed];

const NAN: f32 = f32::NAN;
const INFINITY: f32 = f32::INFINITY;

struct Row {
    /// The gradients of the mean loss, one for each parameter.
    gradients: [f32; 2],
    max_norm: Option<f64>,
    norm: f64,
    clip: f64,
    /// The pass is skipped only if skipping is on.
    skipped: bool,
}

#[rustfmt::skip] // A table: one case per line.
fn rows() -> Vec<Row> {
    let row = |gradients, max_norm, norm, clip| Row { gradients, max_norm, norm, clip, skipped: false };
    let bad = |gradients, max_norm, norm| Row { gradients, max_norm, norm, clip: 1.0, skipped: true };
    let infinite = f64::INFINITY;
    vec![
        row([3.0, 4.0], None, 5.0, 1.0),
        row([3.0, 4.0], Some(10.0), 5.0, 1.0),
        // PyTorch adds 1e-6 to the norm, so at the norm itself it clips a little.
        row([3.0, 4.0], Some(5.0), 5.0, 5.0 / (5.0 + 1e-6)),
        row([-3.0, 4.0], Some(5.0 + 2e-6), 5.0, 1.0),
        row([3.0, -4.0], Some(2.5), 5.0, 2.5 / (5.0 + 1e-6)),
        row([0.0, 4.0], Some(1.0), 4.0, 1.0 / (4.0 + 1e-6)),
        row([0.0, 0.0], Some(1.0), 0.0, 1.0),
        row([0.0, -0.0], Some(1e-7), 0.0, 1e-7 / 1e-6),
        bad([INFINITY, 4.0], None, infinite),
        bad([3.0, -INFINITY], Some(1.0), infinite),
        bad([NAN, 4.0], Some(1.0), f64::NAN),
        bad([INFINITY, NAN], Some(1.0), f64::NAN),
    ]
}

#[test]
fn each_configuration_decides_as_torch_does_and_says_so() {
    let layout = layout(&[1, 300]);
    let sgd = Sgd { lr: 0.5, momentum: 0.9, weight_decay: 0.04, ..Sgd::default() };
    for (mode, cap) in MODES.into_iter().flat_map(|mode| [(mode, None), (mode, Some(1))]) {
        // The loss scale and the mean are powers of two, so dividing them out is exact.
        for (loss_scale, world_size) in [(1.0, 1), (1024.0, 4), (0.25, 2)] {
            for row in rows() {
                let max_norm = row.max_norm;
                let options = Options {
                    mode,
                    cap,
                    loss_scale,
                    world_size,
                    max_norm,
                    skip_nonfinite: true,
                    ..Options::default()
                };
                let what = format!("{:?} clipped to {max_norm:?}, {mode:?}, {loss_scale}", row.gradients);
                let feed = |_: usize, param: usize, values: &mut [f32]| {
                    values.fill(0.0);
                    *values.last_mut().unwrap() = row.gradients[param] * options.divisor() as f32;
                    true
                };
                let before = run(&layout, Optim::of(sgd), &options, 0, feed);
                let after = run(&layout, Optim::of(sgd), &options, 1, feed);
                let status = after.status;
                assert_eq!(status.norm.map(f64::to_bits), Some(row.norm.to_bits()), "{what}");
                assert_eq!((status.skipped, status.clip), (row.skipped, row.clip), "{what}");
                assert_eq!(status.first_nonfinite_bucket.is_some(), row.skipped, "{what}");
                if row.skipped {
                    after.assert_same(&before, &what);
                    continue;
                }
                // The first buffer is the gradient as it was stepped, with the decay in it.
                let (buffer, value) = (after.states[1][0][299], before.params[1][299]);
                let stepped = f64::from(row.gradients[1]) * row.clip + 0.04 * f64::from(value);
                assert!(
                    (f64::from(buffer) - stepped).abs() <= 4e-7 * stepped.abs(),
                    "{what}: {buffer} {stepped}"
                );
                assert_eq!(after.step_counts, [1, 1], "{what}");
                if let Some(max_norm) = max_norm {
                    assert_eq!(row.clip, clip_coefficient(row.norm, max_norm), "{what}");
                }
            }
        }
    }
}

#[test]
fn one_nonfinite_element_anywhere_keeps_every_bit_of_parameters_and_states_at_any_step() {
    const LENGTHS: [usize; 3] = [1, 17, 257];
    let layout = layout(&LENGTHS);
    for optim in one_per_state_count() {
        for (mode, loss_scale) in [(Mode::Normed, 1.0), (Mode::Normed, 1024.0), (Mode::Sequential, 1024.0)] {
            let options =
                Options { mode, loss_scale, cap: Some(1), skip_nonfinite: true, ..Options::default() };
            let paint = painted(&options);
            // At the first step, and after two.
            for steps in [0, 2] {
                let mut stepper = open(&layout, optim, &options);
                for step in 0..steps {
                    pass(&mut stepper, &options, |param, values| paint(step, param, values)).unwrap();
                }
                let before = Outcome::of(&stepper).unwrap();
                let places =
                    (0..LENGTHS.len()).flat_map(|param| (0..LENGTHS[param]).map(move |at| (param, at)));
                for (k, (bad_param, bad_at)) in places.enumerate() {
                    let bad = [NAN, INFINITY, -INFINITY, -NAN][k % 4];
                    let poison = |param: usize, values: &mut [f32]| {
                        paint(steps, param, values);
                        if param == bad_param {
                            values[bad_at] = bad;
                        }
                        true
                    };
                    pass(&mut stepper, &options, poison).unwrap();
                    let after = Outcome::of(&stepper).unwrap();
                    let what =
                        format!("{bad} at {bad_at} of p{bad_param}, {optim:?}, {mode:?}, step {steps}");
                    after.assert_same(&before, &what);
                    // Buckets fill from the last parameter.
                    let bucket = (LENGTHS.len() - 1 - bad_param) as u32;
                    assert_eq!(
                        (after.status.skipped, after.status.first_nonfinite_bucket, after.status.clip),
                        (true, Some(bucket), 1.0),
                        "{what}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_skipped_pass_still_averages_what_is_only_averaged() {
    let builder = Layout::builder().param("stepped", 300).param("averaged", 300);
    let layout = builder.action(SegmentAction::Average).build().unwrap();
    for (mode, cap) in MODES.into_iter().flat_map(|mode| [(mode, None), (mode, Some(1))]) {
        for max_norm in [None, Some(0.5)] {
            let options =
                Options { mode, cap, max_norm, world_size: 3, skip_nonfinite: true, ..Options::default() };
            let optim = Optim::of(Adam::default());
            let feed = |_: usize, param: usize, values: &mut [f32]| {
                values.iter_mut().enumerate().for_each(|(k, g)| *g = paint(param, k));
                if param == 0 {
                    values[7] = INFINITY;
                }
                true
            };
            let what = format!("{mode:?}, cap {cap:?}, max_norm {max_norm:?}");
            let after = run(&layout, optim, &options, 1, feed);
            assert!(after.status.skipped, "{what}");
            after.assert_same(&run(&layout, optim, &options, 0, feed), &what);
            // Neither clipped nor left as a sum.
            let mean: Vec<f32> = (0..300).map(|k| paint(1, k) * (1.0 / 3.0)).collect();
            assert_same_bits(&after.grads[1], &mean, &what);
        }
    }
}
