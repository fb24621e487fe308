//! T-OPT-1, 6 and 11: the arithmetic of the optimizers, as PyTorch tests its fused ones, with states and counts.
//!
//! PyTorch compares only parameters if a gradient is infinite; these tests compare every state. Parameters that are
//! frozen, without gradient or not finite keep their bits.

use instep::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, Layout, LossScaler, Mode, Result, RmsProp, Sgd, Solo, Stepper,
    in_process,
};

use super::network::{Activation, Linear, Network, batch, draw, sum};
use super::ranks::{as_f32, initialise, layout_of, own};
use super::{Ordinary, assert_like, ids};
use crate::support::{
    MODES, Optim, Outcome, assert_same_bits, few_optimizers, layout, optimizers, paint_gradient, paint_params,
};

/// Returns a network of two inputs, three hidden units and one output, with one element that no layer uses.
fn perceptron() -> Network {
    let layers = [(2, 3), (3, 1)].into_iter().enumerate().map(|(k, (inputs, outputs))| Linear {
        weight: 2 * k,
        bias: Some(2 * k + 1),
        inputs,
        outputs,
    });
    let mut network = Network::new(layers.collect(), Activation::Sigmoid);
    network.push(vec![0.75]);
    network
}

/// Returns the gradient of the element that no layer uses.
fn lone(iteration: usize, rank: usize) -> Vec<f64> {
    vec![f64::from(draw(5000 + iteration, rank) as f32)]
}

fn samples(iteration: usize, rank: usize) -> Vec<Vec<f64>> {
    batch(2, 2, 8 * iteration + rank)
}

#[test]
fn opt_1_seven_iterations_one_without_gradients_two_with_a_frozen_layer() {
    let cases = optimizers().into_iter().flat_map(|optim| MODES.map(|mode| (optim, mode)));
    for ((optim, mode), ranks) in cases.flat_map(|case| [(case, 1), (case, 3)]) {
        in_process(ranks, |comm| {
            let (rank, mut network) = (comm.rank() as usize, perceptron());
            let layout = layout_of(&network);
            let mut stepper = optim.builder(&layout).mode(mode).bucket_cap_bytes(20).host(comm)?;
            initialise(&mut stepper, &network)?;
            let (all, mut ordinary) = (ids(&stepper), Ordinary::new(&network, |_| vec![optim.rule()]));
            for iteration in 0..7 {
                let what = format!("{optim:?}, {mode:?}, rank {rank} of {ranks}, iteration {iteration}");
                let is_frozen = |param: usize| (3..5).contains(&iteration) && param < 2;
                (0..2).try_for_each(|param| stepper.set_frozen(all[param], is_frozen(param)))?;
                let before = Outcome::of(&stepper)?;
                let mut pass = stepper.begin()?;
                if iteration != 2 {
                    let mut gradients = own(&pass, &network, &all)?.backward(&samples(iteration, rank), sum);
                    gradients.push((4, lone(iteration, rank)));
                    for (param, gradient) in gradients.into_iter().filter(|(param, _)| !is_frozen(*param)) {
                        pass.grads().write(all[param], &as_f32(&gradient))?;
                        pass.grad_ready(all[param])?;
                    }
                }
                pass.finish()?;
                if iteration == 2 {
                    Outcome::of(&stepper)?.assert_same(&before, &what);
                    continue;
                }
                let everything: Vec<Vec<f64>> =
                    (0..ranks as usize).flat_map(|rank| samples(iteration, rank)).collect();
                let mut mean =
                    network.gradients(&everything, |output| vec![1.0 / f64::from(ranks); output.len()]);
                mean[4] =
                    vec![(0..ranks as usize).map(|r| lone(iteration, r)[0]).sum::<f64>() / f64::from(ranks)];
                for (param, gradient) in mean.iter().enumerate() {
                    if is_frozen(param) {
                        Outcome::of(&stepper)?.assert_same_param(param, &before, param, &what)
                    } else {
                        ordinary.step(&mut network, param, gradient)
                    }
                }
                assert_like(&stepper, &network, &ordinary, &what)?;
            }
            stepper.close()
        })
        .unwrap();
    }
}

const LENGTHS: [usize; 3] = [300, 1, 17];

/// Makes one pass with gradients multiplied by the loss scale; that of the last parameter may be infinite.
fn scaled_pass(stepper: &mut Stepper, step: usize, is_infinite: bool, is_scaled: bool) -> Result<()> {
    let ids = ids(stepper);
    let mut pass = stepper.begin()?;
    let scale = if is_scaled { pass.loss_scale()? as f32 } else { 1.0 };
    for (param, id) in ids.into_iter().enumerate().rev() {
        let mut values: Vec<f32> =
            (0..LENGTHS[param]).map(|k| paint_gradient(step, param, k) * scale).collect();
        if is_infinite && param == 2 {
            values[16] = f32::INFINITY;
        }
        pass.grads().write(id, &values)?;
        pass.grad_ready(id)?;
    }
    pass.finish()
}

