//! The kernels against the f64 reference, step by step, for all optimizer cases.
//!
//! Each step is compared with one reference step from the kernel's own state, so the bound is that of a single step. A
//! result is accepted only within the bound of `tolerance`.

use instep::{Adam, Isa, Mode, Rprop, Sgd, Stepper};

use crate::support::reference::{Rule, Scalar, clip_coefficient, norm};
use crate::support::tolerance::{bounds, is_undecided};
use crate::support::{
    LENGTHS, Optim, Options, Outcome, few_optimizers, layout, open, optimizers, painted, pass, run,
};

const STEPS: usize = 7;

/// Returns the element as the reference sees it.
fn scalar(outcome: &Outcome, param: usize, element: usize) -> Scalar {
    let mut states = [0.0; 3];
    for (wide, state) in states.iter_mut().zip(&outcome.states[param]) {
        *wide = f64::from(state[element]);
    }
    let steps = outcome.step_counts[param] as i32;
    Scalar { param: f64::from(outcome.params[param][element]), states, steps }
}

/// Asserts that every element of `after` is one step from `before` with the gradients that `after` still holds,
/// divided by `divisor`.
pub(crate) fn assert_one_step(rule: &Rule, before: &Outcome, after: &Outcome, divisor: f64, what: &str) {
    for param in 0..before.params.len() {
        let elements = 0..before.params[param].len();
        let starts: Vec<Scalar> = elements.clone().map(|element| scalar(before, param, element)).collect();
        let gradients: Vec<f64> = after.grads[param].iter().map(|sum| f64::from(*sum) / divisor).collect();
        let mut ends = starts.clone();
        rule.step(&mut ends, &gradients);
        let bounds = bounds(rule, &starts, &ends, &gradients);
        for element in elements {
            let (start, got) = (starts[element], scalar(after, param, element));
            let (expected, bound, gradient) = (ends[element], bounds[element], gradients[element]);
            let close = |a: f64, b: f64, bound: f64| (a - b).abs() <= bound;
            let states = (0..after.states[param].len())
                .all(|k| close(got.states[k], expected.states[k], bound.states[k]));
            let same = close(got.param, expected.param, bound.param) && states && got.steps == expected.steps;
            assert!(
                same,
                "p{param}[{element}], {what}: {start:?} became {got:?}, not {expected:?}; {bound:?}, gradient {gradient:e}"
            );
        }
    }
}

/// Makes a checked pass with painted gradients.
fn checked_step(stepper: &mut Stepper, optim: Optim, options: &Options, step: usize, what: &str) -> Outcome {
    let before = Outcome::of(stepper).unwrap();
    let paint = painted(options);
    pass(stepper, options, |param, values| paint(step, param, values)).unwrap();
    let after = Outcome::of(stepper).unwrap();
    let clip = after.status.clip;
    assert_one_step(&optim.rule(), &before, &after, options.divisor() / clip, what);
    after
}

#[test]
fn every_optimizer_follows_the_reference_for_any_world_size_and_loss_scale() {
    let layout = layout(&LENGTHS);
    for optim in optimizers() {
        for world_size in [1, 3, 8] {
            for loss_scale in [1.0, 1024.0] {
                let options = Options { world_size, loss_scale, cap: Some(4096), ..Options::default() };
                let what = format!("{optim:?} over {world_size} ranks, loss scale {loss_scale}");
                let mut stepper = open(&layout, optim, &options);
                for step in 0..STEPS {
                    checked_step(&mut stepper, optim, &options, step, &format!("step {step} of {what}"));
                }
            }
        }
    }
}

#[test]
fn every_mode_and_instruction_set_follows_the_reference() {
    let layout = layout(&LENGTHS);
    for optim in few_optimizers() {
        for mode in [Mode::Eager, Mode::Normed] {
            for isa in Isa::available() {
                let options = Options { mode, isa: Some(isa), cap: Some(4096), ..Options::default() };
                let mut stepper = open(&layout, optim, &options);
                for step in 0..STEPS {
                    let what = format!("step {step} of {optim:?}, {mode:?}, {isa}");
                    checked_step(&mut stepper, optim, &options, step, &what);
                }
            }
        }
    }
}

/// The bound allows for signs of Lion that rounding may change; few elements may use this allowance.
#[test]
fn hardly_any_sign_of_lion_is_within_its_rounding() {
    let (layout, options) = (layout(&LENGTHS), Options::default());
    for optim in optimizers() {
        let Rule::Lion(lion) = optim.rule() else { continue };
        let mut stepper = open(&layout, optim, &options);
        let (mut undecided, mut all) = (0, 0);
        for step in 0..STEPS {
            let before = Outcome::of(&stepper).unwrap();
            let after = checked_step(&mut stepper, optim, &options, step, "signs");
            for (param, len) in LENGTHS.into_iter().enumerate() {
                for element in 0..len {
                    let gradient = f64::from(after.grads[param][element]);
                    let start = scalar(&before, param, element);
                    undecided += usize::from(is_undecided(&lion, &start, gradient));
                    all += 1;
                }
            }
        }
        println!("{undecided} of {all} signs are undecided: {optim:?}");
        assert!(undecided * 10_000 < all, "{undecided} of {all}: {optim:?}");
    }
}

