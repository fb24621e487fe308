//! The f64 reference against numbers that `torch.optim` itself computed, in `tests/numerics/vectors.txt`.
//!
//! All other tests use the reference; this one compares it with PyTorch, one step at a time.
//! `tests/numerics/vectors.py` says how the file is made. The crate takes no part: both sides are f64 programs, so
//! bounds are those of f64.

use std::collections::HashMap;

use crate::support::reference::{AdEmaMix, Lamb, Lion, NAdam, RAdam, Rule, Scalar, norm};

/// Unit roundoff of f64.
const U: f64 = 1.0 / (1u64 << 53) as f64;

/// Number of roundings of any one number in both programs: at most 4 in each, without powers.
const OPS: f64 = 8.0;

/// Returns the names of a rule's states, in the order of [`Scalar::states`].
fn state_names(rule: &Rule) -> &'static [&'static str] {
    match rule {
        Rule::Sgd(_) => &["momentum_buffer"],
        Rule::Adam(_) => &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
        Rule::Adagrad(_) => &["sum"],
        Rule::RmsProp(rule) if rule.momentum == 0.0 => &["square_avg", "grad_avg"],
        Rule::RmsProp(_) => &["square_avg", "momentum_buffer", "grad_avg"],
        Rule::Adadelta(_) => &["square_avg", "acc_delta"],
        Rule::Adamax(_) => &["exp_avg", "exp_inf"],
        Rule::Rprop(_) => &["prev", "step_size"],
        Rule::Lion(_) => &["exp_avg"],
        Rule::AdEmaMix(_) => &["exp_avg_fast", "exp_avg_slow", "exp_avg_sq"],
        Rule::NAdam(_) | Rule::RAdam(_) | Rule::Lamb(_) => &["exp_avg", "exp_avg_sq"],
    }
}

/// The values of each key, in order of appearance.
type Block = HashMap<String, Vec<Vec<String>>>;

fn blocks() -> Vec<Block> {
    let text = include_str!("vectors.txt");
    let parse = |block: &str| {
        let mut keys = Block::new();
        for line in block.lines().filter(|line| !line.starts_with('#')) {
            let (key, values) = line.split_once(" = ").unwrap_or_else(|| panic!("no value: {line}"));
            let values = values.split(' ').map(str::to_owned).collect();
            keys.entry(key.to_owned()).or_default().push(values);
        }
        keys
    };
    text.split("\n\n").map(parse).collect()
}

fn numbers(values: &[String]) -> Vec<f64> {
    values.iter().map(|value| value.parse().unwrap_or_else(|e| panic!("{value}: {e}"))).collect()
}

fn rule(case: &Block) -> Rule {
    let text = |key: &str| case[key][0][0].as_str();
    let number = |key: &str| match text(key) {
        "true" => 1.0,
        "false" => 0.0,
        number => number.parse().unwrap_or_else(|e| panic!("{key} = {number}: {e}")),
    };
    Rule::named(text("optimizer"), &number)
}

/// Returns [`bound`] for every element of a tensor.
fn bounds(rule: &Rule, before: &[Scalar], after: &[Scalar], gradients: &[f64]) -> Vec<(f64, [f64; 3])> {
    let elements = before.iter().zip(after).zip(gradients);
    let mut bounds: Vec<_> =
        elements.map(|((before, after), gradient)| bound(rule, before, after, *gradient)).collect();
    if let Rule::Lamb(lamb) = rule {
        let params = lamb_params(lamb, before, after, gradients);
        bounds.iter_mut().zip(params).for_each(|(bound, param)| bound.0 = param);
    }
    bounds
}

