//! Checks every gradient of a small network against the measured slope of its loss, one weight at a time.
//!
//! The optimizer never steps here: passes are abandoned before a gradient is handed over.

use std::error::Error;

use instep::{ParamId, Sgd, Solo, Stepper};

use crate::data::{CLASSES, PIXELS, Samples};
use crate::model::{Network, Tape, lay_out};

/// The change of a weight: large enough to change the loss beyond f32 rounding, and small enough that the loss is
/// nearly linear.
const SHIFT: f32 = 1e-3;

#[test]
fn every_gradient_is_the_slope_of_the_loss() -> Result<(), Box<dyn Error>> {
    let widths = [PIXELS, 20, 17, CLASSES];
    let layout = lay_out(&widths)?;
    let network = Network::new(&layout, &widths)?;
    let mut tape = Tape::default();
    let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
    network.initialise(&mut stepper)?;
    let samples = Samples::load()?;
    let mut batches = samples.draw_batches(1, 0, 8);
    let (batch, other) = (batches.next().ok_or("no batch")?, batches.next().ok_or("no second batch")?);

    // A first pass leaves old gradients in memory, so the second one shows that they are replaced.
    compute_gradients(&network, &mut stepper, &other, &mut tape)?;
    for (id, gradient) in compute_gradients(&network, &mut stepper, &batch, &mut tape)? {
        assert!(gradient.iter().any(|slope| slope.abs() > 0.01));
        for (element, slope) in gradient.iter().enumerate() {
            let value = stepper.view::<f32>(id)?[element];
            let mut measure_loss = |shifted: f32| {
                stepper.view_mut::<f32>(id)?[element] = shifted;
                network.forward::<f32>(&mut stepper, &batch, &mut tape).map(|score| score.loss)
            };
            let (above, below) = (measure_loss(value + SHIFT)?, measure_loss(value - SHIFT)?);
            let here = measure_loss(value)?;
            let (rise, fall) = ((above - here) / f64::from(SHIFT), (here - below) / f64::from(SHIFT));
            // If a ReLU changes its slope within the shift, it does so on one side only.
            let error = (rise - f64::from(*slope)).abs().min((fall - f64::from(*slope)).abs());
            let name = &layout.parameter(id)?.name;
            assert!(error < 1e-3, "{name}[{element}]: {slope}, but measured {fall} and {rise}");
        }
    }
    Ok(())
}

/// Returns the gradients of all parameters, from one pass that steps nothing.
fn compute_gradients(
    network: &Network,
    stepper: &mut Stepper,
    batch: &Samples,
    tape: &mut Tape,
) -> instep::Result<Vec<(ParamId, Vec<f32>)>> {
    let mut pass = stepper.begin()?;
    let mut gradients = Vec::new();
    network.forward::<f32>(&mut pass, batch, tape)?;
    for layer in network.layers.iter().rev() {
        let (params, mut grads) = pass.split();
        layer.backward::<f32>(params, &mut grads, tape)?;
        for id in [layer.bias, layer.weight] {
            gradients.push((id, grads.get_mut(id)?.to_vec()));
        }
    }
    pass.abandon()?;
    Ok(gradients)
}
