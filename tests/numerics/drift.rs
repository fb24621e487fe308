//! 10^5 updates against f64: rounding may make values wander, but must not push them in one direction.
//!
//! Gradients and bounds are such that the usual formulas fail. beta*v + (1-beta)*g^2 in f32 has a steady bias of 1.3e-5
//! at beta = 0.999. p*(1 - lr*weight_decay) is wrong by 19 % for a decay of 1e-7. Bounds follow from the roundings and
//! are never fitted to a result.

use instep::{Adam, AdamW, Adamax, Mode, Solo};

use crate::support::reference::{Rule, Scalar};
use crate::support::tolerance::U;
use crate::support::{Optim, Options, Outcome, layout, paint_params, pass};

const ELEMENTS: usize = 48;
const STEPS: usize = 100_000;

/// Returns a wandering value in [-1, 1). Its period, the prime 1000003, is longer than the run.
fn wander(step: usize, element: usize) -> f32 {
    ((step * 377_291 + element * 618_033) % 1_000_003) as f32 / 500_001.5 - 1.0
}

/// Runs kernel and reference from the same start, and returns the start and both ends.
fn race(
    optim: Optim,
    steps: usize,
    gradient: impl Fn(usize, usize) -> f32,
) -> (Outcome, Outcome, Vec<Scalar>) {
    // One thread: a pass of one small bucket is all hand-over, and the machine has other tests to run.
    let options = Options { mode: Mode::Eager, threads: Some(1), ..Options::default() };
    let mut stepper = options.stepper(&layout(&[ELEMENTS]), optim, Solo::default()).unwrap();
    paint_params(&mut stepper);
    let start = Outcome::of(&stepper).unwrap();
    let widen = |p: &f32| Scalar { param: f64::from(*p), ..Scalar::default() };
    let mut wide: Vec<Scalar> = start.params[0].iter().map(widen).collect();
    let rule: Rule = optim.rule();
    for step in 0..steps {
        let feed = |_: usize, values: &mut [f32]| {
            values.iter_mut().enumerate().for_each(|(element, value)| *value = gradient(step, element));
            let gradients: Vec<f64> = values.iter().map(|value| f64::from(*value)).collect();
            rule.step(&mut wide, &gradients);
            true
        };
        pass(&mut stepper, &options, feed).unwrap();
    }
    (start, Outcome::of(&stepper).unwrap(), wide)
}

/// Standard deviation of rounding to nearest, as a multiple of U and of the result's size. Half an ulp is U just above
/// a power of two and less elsewhere, and the error is uniform over +-half an ulp.
const ROUNDING: f64 = 0.577_350_269; // 1/sqrt(3)

/// Number of deviations that a sum of independent roundings never reaches in practice (p = 6e-7).
const DEVIATIONS: f64 = 5.0;

/// Standard deviation of v's relative error. A rounding of v fades by 1-w per step, so the variances add up to 1/(2w -
/// w^2) of one. The roundings inside the increment are w times smaller and negligible.
fn second_moment_deviation(beta2: f64) -> f64 {
    let w = 1.0 - beta2;
    ROUNDING * U / (2.0 * w - w * w).sqrt()
}

fn assert_no_bias_of_the_moments(got: &Outcome, wide: &[Scalar], largest_gradient: f64) {
    // m forgets in ten steps, so its worst case is tight enough: every step rounds the kept part once and the moved
    // part four times (see `tolerance`), and the sum over the memory is 1/w of that.
    let w = 0.1;
    let m_bound = U * (largest_gradient + 4.0 * w * 2.0 * largest_gradient) / w;
    let deviation = second_moment_deviation(0.999);
    let mut mean = 0.0;
    for (element, scalar) in wide.iter().enumerate() {
        let m = f64::from(got.states[0][0][element]);
        assert!((m - scalar.states[0]).abs() <= m_bound, "m[{element}] is {m}, not {}", scalar.states[0]);
        let v = f64::from(got.states[0][1][element]);
        let relative = v / scalar.states[1] - 1.0;
        assert!(relative.abs() <= DEVIATIONS * deviation, "v[{element}] is off by {relative:e} of itself");
        mean += relative / wide.len() as f64;
    }
    let bound = DEVIATIONS * deviation / (wide.len() as f64).sqrt();
    assert!(mean.abs() <= bound, "v has a bias of {mean:e} of itself, more than {bound:e}");
}

