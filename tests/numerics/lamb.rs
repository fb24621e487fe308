//! LAMB's own parts: a ratio of norms, and cases without a ratio.
//!
//! Other tests compare the formula with f64. This file has zeros, NaNs and vanishing changes, chosen so that another
//! ratio would show.

use instep::{Lamb, Mode, Solo};

use crate::support::reference::{Rule, Scalar, norm};
use crate::support::tolerance::U;
use crate::support::{
    MODES, Optim, Options, Outcome, assert_same_bits, layout, open, paint, painted, pass, run,
};

pub(crate) fn lamb() -> Lamb {
    Lamb { lr: 0.01, ..Lamb::default() }
}

#[test]
fn a_parameter_of_zeros_moves_by_the_change_itself() {
    let (lr, eps) = (0.25, 1e-3);
    let optim = Optim::of(Lamb { lr, eps, ..lamb() });
    let options = Options::default();
    let layout = layout(&[300]);
    let mut stepper = options.stepper(&layout, optim, Solo::default()).unwrap();
    pass(&mut stepper, &options, |param, values| painted(&options)(0, param, values)).unwrap();
    let after = Outcome::of(&stepper).unwrap();
    for (p, g) in after.params[0].iter().zip(&after.grads[0]) {
        // The moments of a first step are g and its square.
        let g = f64::from(*g);
        let expected = -lr * g / (g.abs() + eps);
        assert!((f64::from(*p) - expected).abs() <= 16.0 * U * expected.abs(), "{p} is not {expected}");
    }
    assert!(after.params[0].iter().any(|p| *p != 0.0));
}

#[test]
fn where_nothing_changes_the_ratio_is_one_and_every_bit_stays() {
    let optim = Optim::of(Lamb { weight_decay: 0.0, ..lamb() });
    let zeros = |_: usize, _: usize, values: &mut [f32]| {
        values.fill(0.0);
        true
    };
    let layout = layout(&[300, 1]);
    let start = run(&layout, optim, &Options::default(), 0, zeros);
    let after = run(&layout, optim, &Options::default(), 3, zeros);
    assert_eq!(after.step_counts, [3, 3]);
    for (now, before) in after.params.iter().zip(&start.params) {
        assert_same_bits(now, before, "no gradient and no decay");
    }
}

#[test]
fn a_gradient_that_is_not_finite_spoils_its_own_element_and_leaves_the_others_a_ratio_of_one() {
    const SPOILT: usize = 7;
    let (layout, optim) = (layout(&[300, 40]), Optim::of(lamb()));
    for (mode, bad) in MODES.into_iter().zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
        let options = Options { mode, ..Options::default() };
        let paint = painted(&options);
        let feed = |step: usize, param: usize, values: &mut [f32]| {
            paint(step, param, values);
            if param == 0 {
                values[SPOILT] = bad;
            }
            true
        };
        let (before, after) =
            (run(&layout, optim, &options, 0, feed), run(&layout, optim, &options, 1, feed));
        assert!(!after.status.skipped && after.params[0][SPOILT].to_bits() == 0x7fff_ffff, "{bad}");
        let Rule::Lamb(rule) = optim.rule() else { unreachable!() };
        for (param, has_ratio) in [(0, false), (1, true)] {
            let mut moved: Vec<Scalar> = before.params[param].iter().map(|p| wide(*p)).collect();
            let gradients: Vec<f64> = after.grads[param].iter().map(|g| f64::from(*g)).collect();
            optim.rule().step(&mut moved, &gradients);
            // The ratio itself, from the moments of a first step.
            let starts = moved.iter().zip(&before.params[param]);
            let starts: Vec<Scalar> = starts.map(|(x, p)| Scalar { param: f64::from(*p), ..*x }).collect();
            assert_eq!((rule.ratio(&starts) - 1.0).abs() > 0.1, has_ratio, "it would show");
            for (k, (p, start)) in after.params[param].iter().zip(&starts).enumerate() {
                let expected = start.param - rule.lr * rule.ratio(&starts) * rule.change(start);
                let close = (f64::from(*p) - expected).abs() <= 1e-6;
                assert!(close || (param, k) == (0, SPOILT), "p{param}[{k}], {bad}: {p} is not {expected}");
            }
        }
    }
}

