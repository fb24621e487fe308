//! Stochastically rounded 8-bit states: each becomes a neighbouring code, and the mean of the stored values is the
//! value.
//!
//! The tests know a state's value after a step, and draw its code for many elements, updates and seeds. They compare
//! the mean of values, not of codes, because codes are not linear in values. Some draws are repeated so often that a
//! mean that is right only for roots would fail.

use instep::{
    Adagrad, Moments, Optimizer as _, ParamId, Precision, Rounding, Sgd, Solo, Stepper, StepperBuilder,
};

use crate::precision::eight_bit::{KINDS, value};
use crate::support::layout;
use crate::support::tolerance::U;

const BLOCK: usize = 256;

fn largest_code(is_signed: bool) -> f64 {
    if is_signed { 127.0 } else { 255.0 }
}

/// Returns the code that would represent x exactly, with a fraction.
fn exact_code(is_signed: bool, x: f64, scale: f64) -> f64 {
    let share = x.abs() / scale;
    largest_code(is_signed) * if is_signed { share.sqrt() } else { share.sqrt().sqrt() }
}

/// The scale is the first element of a block. All others cycle through the tested shares.
const SHARES: [f64; 9] = [0.9, 0.5, 0.13, 0.01, 0.0008, 0.00014, 0.00009, 0.00002, 0.0];
const ELEMENTS: usize = 128 * BLOCK;

/// Draws codes for gradients whose state after one step is known: returns the stored values of many updates, by
/// element.
fn drawn(
    builder: StepperBuilder<'_>,
    id: ParamId,
    name: &str,
    gradients: &[f32],
    updates: u64,
) -> Vec<Vec<f32>> {
    let mut stepper = builder.host(Solo::default()).unwrap();
    let mut states = Vec::new();
    for update in 0..updates {
        stepper.write(id.state(name), &vec![0.0; ELEMENTS]).unwrap();
        stepper.set_step_count(id, update).unwrap();
        let mut pass = stepper.begin().unwrap();
        pass.write(id.grad(), gradients).unwrap();
        pass.finish().unwrap();
        let mut state = vec![0.0; ELEMENTS];
        stepper.read(id.state(name), &mut state).unwrap();
        states.push(state);
    }
    states
}

#[test]
fn by_chance_a_value_becomes_a_neighbour_and_the_mean_is_the_value() {
    let layout = layout(&[ELEMENTS]);
    let id = layout.id("p0").unwrap();
    for is_signed in KINDS {
        let scale = 3.0f64;
        let share = |k: usize| if k.is_multiple_of(BLOCK) { 1.0 } else { SHARES[k % SHARES.len()] };
        // Of either sign, or the root of what Adagrad's sum is to be.
        let of = |k: usize| {
            if is_signed {
                (share(k) * scale * if k.is_multiple_of(2) { 1.0 } else { -1.0 }) as f32
            } else {
                (share(k) * scale).sqrt() as f32
            }
        };
        let gradients: Vec<f32> = (0..ELEMENTS).map(of).collect();
        let exact: Vec<f32> = gradients.iter().map(|g| if is_signed { *g } else { g * g }).collect();
        let scale = f64::from(exact[0]);
        let (mut sums, mut counts) = ([0f64; SHARES.len()], [0f64; SHARES.len()]);
        for seed in [1, 2, u64::MAX] {
            let rounding = Rounding::Stochastic { seed };
            let precision = Precision { moments: Moments::EightBit, rounding, ..Precision::F32 };
            let (sgd, adagrad) = (Sgd { momentum: 0.9, lr: 0.0, ..Sgd::default() }, Adagrad::default());
            let (builder, name) = if is_signed {
                (Stepper::builder(&layout, sgd), sgd.state_names()[0])
            } else {
                (Stepper::builder(&layout, adagrad), adagrad.state_names()[0])
            };
            for state in drawn(builder.precision(precision), id, name, &gradients, 8) {
                for (k, (stored, x)) in state.iter().zip(&exact).enumerate() {
                    let what = format!("element {k}, {x:e} of {scale:e} became {stored:e}");
                    let (stored, x) = (f64::from(*stored), f64::from(*x));
                    let codes = [stored, x].map(|x| exact_code(is_signed, x, scale));
                    let smallest = if is_signed || x == 0.0 { 0.0 } else { 1.0 };
                    let distance = (codes[0] - codes[1].max(smallest)).abs();
                    assert!(distance < 1.0 + 8.0 * U * largest_code(is_signed), "{what}");
                    assert!(stored * x >= 0.0 && (x != 0.0 || stored == 0.0), "{what}");
                    if !k.is_multiple_of(BLOCK) {
                        sums[k % SHARES.len()] += stored.abs();
                        counts[k % SHARES.len()] += 1.0;
                    } else {
                        assert_eq!(stored, x, "{what}");
                    }
                }
            }
        }
        for (k, share) in SHARES.iter().enumerate() {
            let x = share * scale;
            let below = exact_code(is_signed, x, scale).floor() as u8;
            if below as f64 >= largest_code(is_signed) || (!is_signed && below == 0) {
                continue;
            }
            let [low, high] = [below, below + 1].map(|code| value(is_signed, code, scale));
            let above = (x - low) / (high - low);
            let sigma = (above * (1.0 - above) / counts[k]).sqrt() * (high - low);
            // A chance has 16 bits, and a value a few roundings.
            let rounded = (high - low) / 65536.0 + 16.0 * U * high;
            let error = (sums[k] / counts[k] - x).abs();
            assert!(
                error <= 5.0 * sigma + rounded,
                "signed: {is_signed}, {share}: off by {error:e}, sigma {sigma:e}"
            );
            // So fine that a mean of the roots, which are not linear in the code, would show.
            let root = exact_code(is_signed, x, scale) - f64::from(below);
            let biased = ((low + root * (high - low)) - x).abs();
            assert!(below > 2 || root < 0.05 || biased > 10.0 * sigma, "{share}: this tells nothing");
        }
    }
}
