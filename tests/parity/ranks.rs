//! Ranks train one network on different batches; ordinary training uses the mean of their gradients.
//!
//! Every rank computes gradients in f64 at its stepper's parameters and hands them over as f32 where backward makes
//! them. The ordinary side takes the mean of all batches' gradients. This file does not depend on the tests that use
//! it.

use instep::{Device, Layout, Result, Stepper};

use super::network::{Activation, Linear, Network, batch, sum};
use super::{Ordinary, ids};

pub(super) const RANKS: usize = 3;

/// Returns three layers of three by three.
pub(super) fn three_layers(seed: usize) -> Network {
    let linear = |k: usize| Linear { weight: 2 * k, bias: Some(2 * k + 1), inputs: 3, outputs: 3 };
    Network::seeded((0..3).map(linear).collect(), Activation::None, seed)
}

pub(super) fn layout_of(network: &Network) -> Layout {
    let named = network.params().iter().enumerate();
    named
        .fold(Layout::builder(), |layout, (k, values)| layout.param(format!("p{k}"), values.len()))
        .build()
        .unwrap()
}

/// Returns the batch of one rank.
pub(super) fn batch_of(network: &Network, rank: usize, iteration: usize) -> Vec<Vec<f64>> {
    batch(1, network.layers[0].inputs, 8 * iteration + rank)
}

pub(super) fn initialise<D: Device>(stepper: &mut Stepper<D>, network: &Network) -> Result<()> {
    for (id, values) in ids(stepper).into_iter().zip(network.params()) {
        stepper.write(id, &as_f32(values))?;
    }
    Ok(())
}

pub(super) fn as_f32(values: &[f64]) -> Vec<f32> {
    values.iter().map(|x| *x as f32).collect()
}

/// How a gradient gets into a bucket: PyTorch's `gradient_as_bucket_view`, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Handing {
    InPlace,
    Copied,
}

/// Returns the network with a stepper's parameters, as an open pass reads them.
pub(super) fn own(pass: &instep::Pass<'_>, network: &Network, ids: &[instep::ParamId]) -> Result<Network> {
    let wide = |id: &instep::ParamId| Ok(pass.params().get(*id)?.iter().copied().map(f64::from).collect());
    Ok(network.at(ids.iter().map(wide).collect::<Result<_>>()?))
}

/// Runs one iteration of one rank. `is_used` leaves parameters out.
pub(super) fn iterate_with(
    stepper: &mut Stepper,
    network: &Network,
    batch: &[Vec<f64>],
    handing: Handing,
    is_used: impl Fn(usize) -> bool,
) -> Result<()> {
    let ids = ids(stepper);
    let mut pass = stepper.begin()?;
    for (param, gradient) in own(&pass, network, &ids)?.backward(batch, sum) {
        if !is_used(param) {
            continue;
        }
        match handing {
            Handing::InPlace => {
                let mut grads = pass.grads();
                let slot = grads.get_mut(ids[param])?;
                slot.iter_mut().zip(gradient).for_each(|(slot, g)| *slot = g as f32);
            }
            Handing::Copied => pass.grads().write(ids[param], &as_f32(&gradient))?,
        }
        pass.grad_ready(ids[param])?;
    }
    pass.finish()
}

pub(super) fn iterate(stepper: &mut Stepper, network: &Network, rank: usize, iteration: usize) -> Result<()> {
    iterate_with(stepper, network, &batch_of(network, rank, iteration), Handing::Copied, |_| true)
}

/// Returns the mean over ranks of the gradients of their batches.
pub(super) fn averaged(network: &Network, ranks: usize, iteration: usize) -> Vec<Vec<f64>> {
    let mut mean: Vec<Vec<f64>> = network.params().iter().map(|values| vec![0.0; values.len()]).collect();
    for rank in 0..ranks {
        let gradients = network.gradients(&batch_of(network, rank, iteration), sum);
        for (mean, gradient) in mean.iter_mut().zip(gradients) {
            mean.iter_mut().zip(gradient).for_each(|(mean, g)| *mean += g / ranks as f64);
        }
    }
    mean
}

/// Runs one ordinary iteration on the averaged gradients of the parameters that `is_stepped` selects.
pub(super) fn step_ordinary(
    ordinary: &mut Ordinary,
    network: &mut Network,
    ranks: usize,
    iteration: usize,
    is_stepped: impl Fn(usize) -> bool,
) {
    for (param, gradient) in averaged(network, ranks, iteration).iter().enumerate() {
        if is_stepped(param) {
            ordinary.step(network, param, gradient);
        }
    }
}
