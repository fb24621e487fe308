//! Averages change by less than half a place in a step: they stand still with rounding to nearest, and move with
//! stochastic rounding.
//!
//! The documentation of Moments::BF16 and Moments::EightBit has these figures. Bounds are five standard deviations, and
//! every change comes from a step.

use instep::{AdamW, Mode, Moments, Precision, Rounding, Solo, Stepper};

use crate::support::layout;

const SEED: u64 = 17;

fn mean(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x)).sum::<f64>() / values.len() as f64
}

#[test]
fn a_bf16_second_moment_of_decay_0_999_never_falls_to_the_nearest_and_does_by_chance() {
    const UPDATES: i32 = 1000;
    let layout = layout(&[4096]);
    let id = layout.id("p0").unwrap();
    let run = |rounding| {
        let precision = Precision { moments: Moments::BF16, rounding, ..Precision::F32 };
        let builder = Stepper::builder(&layout, AdamW::default()).mode(Mode::Sequential).threads(1);
        let mut stepper = builder.precision(precision).host(Solo::default()).unwrap();
        let start: Vec<f32> = (0..4096).map(|k| 1.0 + (k % 128) as f32 / 128.0).collect();
        stepper.write(id.state("exp_avg_sq"), &start).unwrap();
        stepper.set_step_count(id, 1).unwrap();
        for _ in 0..UPDATES {
            let mut pass = stepper.begin().unwrap();
            pass.grads().get_mut(id).unwrap().fill(0.0);
            pass.finish().unwrap();
        }
        let mut state = vec![0.0; 4096];
        stepper.read(id.state("exp_avg_sq"), &mut state).unwrap();
        (start, state)
    };
    let (start, state) = run(Rounding::Nearest);
    assert_eq!(state, start, "1/1000 of it is less than half a place");
    let (start, state) = run(Rounding::Stochastic { seed: SEED });
    let expected = 0.999f64.powi(UPDATES) * mean(&start);
    // A step varies by 1/1000 of the value times a place, 1/128 of it at most; the value is below 2.
    let sigma = (f64::from(UPDATES) * 1e-3 * 4.0 / 128.0 / 4096.0).sqrt();
    assert!((mean(&state) - expected).abs() < 5.0 * sigma, "{}, not {expected}", mean(&state));
}

/// Half of each block of 256 keeps gradients of 1, so its largest second moment stays 1.
#[test]
fn in_8_bits_a_second_moment_below_its_blocks_largest_falls_by_chance_alone() {
    const UPDATES: i32 = 1000;
    let layout = layout(&[4096]);
    let id = layout.id("p0").unwrap();
    let run = |rounding| {
        let precision = Precision { moments: Moments::EightBit, rounding, ..Precision::F32 };
        let builder = Stepper::builder(&layout, AdamW::default()).mode(Mode::Sequential).threads(1);
        let mut stepper = builder.precision(precision).host(Solo::default()).unwrap();
        stepper.write(id.state("exp_avg_sq"), &[1.0; 4096]).unwrap();
        stepper.set_step_count(id, 1).unwrap();
        for _ in 0..UPDATES {
            let mut pass = stepper.begin().unwrap();
            let gradient: Vec<f32> = (0..4096).map(|k| if k % 2 == 0 { 1.0 } else { 0.0 }).collect();
            pass.write(id.grad(), &gradient).unwrap();
            pass.finish().unwrap();
        }
        let mut state = vec![0.0; 4096];
        stepper.read(id.state("exp_avg_sq"), &mut state).unwrap();
        assert!(state.iter().step_by(2).all(|x| *x == 1.0));
        state.into_iter().skip(1).step_by(2).collect::<Vec<f32>>()
    };
    assert!(run(Rounding::Nearest).iter().all(|x| *x == 1.0), "1/1000 is less than half a code");
    let state = run(Rounding::Stochastic { seed: SEED });
    let expected = 0.999f64.powi(UPDATES);
    // A step varies by 1/1000 of the value times the way to the next code, 4/255 at most.
    let sigma = (f64::from(UPDATES) * 1e-3 * 4.0 / 255.0 / 2048.0).sqrt();
    assert!((mean(&state) - expected).abs() < 5.0 * sigma, "{}, not {expected}", mean(&state));
}