#[test]
fn a_parameter_that_is_not_finite_spoils_its_own_element_and_leaves_the_others_a_ratio_of_one() {
    const SPOILT: usize = 7;
    let (layout, options, lr) = (layout(&[300]), Options::default(), 0.01);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for weight_decay in [0.0, 0.01] {
            let mut stepper = open(&layout, Optim::of(Lamb { lr, weight_decay, ..lamb() }), &options);
            let mut params: Vec<f32> = (0..300).map(|k| paint(0, k)).collect();
            params[SPOILT] = bad;
            stepper.write(layout.id("p0").unwrap(), &params).unwrap();
            pass(&mut stepper, &options, |param, values| painted(&options)(0, param, values)).unwrap();
            let after = Outcome::of(&stepper).unwrap();
            for (k, (p, start)) in
                after.params[0].iter().zip(&params).enumerate().filter(|(k, _)| *k != SPOILT)
            {
                // A first change is the gradient's sign, but for eps.
                let g = f64::from(after.grads[0][k]);
                let change = g / (g.abs() + 1e-6) + weight_decay * f64::from(*start);
                let expected = f64::from(*start) - lr * change;
                assert!(
                    (f64::from(*p) - expected).abs() <= 1e-6,
                    "{bad}, {weight_decay}, {k}: {p} is not {expected}"
                );
            }
        }
    }
}

fn wide(param: f32) -> Scalar {
    Scalar { param: f64::from(param), ..Scalar::default() }
}

/// A few of the smallest subnormals stay in the first moment for ever. The ratio that would make a whole step of them
/// is beyond f32.
#[test]
fn a_parameter_without_gradients_stays_finite_when_its_change_has_all_but_vanished() {
    const PASSES: i32 = 2000;
    let optim = Optim::of(Lamb { weight_decay: 0.0, ..Lamb::default() });
    let options = Options { mode: Mode::Eager, threads: Some(1), ..Options::default() };
    let mut stepper = open(&layout(&[64]), optim, &options);
    let Rule::Lamb(rule) = optim.rule() else { unreachable!() };
    let length = |outcome: &Outcome| norm(outcome.params[0].iter().map(|p| f64::from(*p)));
    let start = length(&Outcome::of(&stepper).unwrap());
    let mut capped = 0;
    for at in 0..PASSES {
        let feed = |_: usize, values: &mut [f32]| {
            values.iter_mut().enumerate().for_each(|(k, g)| {
                *g = if at == 0 { 2.0 + paint(0, k) } else { 0.0 };
            });
            true
        };
        pass(&mut stepper, &options, feed).unwrap();
        let outcome = Outcome::of(&stepper).unwrap();
        assert!(outcome.params[0].iter().all(|p| p.is_finite()), "pass {at}");
        // A change is as long as lr times the parameter, or shorter.
        let longest = start * ((1.0 + rule.lr) * (1.0 + 8.0 * U)).powi(at + 1);
        let now = length(&outcome);
        assert!(now <= longest, "pass {at}: {now} is above {longest}");
        let scalar = |k: usize| {
            let states = [outcome.states[0][0][k], outcome.states[0][1][k], 0.0].map(f64::from);
            Scalar { param: f64::from(outcome.params[0][k]), states, steps: at + 1 }
        };
        let tensor: Vec<Scalar> = (0..64).map(scalar).collect();
        capped += i32::from(rule.lr * rule.ratio(&tensor) > f64::from(f32::MAX));
    }
    assert!(capped > PASSES / 4, "{capped} passes of {PASSES} would have had an infinite scale");
}
