//! PyTorch's own acceptance tests of the overlapped optimizers, and what those leave out.
//!
//! Configurations are theirs, but for static graphs, which nothing here declares. Of ResNet50 there are the shapes alone.
//! Each test names the one it stands for. What an ordinary optimizer would have done is computed in f64
//! (`reference/optimizers.rs`), on gradients of the same network in f64; agreement is within the tolerance of PyTorch's
//! harness for f32. Bits are compared where two of our own runs must agree.

mod accumulating;
mod clipped;
mod ddp;
mod in_backward;
mod late;
mod network;
mod optimizers;
mod overlapped;
mod ownership;
mod ranks;
mod resnet;

use instep::{Device, ParamId, Result, Stepper};

use crate::support::reference::{Rule, Scalar};
use network::Network;

/// `torch.testing.assert_close` for f32.
fn assert_close(ours: &[f32], theirs: &[f64], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (k, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        let distance = (f64::from(*ours) - theirs).abs();
        assert!(distance <= 1e-5 + 1.3e-6 * theirs.abs(), "{what}[{k}]: {ours} instead of {theirs}");
    }
}

/// Ordinary optimizers: every parameter in f64, with its list of rules and what each remembers.
struct Ordinary {
    params: Vec<(Vec<Rule>, Vec<Vec<Scalar>>)>,
    lens: Vec<usize>,
}

impl Ordinary {
    fn new(network: &Network, rules: impl Fn(usize) -> Vec<Rule>) -> Ordinary {
        let scalars = |values: &[f64]| -> Vec<Scalar> {
            values.iter().map(|param| Scalar { param: *param, ..Scalar::default() }).collect()
        };
        let param = |(k, values): (usize, &Vec<f64>)| {
            let rules = rules(k);
            let states = rules.iter().map(|_| scalars(values)).collect();
            (rules, states)
        };
        let params = network.params().iter().enumerate().map(param).collect();
        Ordinary { params, lens: network.params().iter().map(Vec::len).collect() }
    }

    /// A further rule of a parameter, which has counted these steps already.
    fn add(&mut self, param: usize, rule: Rule, steps: u64) {
        let (rules, remembered) = &mut self.params[param];
        rules.push(rule);
        let len = self.lens[param];
        remembered.push(vec![Scalar { steps: steps as i32, ..Scalar::default() }; len]);
    }

    /// One update of a parameter by each of its rules in turn.
    fn step(&mut self, network: &mut Network, param: usize, gradient: &[f64]) {
        let (rules, remembered) = &mut self.params[param];
        for (rule, scalars) in rules.iter().zip(remembered) {
            let values = &mut network.params_mut()[param];
            scalars.iter_mut().zip(&*values).for_each(|(scalar, value)| scalar.param = *value);
            rule.step(scalars, gradient);
            values.iter_mut().zip(scalars).for_each(|(value, scalar)| *value = scalar.param);
        }
    }

    /// A state of a parameter's `k`-th rule.
    fn state(&self, param: usize, rule: usize, state: usize) -> Vec<f64> {
        self.params[param].1[rule].iter().map(|scalar| scalar.states[state]).collect()
    }

    fn steps(&self, param: usize) -> u64 {
        self.params[param].1.first().and_then(|all| all.first()).map_or(0, |scalar| scalar.steps as u64)
    }
}

fn ids<D: Device>(stepper: &Stepper<D>) -> Vec<ParamId> {
    stepper.layout().ids().collect()
}

/// Parameters, every state and the step count, against ordinary optimizers.
fn assert_like(stepper: &Stepper, network: &Network, ordinary: &Ordinary, what: &str) -> Result<()> {
    for (param, id) in ids(stepper).into_iter().enumerate() {
        let name = &stepper.layout().parameter(id)?.name;
        assert_close(stepper.view::<f32>(id)?, &network.params()[param], &format!("{what}: {name}"));
        let states = stepper.state_names(id)?;
        let rule_of =
            |state: &str| -> usize { state.split_once('#').map_or(0, |(_, rule)| rule.parse().unwrap()) };
        for (k, state) in states.iter().enumerate() {
            let rule = rule_of(state);
            let index = states[..k].iter().filter(|earlier| rule_of(earlier) == rule).count();
            let expected = ordinary.state(param, rule, index);
            assert_close(stepper.view::<f32>(id.state(state))?, &expected, &format!("{what}: {state}"));
        }
        assert_eq!(stepper.step_count(id)?, ordinary.steps(param), "{what}: {name}");
    }
    Ok(())
}
