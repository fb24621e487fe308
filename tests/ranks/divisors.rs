//! Sums are divided by another number than that of the ranks.
//!
//! The test computes expected values itself, from exact sums.

use instep::{
    Clip, Divisor, Error, Layout, LossScale, LossScaler, Mode, Sgd, Stepper, StepperBuilder, Strategy,
    in_process,
};

use crate::ranks::zero::bucket_of;

fn layout() -> Layout {
    Layout::builder().param("w", 700).param("own", 3).local().build().unwrap()
}

fn sgd(layout: &Layout) -> StepperBuilder<'_> {
    Stepper::builder(layout, Sgd { lr: 1.0, ..Sgd::default() })
}

/// Steps once with gradients of rank + 1. Returns the end values of both parameters, and the norm if there is one.
fn step(
    builder: StepperBuilder<'_>,
    comm: instep::InProcess,
    layout: &Layout,
) -> instep::Result<(f32, f32, Option<f64>)> {
    let gradient = (comm.rank() + 1) as f32;
    let mut stepper = builder.host(comm)?;
    let (w, own) = (layout.id("w")?, layout.id("own")?);
    let mut pass = stepper.begin()?;
    let scale = pass.loss_scale()? as f32;
    pass.grads().get_mut(w)?.fill(gradient * scale);
    pass.grads().get_mut(own)?.fill(gradient * scale);
    pass.finish()?;
    let norm = stepper.status()?.norm;
    let bucket = bucket_of(&stepper, w)?;
    stepper.unshard(bucket)?;
    let values = stepper.view::<f32>(w)?;
    assert!(values.iter().all(|x| x.to_bits() == values[0].to_bits()));
    Ok((values[0], stepper.view::<f32>(own)?[0], norm))
}

#[test]
fn sums_are_divided_by_the_number_that_was_asked_for_in_every_strategy() {
    let layout = layout();
    for strategy in [Strategy::Replicated, Strategy::Zero, Strategy::Fsdp] {
        for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
            for divisor in [1.0, 4.0, 5.0, 3.0, 1000.0] {
                let builder = || sgd(&layout).strategy(strategy).mode(mode).gradient_divisor(divisor);
                let ranks = in_process(4, |comm| step(builder().loss_scale(8.0), comm, &layout)).unwrap();
                // The factor of the step is rounded once, and so is its product with the sum.
                let factor = (1.0 / (8.0 * divisor)) as f32;
                for (rank, (w, own, _)) in ranks.into_iter().enumerate() {
                    assert_eq!(
                        (w, own),
                        (-(80.0 * factor), -(rank as f32 + 1.0)),
                        "{strategy:?}, {mode:?}, {divisor}"
                    );
                }
            }
        }
    }
}

#[test]
fn clips_and_scalers_see_the_divided_gradient() {
    let layout = Layout::builder().param("w", 700).param("own", 3).build().unwrap();
    let scaler = LossScaler { initial_scale: 1024.0, ..LossScaler::default() };
    let ranks = in_process(4, |comm| {
        let builder = sgd(&layout).mode(Mode::Normed).gradient_divisor(5.0).clip(Clip::Global(1e6));
        step(builder.loss_scale(LossScale::Dynamic(scaler)), comm, &layout)
    });
    for (w, own, norm) in ranks.unwrap() {
        assert_eq!((w, own), (-2.0, -2.0));
        // Of 703 elements that are 2.
        assert_eq!(norm, Some((4.0f64 * 703.0).sqrt()));
    }
}

#[test]
fn numbers_that_are_no_divisor_are_refused_and_ranks_must_have_the_same() {
    let layout = layout();
    for wrong in [0.0, 0.5, -4.0, f64::NAN, f64::INFINITY, 16_777_217.0] {
        let refused = sgd(&layout).gradient_divisor(wrong).host(instep::Solo::default()).unwrap_err();
        assert!(
            matches!(&refused, Error::Config { .. }) && refused.to_string().contains("gradient_divisor"),
            "{refused}"
        );
    }
    let counted = sgd(&layout).gradient_divisor(2.0).uneven_inputs(Divisor::ContributingRanks);
    assert!(counted.host(instep::Solo::default()).unwrap_err().to_string().contains("Divisor::WorldSize"));
    let differ = in_process(2, |comm| {
        let builder = sgd(&layout).gradient_divisor(f64::from(comm.rank() + 1));
        Ok(step(builder, comm, &layout).map(drop).unwrap_err().to_string())
    });
    for told in differ.unwrap() {
        assert!(told.contains("gradient_divisor"), "{told}");
    }
}