/// Each step rounds p once, independently; a change with a wrong factor shows in the total distance.
fn assert_p_only_wanders(got: &Outcome, start: &Outcome, wide: &[Scalar], way: f64) {
    // Five constants and operations at 2 U and the root, which halves v's error.
    let change_error = DEVIATIONS * second_moment_deviation(0.999) / 2.0 + 10.0 * U;
    for (element, scalar) in wide.iter().enumerate() {
        let p = f64::from(got.params[0][element]);
        let largest = scalar.param.abs().max(f64::from(start.params[0][element].abs()));
        let half_ulp = U * 2f64.powf(largest.log2().floor()); // of the largest value on the way
        let walk = DEVIATIONS * ROUNDING * half_ulp * (STEPS as f64).sqrt();
        let (bound, error) = (walk + change_error * way, p - scalar.param);
        assert!(error.abs() <= bound, "p[{element}] is {p}, off by {error:e}; the bound is {bound:e}");
    }
}

#[test]
fn adam_does_not_drift_in_a_hundred_thousand_steps() {
    let optim = Optim::of(Adam { lr: 1e-5, ..Adam::default() });
    let (start, got, wide) = race(optim, STEPS, |step, element| 0.5 + 0.25 * wander(step, element));
    assert_no_bias_of_the_moments(&got, &wide, 0.75);
    assert_p_only_wanders(&got, &start, &wide, 1.0);
}

#[test]
fn adamw_decays_by_1e_7_a_hundred_thousand_times_without_drift() {
    let optim = Optim::of(AdamW { lr: 1e-5, weight_decay: 1e-2, ..AdamW::default() });
    // Mostly noise: the change dithers p by many ulps, and the decay is what remains.
    let (start, got, wide) = race(optim, STEPS, |step, element| 0.05 + 0.5 * wander(step, element));
    assert_no_bias_of_the_moments(&got, &wide, 0.55);
    assert_p_only_wanders(&got, &start, &wide, 1.0);
}

/// Without noise the increment of v falls below half an ulp before v reaches the constant, in any formula. No f32
/// average comes closer from below, and none may be further away.
#[test]
fn a_constant_gradient_leaves_the_averages_within_half_an_ulp_over_their_weight() {
    let constants = |_: usize, element: usize| 0.1 + element as f32 / 64.0;
    let (_, got, wide) = race(Optim::of(Adam::default()), STEPS / 5, constants);
    for (element, scalar) in wide.iter().enumerate() {
        for (state, w) in [(0, 0.1), (1, 1e-3)] {
            let (value, exact) = (f64::from(got.states[0][state][element]), scalar.states[state]);
            // Beside the rounding of the sum: g*g, and difference, weight and product, which are of the last w.
            let bound = U * (1.0 / w + 5.0) * exact;
            assert!((value - exact).abs() <= bound, "state {state} of {element} is {value}, not {exact}");
        }
    }
}

/// After one gradient there are only zeros: the maximum then is beta2 to the power of the steps, as far as f32 can
/// represent it.
#[test]
fn the_maximum_of_adamax_fades_without_drift() {
    let optim = Optim::of(Adamax { eps: 0.0, ..Adamax::default() });
    let steps = STEPS / 10;
    let once = |step: usize, element: usize| if step == 0 { 0.1 + element as f32 / 64.0 } else { 0.0 };
    let (_, got, wide) = race(optim, steps, once);
    // A rounding of the difference at each step, and the weight's, of what it takes away.
    let weight = 1e-3;
    let bound = DEVIATIONS * ROUNDING * U * (steps as f64).sqrt() + 3.0 * U * weight * steps as f64;
    for (element, scalar) in wide.iter().enumerate() {
        let relative = f64::from(got.states[0][1][element]) / scalar.states[1] - 1.0;
        assert!(
            relative.abs() <= bound,
            "u[{element}] is off by {relative:e} of itself, more than {bound:e}"
        );
    }
}
