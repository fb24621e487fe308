//! T-AOB: optimizers in backward, without a collective, as `_apply_optimizer_in_backward` is tested.
//!
//! Two layers of ten by ten, six iterations, compared after each. Must hand every gradient over where backward makes it, so
//! that the steps run beside what follows.

use std::any::Any;

use instep::{Layout, Mode, ParamId, Result, Sgd, Solo, Stepper};

use super::network::{Activation, Linear, Network, batch, sum};
use super::{Ordinary, assert_like, ids};
use crate::reference::{self, Rule};
use crate::support::MODES;

const ITERATIONS: usize = 6;

fn sgd(lr: f64) -> Sgd {
    Sgd { lr, ..Sgd::default() }
}

fn rule(lr: f64) -> Rule {
    let (momentum, dampening, weight_decay) = (0.0, 0.0, 0.0);
    Rule::Sgd(reference::Sgd { lr, momentum, dampening, weight_decay, nesterov: false, maximize: false })
}

/// Two layers; `shared` makes both use one weight.
fn model(shared: bool) -> (Network, Layout) {
    let linear = |weight, bias| Linear { weight, bias: Some(bias), inputs: 10, outputs: 10 };
    let layers = if shared { vec![linear(0, 1), linear(0, 2)] } else { vec![linear(0, 1), linear(2, 3)] };
    let network = Network::new(layers, Activation::None);
    let layout = match shared {
        true => Layout::builder().param("weight", 100).uses(2).param("0.bias", 10).param("1.bias", 10),
        false => Layout::builder()
            .param("0.weight", 100)
            .param("0.bias", 10)
            .param("1.weight", 100)
            .param("1.bias", 10),
    };
    (network, layout.build().unwrap())
}

/// Weights and biases of a layout, by name.
fn kinds(layout: &Layout) -> (Vec<ParamId>, Vec<ParamId>) {
    layout.ids().partition(|id| layout.parameter(*id).unwrap().name.ends_with("weight"))
}

fn initialise(stepper: &mut Stepper, network: &Network) -> Result<()> {
    for (id, values) in ids(stepper).into_iter().zip(network.params()) {
        stepper.write_param(id, &values.iter().map(|x| *x as f32).collect::<Vec<_>>())?;
    }
    Ok(())
}

/// One iteration of a stepper: backward at its own parameters, every gradient handed over where it is made.
fn iterate(stepper: &mut Stepper, network: &Network, iteration: usize) -> Result<()> {
    let ids = ids(stepper);
    let mut pass = stepper.begin()?;
    let mut own = network.clone();
    let values: Vec<Vec<f32>> =
        ids.iter().map(|id| Ok(pass.params().get(*id)?.to_vec())).collect::<Result<_>>()?;
    own.set_params(values.into_iter());
    for (param, gradient) in own.backward(&batch(1, 10, iteration), sum) {
        let gradient: Vec<f32> = gradient.into_iter().map(|g| g as f32).collect();
        pass.grads().add(ids[param], &gradient)?;
        pass.grad_ready(ids[param])?;
    }
    pass.finish()
}

/// Trains beside ordinary optimizers and compares after every iteration.
fn assert_parity(
    mut stepper: Stepper,
    mut network: Network,
    rules: impl Fn(usize) -> Vec<Rule>,
    what: &str,
) -> Result<()> {
    initialise(&mut stepper, &network)?;
    let mut ordinary = Ordinary::new(&network, rules);
    for iteration in 0..ITERATIONS {
        iterate(&mut stepper, &network, iteration)?;
        for (param, gradient) in network.gradients(&batch(1, 10, iteration), sum).iter().enumerate() {
            ordinary.step(&mut network, param, gradient);
        }
        assert_like(&stepper, &network, &ordinary, &format!("{what}, iteration {iteration}"))?;
    }
    Ok(())
}

#[test]
fn aob_1_weights_and_biases_follow_optimizers_of_their_own() -> Result<()> {
    for mode in MODES {
        let (network, layout) = model(false);
        let (weights, biases) = kinds(&layout);
        let stepper = Stepper::builder_without_optimizer(&layout)
            .optimizer_for(&weights, sgd(1.0))
            .optimizer_for(&biases, sgd(0.5))
            .mode(mode)
            .host(Solo::default())?;
        let rules = |param: usize| vec![rule(if param.is_multiple_of(2) { 1.0 } else { 0.5 })];
        assert_parity(stepper, network, rules, &format!("{mode:?}"))?;
    }
    Ok(())
}

/// In PyTorch a shared weight that is listed twice is stepped twice in each backward; here that is said by registering
/// twice, and once is once.
#[test]
fn aob_2_a_shared_weight_is_stepped_as_often_as_it_is_registered() -> Result<()> {
    for times in 1..=2 {
        let (network, layout) = model(true);
        let (weights, biases) = kinds(&layout);
        let mut builder = Stepper::builder_without_optimizer(&layout).optimizer_for(&biases, sgd(0.05));
        for _ in 0..times {
            builder = builder.optimizer_for(&weights, sgd(0.1));
        }
        let rules = |param: usize| if param == 0 { vec![rule(0.1); times] } else { vec![rule(0.05)] };
        assert_parity(builder.host(Solo::default())?, network, rules, &format!("{times} times"))?;
    }
    Ok(())
}

#[test]
fn aob_4_two_optimizers_of_one_parameter_step_it_in_turn() -> Result<()> {
    for mode in MODES {
        let (network, layout) = model(false);
        let all: Vec<ParamId> = layout.ids().collect();
        let stepper = Stepper::builder_without_optimizer(&layout)
            .optimizer_for(&all, sgd(0.03))
            .optimizer_for(&all, sgd(0.01))
            .mode(mode)
            .host(Solo::default())?;
        assert_parity(stepper, network, |_| vec![rule(0.03), rule(0.01)], &format!("{mode:?}"))?;
    }
    Ok(())
}

#[test]
fn aob_5_every_parameters_optimizers_are_listed_as_they_were_attached() -> Result<()> {
    let (_, layout) = model(false);
    let (weights, biases) = kinds(&layout);
    let stepper = Stepper::builder_without_optimizer(&layout)
        .optimizer_for(&weights, sgd(1.0))
        .optimizer_for(&biases, sgd(0.5))
        .mode(Mode::Eager)
        .host(Solo::default())?;
    for (of, lr) in [(weights, 1.0), (biases, 0.5)] {
        for id in of {
            let ids = stepper.optimizers_of(id)?;
            assert_eq!(ids.len(), 1, "one per parameter");
            let attached = stepper.optimizers().find(|attached| attached.id == ids[0]).unwrap();
            assert_eq!((attached.optimizer as &dyn Any).downcast_ref::<Sgd>(), Some(&sgd(lr)));
        }
    }
    assert_eq!(stepper.optimizers().len(), 2);
    Ok(())
}
