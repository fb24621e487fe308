//! T-AOB: optimizers in backward without a collective, as PyTorch tests `_apply_optimizer_in_backward`.
//!
//! The model has two layers of ten by ten, and is compared after each of six iterations. Every gradient is handed over
//! where backward makes it, so steps run beside the rest of backward.

use std::any::Any;

use instep::optim::{Custom, ParamStep, StepParam};
use instep::{Adam, Error, Layout, Mode, ParamId, Result, Sgd, Solo, Stepper};

use super::network::{Activation, Linear, Network, batch, sum};
use super::{Ordinary, assert_close, assert_like, ids};
use crate::support::device::cuda;
use crate::support::reference::{self, Rule};
use crate::support::{MODES, Outcome, assert_same_bits};

const ITERATIONS: usize = 6;

fn sgd(lr: f64) -> Sgd {
    Sgd { lr, ..Sgd::default() }
}

fn rule(lr: f64) -> Rule {
    decaying_rule(lr, 0.0)
}

fn decaying_rule(lr: f64, weight_decay: f64) -> Rule {
    let (momentum, dampening) = (0.0, 0.0);
    Rule::Sgd(reference::Sgd { lr, momentum, dampening, weight_decay, nesterov: false, maximize: false })
}

/// Returns two layers; with `shared`, both use one weight.
fn model(shared: bool) -> (Network, Layout) {
    let linear = |weight, bias| Linear { weight, bias: Some(bias), inputs: 10, outputs: 10 };
    let layers = if shared { vec![linear(0, 1), linear(0, 2)] } else { vec![linear(0, 1), linear(2, 3)] };
    let network = Network::new(layers, Activation::None);
    let layout = if shared {
        Layout::builder().param("weight", 100).uses(2).param("0.bias", 10).param("1.bias", 10)
    } else {
        Layout::builder()
            .param("0.weight", 100)
            .param("0.bias", 10)
            .param("1.weight", 100)
            .param("1.bias", 10)
    };
    (network, layout.build().unwrap())
}

/// Returns the weights and the biases of a layout, by name.
fn kinds(layout: &Layout) -> (Vec<ParamId>, Vec<ParamId>) {
    layout.ids().partition(|id| layout.parameter(*id).unwrap().name.ends_with("weight"))
}

fn initialise(stepper: &mut Stepper, network: &Network) -> Result<()> {
    for (id, values) in ids(stepper).into_iter().zip(network.params()) {
        stepper.write(id, &values.iter().map(|x| *x as f32).collect::<Vec<_>>())?;
    }
    Ok(())
}

/// Runs one iteration of a stepper: backward reads its parameters, and hands every gradient over at once.
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

/// PyTorch steps a shared weight twice per backward if it is listed twice; here the weight must be registered twice for
/// that.
#[test]
fn aob_2_a_shared_weight_is_stepped_as_often_as_it_is_registered() -> Result<()> {
    for times in 1..=2 {
        let (network, layout) = model(true);
        let (weights, biases) = kinds(&layout);
        let mut builder = Stepper::builder_without_optimizer(&layout).optimizer_for(&biases, sgd(0.05));
        for _ in 0..times {
            builder = builder.then_for(&weights, sgd(0.1));
        }
        let rules = |param: usize| if param == 0 { vec![rule(0.1); times] } else { vec![rule(0.05)] };
        assert_parity(builder.host(Solo::default())?, network, rules, &format!("{times} times"))?;
    }
    Ok(())
}