/// Returns the possible distance of two f64 programs after one step from the same numbers: for the parameter and each
/// state.
///
/// Every operation is wrong by U of its result, and a result is no larger than the sizes of its inputs. Where numbers
/// cancel, only their sizes bound the error.
fn bound(rule: &Rule, before: &Scalar, after: &Scalar, gradient: f64) -> (f64, [f64; 3]) {
    match rule {
        Rule::Sgd(sgd) => {
            let g = gradient.abs() + sgd.weight_decay * before.param.abs();
            let buffer = sgd.momentum * before.states[0].abs() + (1.0 + sgd.dampening) * g;
            // Nesterov adds the gradient and a share of the buffer, three more roundings.
            let moved = sgd.lr * if sgd.momentum == 0.0 { g } else { buffer + g };
            (OPS * U * (before.param.abs() + 2.0 * moved), [OPS * U * buffer, 0.0, 0.0])
        }
        Rule::Adam(adam) => {
            let coupled = if adam.decoupled { 0.0 } else { adam.weight_decay };
            let g = gradient.abs() + coupled * before.param.abs();
            // torch's lerp is m + w*(g - m) or g - (1-w)*(g - m), so m enters whole and not by its share.
            let m = OPS * U * (before.states[0].abs() + g);
            let v = OPS * U * (adam.beta2 * before.states[1] + (1.0 - adam.beta2) * g * g);
            let largest = if adam.amsgrad { v } else { 0.0 };
            let second_moment = if adam.amsgrad { after.states[2] } else { after.states[1] };
            // A power has one rounding per factor; subtracting it from 1 magnifies them.
            let powers = |beta: f64| f64::from(after.steps) * U / (1.0 - beta.powi(after.steps));
            let [m_hat_per_m, v_hat_per_v] =
                [adam.beta1, adam.beta2].map(|beta| 1.0 / (1.0 - beta.powi(after.steps)));
            let denominator = (second_moment * v_hat_per_v).sqrt() + adam.eps;
            let step = adam.lr * m_hat_per_m / denominator;
            let of_root = of_root(v, second_moment);
            let relative = OPS * U + powers(adam.beta1) + powers(adam.beta2) / 2.0 + of_root;
            let param = OPS * U * before.param.abs() + step * (m + after.states[0].abs() * relative);
            (param, [m, v, largest])
        }
        Rule::Adagrad(rule) => {
            let g = gradient.abs() + rule.weight_decay * before.param.abs();
            let sum = OPS * U * (after.states[0] + g * g);
            let rate = rule.lr / (1.0 + f64::from(before.steps) * rule.lr_decay);
            let change = rate * g / (after.states[0].sqrt() + rule.eps);
            (
                OPS * U * before.param.abs() + change * (OPS * U + of_root(sum, after.states[0])),
                [sum, 0.0, 0.0],
            )
        }
        Rule::RmsProp(rule) => {
            let g = gradient.abs() + rule.weight_decay * before.param.abs();
            let average = |old: f64, new: f64| OPS * U * (rule.alpha * old.abs() + (1.0 - rule.alpha) * new);
            let mut states = [average(before.states[0], g * g), 0.0, 0.0];
            let (mut variance, mut of_variance) = (after.states[0], states[0]);
            if rule.centered {
                let k = if rule.momentum == 0.0 { 1 } else { 2 };
                // torch's lerp again.
                states[k] = OPS * U * (before.states[k].abs() + g);
                let mean = after.states[k].abs();
                variance -= mean * mean;
                of_variance += OPS * U * mean * mean + 2.0 * mean * states[k];
            }
            let scaled = g / (variance.sqrt() + rule.eps);
            let kept = rule.momentum * before.states[1].abs();
            let change = OPS * U * kept + scaled * (OPS * U + of_root(of_variance, variance));
            if rule.momentum != 0.0 {
                states[1] = change;
            }
            (OPS * U * (before.param.abs() + rule.lr * (scaled + kept)) + rule.lr * change, states)
        }
        Rule::Adadelta(rule) => {
            let g = gradient.abs() + rule.weight_decay * before.param.abs();
            let average = |old: f64, new: f64| OPS * U * (rule.rho * old + (1.0 - rule.rho) * new);
            let v = average(before.states[0], g * g);
            let change = ((before.states[1] + rule.eps) / (after.states[0] + rule.eps)).sqrt() * g;
            let relative = OPS * U + of_root(v, after.states[0] + rule.eps);
            let u = average(before.states[1], change * change)
                + (1.0 - rule.rho) * 2.0 * change * change * relative;
            let param = OPS * U * before.param.abs() + rule.lr * change * relative;
            (param, [v, u, 0.0])
        }
        Rule::Adamax(rule) => {
            let g = gradient.abs() + rule.weight_decay * before.param.abs();
            let m = OPS * U * (before.states[0].abs() + g);
            let u = OPS * U * (after.states[1] + g);
            let power = f64::from(after.steps) * U / (1.0 - rule.beta1.powi(after.steps));
            let step = rule.lr / (1.0 - rule.beta1.powi(after.steps)) / after.states[1];
            let relative = OPS * U + power + u / after.states[1];
            let param = OPS * U * before.param.abs() + step * (m + after.states[0].abs() * relative);
            (param, [m, u, 0.0])
        }
        Rule::Rprop(_) => rprop_bound(before, after),
        Rule::Lion(lion) => lion_bound(lion, before, gradient),
        Rule::NAdam(nadam) => nadam_bound(nadam, before, after, gradient),
        Rule::RAdam(radam) => radam_bound(radam, before, after, gradient),
        Rule::AdEmaMix(rule) => ademamix_bound(rule, before, after, gradient),
        Rule::Lamb(lamb) => {
            let (m, v, _) = moments((lamb.beta1, lamb.beta2), before, after, gradient.abs());
            (0.0, [m, v, 0.0]) // the parameter's is its tensor's to say
        }
    }
}