#[test]
fn rprops_step_size_changes_where_the_product_of_two_gradients_would_underflow() {
    let optim = Optim::of(Rprop::default());
    let outcome = run(&layout(&[3]), optim, &Options::default(), 2, |step, _, values| {
        let sign = [1.0, if step == 0 { 1.0 } else { -1.0 }, 0.0];
        values.iter_mut().zip(sign).for_each(|(g, sign)| *g = sign * 1e-30);
        true
    });
    let lr = 0.01f32;
    assert_eq!(outcome.states[0][1], [lr * 1.2, lr * 0.5, lr]);
    assert_eq!(outcome.states[0][0], [1e-30, 0.0, 0.0]);
}

#[test]
fn the_first_momentum_buffer_is_a_plain_copy_of_the_gradient() {
    let layout = layout(&[257]);
    for nesterov in [false, true] {
        let dampening = if nesterov { 0.0 } else { 0.5 };
        let optim = Optim::of(Sgd { lr: 0.05, momentum: 0.9, dampening, nesterov, ..Sgd::default() });
        let options = Options::default();
        let outcome = run(&layout, optim, &options, 1, painted(&options));
        assert_eq!(outcome.states[0][0], outcome.grads[0], "neither momentum nor dampening enters it");
        assert!(outcome.grads[0].iter().any(|g| *g != 0.0));
    }
}

#[test]
fn step_counts_count_updates_and_nothing_else() {
    let layout = layout(&[5, 0, 300]);
    for optim in few_optimizers() {
        let options = Options::default();
        let mut stepper = open(&layout, optim, &options);
        let (first, empty) = (layout.id("p0").unwrap(), layout.id("p1").unwrap());
        assert_eq!(stepper.step_count(first).unwrap(), 0);
        for step in 1..=3 {
            pass(&mut stepper, &options, |param, values| painted(&options)(step, param, values)).unwrap();
            assert_eq!(stepper.step_count(first).unwrap(), step as u64);
        }
        // Nothing of an empty parameter is ever updated.
        assert_eq!(stepper.step_count(empty).unwrap(), 0);
    }
}

#[test]
fn clipping_multiplies_the_mean_gradients_by_the_coefficient_of_torch() {
    let layout = layout(&LENGTHS);
    for optim in few_optimizers() {
        for mode in [Mode::Sequential, Mode::Normed] {
            for (world_size, loss_scale) in [(1, 1.0), (3, 1024.0), (8, 1.0)] {
                // The painted norm is about 33: clipped hard, and not at all.
                for max_norm in [0.5, 1000.0] {
                    let max = Some(max_norm);
                    let options = Options {
                        mode,
                        world_size,
                        loss_scale,
                        max_norm: max,
                        cap: Some(4096),
                        ..Options::default()
                    };
                    let mut stepper = open(&layout, optim, &options);
                    for step in 0..3 {
                        let what = format!("{optim:?}, {mode:?}, max_norm {max_norm}, world {world_size}");
                        let after = checked_step(&mut stepper, optim, &options, step, &what);
                        let sums = after.grads.iter().flatten();
                        let norm = norm(sums.map(|sum| f64::from(*sum) / options.divisor()));
                        let expected = clip_coefficient(norm, max_norm);
                        let clip = after.status.clip;
                        assert!(
                            (clip - expected).abs() <= 1e-15 * expected,
                            "{clip} is not {expected}: {what}"
                        );
                        assert_eq!(
                            expected < 1.0,
                            max_norm == 0.5,
                            "the case clips as it is meant to: {norm}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn the_norm_is_that_of_the_mean_gradients_to_the_last_digits() {
    // A leaf of squares passes 8 f64 additions, which the root halves; the root, 1/divisor and their product add
    // three roundings: at most 7 * 2^-53 = 7.8e-16, and the reference's own is 2 * 2^-53.
    let tolerance = 9.0 / (1u64 << 53) as f64;
    for (mode, skip_nonfinite) in [(Mode::Normed, false), (Mode::Sequential, true)] {
        for (world_size, loss_scale) in [(1, 1.0), (3, 1024.0), (8, 0.125)] {
            let options = Options { mode, skip_nonfinite, world_size, loss_scale, ..Options::default() };
            for scale in [1.0f32, 1e-20, 1e18] {
                // Sums of squares from 1e-46 to 1e42, one of them beyond f32.
                let paint = painted(&options);
                let gradient = |step: usize, param: usize, values: &mut [f32]| {
                    paint(step, param, values);
                    values.iter_mut().for_each(|value| *value *= scale);
                    true
                };
                let optim = Optim::of(Sgd { lr: 1e-30, ..Sgd::default() });
                let outcome = run(&layout(&LENGTHS), optim, &options, 2, gradient);
                let means = outcome.grads.iter().flatten().map(|sum| f64::from(*sum) / options.divisor());
                let (got, expected) = (outcome.status.norm.unwrap(), norm(means));
                assert!(
                    expected > 0.0 && (got - expected).abs() <= tolerance * expected,
                    "{got} is not {expected}"
                );
            }
        }
    }
}

#[test]
fn eager_and_plain_sequential_report_no_norm_and_no_clip() {
    for mode in [Mode::Eager, Mode::Sequential] {
        let options = Options { mode, ..Options::default() };
        let outcome = run(&layout(&[300]), Optim::of(Adam::default()), &options, 2, painted(&options));
        assert_eq!((outcome.status.norm, outcome.status.clip, outcome.status.pass), (None, 1.0, 2));
    }
}
