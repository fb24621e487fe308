//! A small network with a pass without gradients, a layer that is frozen and unfrozen, and every optimizer.
//!
//! PyTorch has this acceptance test of its fused optimizers; here the f64 reference replaces the plain loop. The
//! reference counts its own steps, so a bias correction that continued during the pause would show. Parameters that
//! pause keep their bits.

use instep::{Mode, Result, Stepper};

use crate::support::reference::Scalar;
use crate::support::{MODES, Optim, Options, Outcome, layout, open, optimizers};

/// Weights and offsets of a network 2 -> 3 -> 1 with sigmoids, and a parameter without dimensions.
const LENGTHS: [usize; 5] = [6, 3, 3, 1, 1];
/// The parameters that are frozen for some passes.
const FIRST_LAYER: [usize; 2] = [0, 1];
const PASSES: usize = 7;

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns the gradients of the network's output at one point.
fn backward(params: &[Vec<f32>], input: [f32; 2]) -> [Vec<f32>; 5] {
    let [w1, b1, w2, b2, _] = params else { unreachable!() };
    let hidden: Vec<f32> =
        (0..3).map(|j| sigmoid(b1[j] + w1[2 * j] * input[0] + w1[2 * j + 1] * input[1])).collect();
    let output = sigmoid(b2[0] + w2.iter().zip(&hidden).map(|(w, h)| w * h).sum::<f32>());
    let slope = output * (1.0 - output);
    let inner: Vec<f32> = (0..3).map(|j| slope * w2[j] * hidden[j] * (1.0 - hidden[j])).collect();
    let outer = inner.iter().flat_map(|g| input.map(|x| g * x)).collect();
    [outer, inner, hidden.iter().map(|h| slope * h).collect(), vec![slope], vec![0.75]]
}

/// Compares within PyTorch's tolerance for f32; a NaN is never close.
fn assert_close(got: f32, expected: f64, what: &str) {
    let distance = (f64::from(got) - expected).abs();
    assert!(distance <= 1e-5 + 1.3e-6 * expected.abs(), "{what}: {got} is not {expected}");
}

fn freeze_first_layer(stepper: &mut Stepper, frozen: bool) -> Result<()> {
    let layout = stepper.layout().clone();
    let ids: Vec<_> = layout.ids().collect();
    FIRST_LAYER.iter().try_for_each(|param| stepper.set_frozen(ids[*param], frozen))
}

fn train_in_turns(optim: Optim, mode: Mode, cap: Option<u64>) {
    let layout = layout(&LENGTHS);
    let options = Options { mode, cap, ..Options::default() };
    let mut stepper = open(&layout, optim, &options);
    let ids: Vec<_> = layout.ids().collect();
    let mut before = Outcome::of(&stepper).unwrap();
    let wide = |param: &Vec<f32>| -> Vec<Scalar> {
        param.iter().map(|x| Scalar { param: f64::from(*x), ..Scalar::default() }).collect()
    };
    let mut reference: Vec<Vec<Scalar>> = before.params.iter().map(wide).collect();
    for at in 0..PASSES {
        let what = format!("pass {at} of {optim:?}, {mode:?}, cap {cap:?}");
        if at == 3 || at == 5 {
            freeze_first_layer(&mut stepper, at == 3).unwrap();
        }
        let rests = |param: usize| at == 2 || ((3..5).contains(&at) && FIRST_LAYER.contains(&param));
        let mut gradients = backward(&before.params, [0.1 * (at + 1) as f32, 0.7 - 0.2 * at as f32]);
        if at == 2 {
            gradients.iter_mut().for_each(Vec::clear);
        }
        let mut pass = stepper.begin().unwrap();
        for param in (0..LENGTHS.len()).rev().filter(|param| !rests(*param)) {
            pass.grads().write(ids[param], &gradients[param]).unwrap();
            pass.grad_ready(ids[param]).unwrap();
        }
        pass.finish().unwrap();
        let after = Outcome::of(&stepper).unwrap();
        for param in 0..LENGTHS.len() {
            if rests(param) {
                after.assert_same_param(param, &before, param, &what);
                continue;
            }
            let wide: Vec<f64> = gradients[param].iter().map(|g| f64::from(*g)).collect();
            optim.rule().step(&mut reference[param], &wide);
            for (element, scalar) in reference[param].iter().enumerate() {
                let what = format!("p{param}[{element}], {what}");
                assert_close(after.params[param][element], scalar.param, &what);
                for (state, expected) in after.states[param].iter().zip(scalar.states) {
                    assert_close(state[element], expected, &what);
                }
                assert_eq!(after.step_counts[param], scalar.steps as u64, "{what}");
            }
        }
        before = after;
    }
    assert_eq!(before.step_counts, [4, 4, 6, 6, 6]);
}

#[test]
fn a_network_whose_first_layer_rests_in_turns_follows_the_reference_with_its_own_step_counts() {
    for optim in optimizers() {
        for mode in MODES {
            for cap in [None, Some(1)] {
                train_in_turns(optim, mode, cap);
            }
        }
    }
}