/// Returns the bounds of LAMB's parameters: the change is off by the moments' errors, and the ratio has the relative
/// error of all changes together.
fn lamb_params(lamb: &Lamb, before: &[Scalar], after: &[Scalar], gradients: &[f64]) -> Vec<f64> {
    let [mut changes, mut errors] = [const { Vec::new() }; 2];
    for ((before, after), gradient) in before.iter().zip(after).zip(gradients) {
        let (m, _, of_v) = moments((lamb.beta1, lamb.beta2), before, after, gradient.abs());
        let relative = 2.0 * OPS * U
            + correction(lamb.beta1, after.steps)
            + correction(lamb.beta2, after.steps) / 2.0
            + of_v;
        let denominator = (after.states[1] / (1.0 - lamb.beta2.powi(after.steps))).sqrt() + lamb.eps;
        let rate = 1.0 / ((1.0 - lamb.beta1.powi(after.steps)) * denominator);
        let decay = lamb.weight_decay * before.param.abs();
        errors.push(rate * (m + after.states[0].abs() * relative) + OPS * U * decay);
        changes.push(lamb.change(&Scalar { param: before.param, ..*after }));
    }
    let param_norm = norm(before.iter().map(|x| x.param));
    let change_norm = norm(changes.iter().copied());
    let (ratio, of_ratio) = (param_norm / change_norm, norm(errors.iter().copied()) / change_norm + OPS * U);
    let moved = |(change, error): (&f64, &f64)| lamb.lr * ratio * (error + change.abs() * of_ratio);
    let moved = changes.iter().zip(&errors).map(moved);
    moved.zip(before).map(|(moved, before)| OPS * U * before.param.abs() + moved).collect()
}

/// Returns the relative error of a root, half of that of the value; a value of 0 has no error.
fn of_root(error: f64, value: f64) -> f64 {
    if value == 0.0 { 0.0 } else { error / value / 2.0 }
}

/// Returns first and second moment, and the relative error of the root of the second.
fn moments(betas: (f64, f64), before: &Scalar, after: &Scalar, g: f64) -> (f64, f64, f64) {
    let m = OPS * U * (before.states[0].abs() + g);
    let v = OPS * U * (betas.1 * before.states[1] + (1.0 - betas.1) * g * g);
    (m, v, of_root(v, after.states[1]))
}

