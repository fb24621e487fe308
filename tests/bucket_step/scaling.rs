//! Factors of the gradients: those that the caller knows, and those that PyTorch's scaler keeps.
//!
//! A parameter of one element and a rate of 1 show the factor itself.

use instep::bucket_step::{Lent, StepTensors};
use instep::{BucketStep, Error, Layout, Scaling, Sgd};

fn step_once(scaling: Scaling) -> (instep::Result<()>, f32, u64) {
    let layout = Layout::builder().param("w", 1).build().unwrap();
    let mut step = BucketStep::builder(&layout, Sgd { lr: 1.0, ..Default::default() }).host().unwrap();
    let mut params = [0f32];
    let outcome = step.step(&StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&[-24f32])), scaling);
    (outcome, params[0], step.step_count(layout.id("w").unwrap()).unwrap())
}

#[test]
fn all_known_factors_are_divided_out() {
    assert_eq!(step_once(Scaling::NONE).1, 24.0);
    assert_eq!(step_once(Scaling::mean(2)).1, 12.0);
    assert_eq!(step_once(Scaling::mean(2).loss_scale(4.0).clip(0.5)).1, 1.5);
    assert_eq!(step_once(Scaling::NONE.clip(0.0)).1, 0.0);
}

#[test]
fn a_scaler_of_pytorchs_gives_the_scale_and_forbids_the_step() {
    for (found_inf, expected) in [(0.0f32, (1.5, 1)), (1.0, (0.0, 0))] {
        let scale = 8.0f32;
        // SAFETY: both outlive the step.
        let scaling = unsafe { Scaling::mean(2).grad_scaler(&scale, &found_inf) };
        let (outcome, param, steps) = step_once(scaling);
        outcome.unwrap();
        assert_eq!((param, steps), expected);
    }
}

#[test]
fn a_factor_that_cannot_be_divided_out_is_refused_and_nothing_is_written() {
    let cases = [
        (Scaling::mean(0), "world_size"),
        (Scaling::NONE.loss_scale(0.0), "loss_scale"),
        (Scaling::NONE.loss_scale(f64::NAN), "loss_scale"),
        (Scaling::NONE.loss_scale(1e-300), "loss_scale"),
        (Scaling::NONE.loss_scale(1e300), "loss_scale"),
        (Scaling::NONE.clip(1.5), "clip"),
        (Scaling::NONE.clip(f64::NAN), "clip"),
    ];
    for (scaling, name) in cases {
        let (outcome, param, steps) = step_once(scaling);
        assert!(matches!(&outcome, Err(Error::Config { field, .. }) if *field == name), "{outcome:?}");
        assert_eq!((param, steps), (0.0, 0));
    }
}
