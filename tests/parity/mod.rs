//! PyTorch's own acceptance tests of the overlapped optimizers, and cases that they leave out.
//!
//! The configurations are those of PyTorch, without static graphs, which a caller cannot declare here. ResNet50 is
//! represented only by its shapes. Each test names the PyTorch test that it repeats. Ordinary optimizers are computed
//! in f64 (`reference/optimizers.rs`), on gradients of the same network in f64. Results must agree within PyTorch's
//! test tolerance for f32. Bits are compared where two runs of this crate must agree.

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

/// Compares as `torch.testing.assert_close` does for f32.
fn assert_close(ours: &[f32], theirs: &[f64], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (k, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        let distance = (f64::from(*ours) - theirs).abs();
        assert!(distance <= 1e-5 + 1.3e-6 * theirs.abs(), "{what}[{k}]: {ours} instead of {theirs}");
    }
}

/// Ordinary optimizers: every parameter in f64, with its list of rules and their states.
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

    /// Adds a rule to a parameter, with a step count to start from.
    fn add(&mut self, param: usize, rule: Rule, steps: u64) {
        let (rules, remembered) = &mut self.params[param];
        rules.push(rule);
        let len = self.lens[param];
        remembered.push(vec![Scalar { steps: steps as i32, ..Scalar::default() }; len]);
    }

    /// Updates a parameter by each of its rules in turn.
    fn step(&mut self, network: &mut Network, param: usize, gradient: &[f64]) {
        let (rules, remembered) = &mut self.params[param];
        for (rule, scalars) in rules.iter().zip(remembered) {
            let values = &mut network.params_mut()[param];
            scalars.iter_mut().zip(&*values).for_each(|(scalar, value)| scalar.param = *value);
            rule.step(scalars, gradient);
            values.iter_mut().zip(scalars).for_each(|(value, scalar)| *value = scalar.param);
        }
    }

    /// Returns a state of one of a parameter's rules.
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

/// Asserts that parameters, all states and the step count agree with ordinary optimizers.
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