/// Returns the relative error of 1 - beta^t, which has one rounding per factor.
fn correction(beta: f64, steps: i32) -> f64 {
    f64::from(steps) * U / (1.0 - beta.powi(steps))
}

fn rprop_bound(before: &Scalar, after: &Scalar) -> (f64, [f64; 3]) {
    let size = OPS * U * after.states[1];
    (OPS * U * before.param.abs() + 2.0 * size, [0.0, size, 0.0])
}

/// Each direction in the file is either zero or farther from zero than its rounding error.
fn lion_bound(lion: &Lion, before: &Scalar, gradient: f64) -> (f64, [f64; 3]) {
    let moved = lion.lr * (1.0 + lion.weight_decay * before.param.abs());
    let m = OPS * U * (before.states[0].abs() + gradient.abs());
    (OPS * U * (before.param.abs() + moved), [m, 0.0, 0.0])
}

fn nadam_bound(nadam: &NAdam, before: &Scalar, after: &Scalar, gradient: f64) -> (f64, [f64; 3]) {
    let coupled = if nadam.decoupled_weight_decay { 0.0 } else { nadam.weight_decay };
    let g = gradient.abs() + coupled * before.param.abs();
    let (m, v, of_v) = moments((nadam.beta1, nadam.beta2), before, after, g);
    let (of_gradient, of_average) = nadam.shares(after.steps);
    // Two roundings per momentum of the product, which 1 - product magnifies.
    let product = nadam.mu_product(after.steps);
    let of_product = 3.0 * f64::from(after.steps) * U * product / (1.0 - product);
    let denominator = (after.states[1] / (1.0 - nadam.beta2.powi(after.steps))).sqrt() + nadam.eps;
    let relative = 2.0 * OPS * U + correction(nadam.beta2, after.steps) / 2.0 + of_v + of_product;
    let direction = of_gradient * g + of_average * (after.states[0].abs() + m);
    let moved = nadam.lr / denominator * (direction * relative + of_average * m + of_gradient * OPS * U * g);
    (OPS * U * before.param.abs() + moved, [m, v, 0.0])
}

fn radam_bound(radam: &RAdam, before: &Scalar, after: &Scalar, gradient: f64) -> (f64, [f64; 3]) {
    let coupled = if radam.decoupled_weight_decay { 0.0 } else { radam.weight_decay };
    let g = gradient.abs() + coupled * before.param.abs();
    let (m, v, of_v) = moments((radam.beta1, radam.beta2), before, after, g);
    let mut rate = radam.lr / (1.0 - radam.beta1.powi(after.steps));
    let mut relative = 2.0 * OPS * U + correction(radam.beta1, after.steps);
    if let Some(rectification) = radam.rectification(after.steps) {
        let of_beta2 = correction(radam.beta2, after.steps);
        rate *= rectification * (1.0 - radam.beta2.powi(after.steps)).sqrt()
            / (after.states[1].sqrt() + radam.eps);
        // rho is what is left of rho_inf, and rho - 4 what is left of that; the root halves it.
        let rho_inf = 2.0 / (1.0 - radam.beta2) - 1.0;
        relative += of_v + of_beta2 / 2.0 + rho_inf * (OPS * U + of_beta2);
    }
    let moved = rate * (m + after.states[0].abs() * relative);
    (OPS * U * before.param.abs() + moved, [m, v, 0.0])
}