#[test]
fn aob_3_an_attached_optimizer_is_listed_and_steps_nothing() -> Result<()> {
    for mode in MODES {
        let (network, layout) = model(false);
        let all: Vec<ParamId> = layout.ids().collect();
        let builder = || Stepper::builder_without_optimizer(&layout).mode(mode);
        let mut hooked = builder().optimizer_for(&all, sgd(0.1)).host(Solo::default())?;
        let mut attached =
            builder().attach(&all, Adam::default()).attach(&all[..1], sgd(0.1)).host(Solo::default())?;
        for stepper in [&mut hooked, &mut attached] {
            initialise(stepper, &network)?;
            iterate(stepper, &network, 0)?;
        }
        let gradients = network.gradients(&batch(1, 10, 0), sum);
        for (param, id) in all.iter().copied().enumerate() {
            let before: Vec<f32> = network.params()[param].iter().map(|x| *x as f32).collect();
            assert_same_bits(attached.view::<f32>(id)?, &before, &format!("{mode:?}, attached"));
            assert_close(attached.view::<f32>(id.grad())?, &gradients[param], "averaged");
            assert_eq!((attached.step_count(id)?, attached.state_names(id)?.len()), (0, 0));
            assert_ne!(hooked.view::<f32>(id)?, before);
            assert_eq!(attached.optimizers_of(id)?.len(), if param == 0 { 2 } else { 1 });
        }
        assert!(hooked.optimizers().all(|one| one.steps));
        let listed: Vec<_> = attached.optimizers().map(|one| (one.id, one.group, one.steps)).collect();
        let first = attached.optimizers_of(all[0])?;
        assert_eq!(listed, [(first[0], None, false), (first[1], None, false)], "as they were attached");
        // A rate of an optimizer that nothing runs is kept for whoever runs it.
        attached.set_lr(first[1], 0.7)?;
        let sgd = attached.optimizers().nth(1).unwrap().optimizer as &dyn Any;
        assert_eq!(sgd.downcast_ref::<Sgd>().unwrap().lr, 0.7);
    }
    Ok(())
}

#[test]
fn an_attached_optimizer_changes_no_bit_of_what_another_steps() -> Result<()> {
    let (network, layout) = model(false);
    let all: Vec<ParamId> = layout.ids().collect();
    let run = |attaches: bool| {
        let builder = Stepper::builder(&layout, Sgd { momentum: 0.9, ..sgd(0.1) });
        let builder = if attaches { builder.attach(&all, Adam::default()) } else { builder };
        let mut stepper = builder.host(Solo::default())?;
        initialise(&mut stepper, &network)?;
        (0..ITERATIONS).try_for_each(|iteration| iterate(&mut stepper, &network, iteration))?;
        Outcome::of(&stepper)
    };
    run(true)?.assert_same(&run(false)?, "attached or not");
    Ok(())
}

/// A user's own optimizer, which only the host can run, is allowed on a GPU that does not have to run it.
#[test]
fn what_is_attached_need_not_reach_the_device_and_must_be_of_the_layout() {
    struct OnTheHost;
    impl StepParam for OnTheHost {
        fn name(&self) -> &str {
            "on the host"
        }

        fn step_param(&self, _: ParamStep<'_>) -> Result<()> {
            unreachable!("nothing runs it")
        }
    }
    let (_, layout) = model(false);
    let all: Vec<ParamId> = layout.ids().collect();
    let builder = || Stepper::builder(&layout, sgd(0.1)).attach(&all, Custom::new(OnTheHost));
    // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
    let mut stepper = unsafe { builder().cuda(Solo::default(), &cuda()) }.unwrap();
    let mut pass = stepper.begin().unwrap();
    pass.write(all[1].grad(), &[1.0; 10]).unwrap();
    pass.finish().unwrap();
    assert_eq!(stepper.step_count(all[1]).unwrap(), 1);
    let other = crate::support::layout(&[1; 9]).ids().last().unwrap();
    let refused = builder().attach(&[other], sgd(0.1)).host(Solo::default());
    assert!(matches!(refused, Err(Error::Layout(_))), "{refused:?}");
}

#[test]
fn aob_4_two_optimizers_of_one_parameter_step_it_in_turn() -> Result<()> {
    // PyTorch's configuration gives the same in either order; with a decay in the second one it does not.
    for (mode, weight_decay) in MODES.into_iter().flat_map(|mode| [0.0, 5.0].map(|decay| (mode, decay))) {
        let (network, layout) = model(false);
        let all: Vec<ParamId> = layout.ids().collect();
        let stepper = Stepper::builder_without_optimizer(&layout)
            .optimizer_for(&all, sgd(0.03))
            .then_for(&all, Sgd { weight_decay, ..sgd(0.01) })
            .mode(mode)
            .host(Solo::default())?;
        let rules = |_| vec![rule(0.03), decaying_rule(0.01, weight_decay)];
        assert_parity(stepper, network, rules, &format!("{mode:?}, decay {weight_decay}"))?;
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