#[test]
fn opt_6_a_found_infinity_changes_no_bit_and_no_first_step_is_lost() {
    let layout = layout(&LENGTHS);
    let dampened = Optim::of(Sgd { lr: 0.05, momentum: 0.9, dampening: 0.5, ..Sgd::default() });
    let scaler = LossScaler { initial_scale: 1024.0, growth_interval: 2, ..LossScaler::default() };
    let started = Optim::of(Adagrad { initial_accumulator_value: 0.5, ..Adagrad::default() });
    for optim in few_optimizers().into_iter().chain([dampened, started]) {
        for (mode, is_scaled) in
            [Mode::Normed, Mode::Sequential].into_iter().flat_map(|m| [(m, false), (m, true)])
        {
            let open = || {
                let builder = optim.builder(&layout).mode(mode);
                let builder =
                    if is_scaled { builder.loss_scale(scaler) } else { builder.skip_nonfinite(true) };
                let mut stepper = builder.host(Solo::default()).unwrap();
                paint_params(&mut stepper);
                stepper
            };
            let (mut met, mut never) = (open(), open());
            for step in 0..4 {
                let what = format!("{optim:?}, {mode:?}, scaled: {is_scaled}, step {step}");
                let before = Outcome::of(&met).unwrap();
                // Twice in a row, so that the second follows a skipped pass.
                for _ in 0..2 {
                    scaled_pass(&mut met, step, true, is_scaled).unwrap();
                    let after = Outcome::of(&met).unwrap();
                    after.assert_same(&before, &what);
                    assert!(after.status.skipped, "{what}");
                    assert_eq!(after.step_counts, [step as u64; 3], "{what}");
                }
                scaled_pass(&mut met, step, false, is_scaled).unwrap();
                scaled_pass(&mut never, step, false, is_scaled).unwrap();
                Outcome::of(&met).unwrap().assert_same(&Outcome::of(&never).unwrap(), &what);
                if step == 0 && optim.keywords().any(|given| given == ("dampening", 0.5)) {
                    let first: Vec<f32> = (0..LENGTHS[0]).map(|k| paint_gradient(0, 0, k)).collect();
                    let buffer = met.view::<f32>(ids(&met)[0].state("momentum_buffer")).unwrap();
                    assert_same_bits(buffer, &first, "the first buffer is the gradient, undampened");
                }
            }
        }
    }
}

/// The rows of T-OPT-11: rate and decay of the weights' group, and of the biases' group.
const GROUPS: [[(f64, f64); 2]; 3] =
    [[(1e-3, 0.1), (1e-3, 0.0)], [(1e-3, 0.0), (1e-3, 0.1)], [(1e-3, 0.0), (4e-3, 0.0)]];

fn kinds(lr: f64, weight_decay: f64, maximize: bool) -> [Optim; 8] {
    let sgd = Sgd { lr, weight_decay, maximize, ..Sgd::default() };
    [
        Optim::of(sgd),
        Optim::of(Sgd { momentum: 0.9, nesterov: true, ..sgd }),
        Optim::of(Adam { lr, weight_decay, maximize, ..Adam::default() }),
        Optim::of(AdamW { lr, weight_decay, maximize, amsgrad: true, ..AdamW::default() }),
        Optim::of(Adagrad { lr, weight_decay, maximize, ..Adagrad::default() }),
        Optim::of(RmsProp { lr, weight_decay, maximize, ..RmsProp::default() }),
        Optim::of(Adadelta { lr, weight_decay, maximize, ..Adadelta::default() }),
        Optim::of(Adamax { lr, weight_decay, maximize, ..Adamax::default() }),
    ]
}

#[test]
fn opt_11_groups_have_decay_and_rates_of_their_own_and_the_loss_falls_or_rises() {
    let layer = Linear { weight: 0, bias: Some(1), inputs: 5, outputs: 10 };
    let start = Network::new(vec![layer], Activation::None);
    let layout =
        Layout::builder().param("weight", 50).in_group("weights").param("bias", 10).in_group("biases");
    let layout = layout.build().unwrap();
    let input = batch(1, 5, 0);
    let loss = |network: &Network| network.output(&input[0]).iter().map(|y| y * y).sum::<f64>();
    let slope = |output: &[f64]| output.iter().map(|y| 2.0 * y).collect();
    for (maximize, mode) in [false, true].into_iter().flat_map(|m| MODES.map(|mode| (m, mode))) {
        for (kind, groups) in (0..8).flat_map(|kind| GROUPS.map(|groups| (kind, groups))) {
            let [weights, biases] = groups.map(|(lr, weight_decay)| kinds(lr, weight_decay, maximize)[kind]);
            let what = format!("{weights:?}, {biases:?}, {mode:?}");
            let builder = Stepper::builder_without_optimizer(&layout).mode(mode);
            let builder = builder.group("weights", weights.boxed()).group("biases", biases.boxed());
            let mut stepper = builder.host(Solo::default()).unwrap();
            let (all, mut network) = (ids(&stepper), start.clone());
            initialise(&mut stepper, &network).unwrap();
            let mut ordinary = Ordinary::new(&network, |param| vec![[weights, biases][param].rule()]);
            let mut losses = vec![loss(&network)];
            for step in 0..20 {
                let mut pass = stepper.begin().unwrap();
                let trained = own(&pass, &network, &all).unwrap();
                for (param, gradient) in trained.backward(&input, slope) {
                    pass.grads().write(all[param], &as_f32(&gradient)).unwrap();
                    pass.grad_ready(all[param]).unwrap();
                }
                pass.finish().unwrap();
                for (param, gradient) in network.gradients(&input, slope).iter().enumerate() {
                    ordinary.step(&mut network, param, gradient);
                }
                assert_like(&stepper, &network, &ordinary, &format!("{what}, step {step}")).unwrap();
                losses.push(loss(&network));
            }
            let (first, last) = (losses[0], losses[20]);
            assert!(if maximize { last > first } else { last < first }, "{what}: from {first} to {last}");
        }
    }
}