fn ademamix_bound(rule: &AdEmaMix, before: &Scalar, after: &Scalar, gradient: f64) -> (f64, [f64; 3]) {
    let g = gradient.abs();
    let [fast, slow] = [0, 1].map(|k| OPS * U * (before.states[k].abs() + g));
    let v = OPS * U * (rule.beta2 * before.states[2] + (1.0 - rule.beta2) * g * g);
    let denominator = (after.states[2] / (1.0 - rule.beta2.powi(after.steps))).sqrt() + rule.eps;
    let corrections = correction(rule.beta1, after.steps) + correction(rule.beta2, after.steps) / 2.0;
    let relative = 2.0 * OPS * U + corrections + of_root(v, after.states[2]);
    let fast_rate = 1.0 / (1.0 - rule.beta1.powi(after.steps));
    let sizes = fast_rate * after.states[0].abs() + rule.alpha * after.states[1].abs();
    let moved = (fast_rate * fast + rule.alpha * slow + sizes * relative) / denominator;
    let decay = OPS * U * rule.weight_decay * before.param.abs();
    (OPS * U * before.param.abs() + rule.lr * (moved + decay), [fast, slow, v])
}

/// Compares every number of the file; `change` may falsify a rule. Returns the numbers, and how many are wrong.
fn compare(change: impl Fn(&mut Rule)) -> Vec<(String, usize, usize)> {
    let blocks = blocks();
    let (common, cases) = blocks.split_first().unwrap();
    let start = numbers(&common["start"][0]);
    let mut outcomes = Vec::new();
    for case in cases {
        let (mut count, mut off) = (0, 0);
        let mut rule = rule(case);
        change(&mut rule);
        let names = state_names(&rule);
        let what = format!("{rule:?}");
        let mut torch: Vec<Scalar> =
            start.iter().map(|param| Scalar { param: *param, ..Scalar::default() }).collect();
        for (step, gradients) in common["gradient"].iter().map(|row| numbers(row)).enumerate() {
            // Each step starts from torch's own numbers, so that errors do not pile up.
            let (before, mut ours) = (torch.clone(), torch.clone());
            rule.step(&mut ours, &gradients);
            let params = numbers(&case["param"][step]);
            // torch keeps no buffer without momentum, no maximum without amsgrad, no mean if not centered.
            let kept = names.iter().map(|name| case.get(*name).map(|rows| numbers(&rows[step])));
            let kept: Vec<Option<Vec<f64>>> = kept.collect();
            for (element, theirs) in torch.iter_mut().enumerate() {
                theirs.steps += 1;
                theirs.param = params[element];
                for (state, kept) in theirs.states.iter_mut().zip(&kept) {
                    *state = kept.as_ref().map(|values| values[element]).unwrap_or_default();
                }
            }
            if let Rule::NAdam(nadam) = &rule {
                let theirs = numbers(&case["mu_product"][step])[0];
                count += 1;
                let steps = torch[0].steps;
                let error = (nadam.mu_product(steps) - theirs).abs();
                off += usize::from(error > 3.0 * f64::from(steps) * U * theirs);
            }
            for (element, (param, states)) in
                bounds(&rule, &before, &torch, &gradients).into_iter().enumerate()
            {
                let (ours, torch) = (ours[element], torch[element]);
                let pairs = ours.states.iter().zip(torch.states).zip(states);
                let pairs = pairs.map(|((ours, torch), bound)| (*ours, torch, bound));
                for (ours, torch, bound) in pairs.chain([(ours.param, torch.param, param)]) {
                    count += 1;
                    // A NaN does not agree.
                    let agrees = (ours - torch).abs() <= bound;
                    off += usize::from(!agrees);
                }
            }
        }
        outcomes.push((what, count, off));
    }
    outcomes
}

#[test]
fn the_reference_does_what_torch_does() {
    let outcomes = compare(|_| ());
    for (what, count, off) in &outcomes {
        assert_eq!(*off, 0, "{off} of {count} numbers are off: {what}");
    }
    let made = include_str!("vectors.py").lines().filter(|line| line.starts_with("    (\"")).count();
    assert_eq!(outcomes.len(), made, "the file is whole");
}

#[test]
fn the_bounds_notice_a_learning_rate_that_is_wrong_in_the_twelfth_digit() {
    for (what, _, off) in compare(|rule| *rule.lr_mut() *= 1.0 + 1e-11) {
        assert!(off > 0, "nothing notices it in {what}");
    }
}
