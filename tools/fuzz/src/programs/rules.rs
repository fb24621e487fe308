//! The formulas of the optimizers in f64, element by element, from the papers and the documentation of `torch.optim`.
//!
//! They share nothing with the library's kernels, and nothing with the reference of its tests.

use super::program::{Kind, Rule};

/// Fixed hyperparameters that are not worth drawing.
pub(crate) const LR_DECAY: f64 = 0.125;
pub(crate) const INITIAL_SUM: f64 = 0.25;
pub(crate) const BETA3: f64 = 0.75;
pub(crate) const ALPHA: f64 = 2.0;
pub(crate) const MOMENTUM_DECAY: f64 = 0.25;
pub(crate) const ETAS: (f64, f64) = (0.5, 1.25);
pub(crate) const STEP_SIZES: (f64, f64) = (0.001, 4.0);

/// One element: its value and up to three states.
pub(crate) struct Element {
    pub(crate) value: f64,
    pub(crate) states: [f64; 3],
}

/// The state names of an optimizer, in the order of [`Element::states`].
pub(crate) fn state_names(rule: &Rule) -> &'static [&'static str] {
    match rule.kind {
        Kind::Sgd if rule.beta1 == 0.0 => &[],
        Kind::Sgd => &["momentum_buffer"],
        Kind::Adam | Kind::AdamW if rule.flag => &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
        Kind::Adam | Kind::AdamW | Kind::NAdam | Kind::RAdam | Kind::Lamb => &["exp_avg", "exp_avg_sq"],
        Kind::Adagrad => &["sum"],
        Kind::RmsProp => match (rule.beta1 != 0.0, rule.flag) {
            (false, false) => &["square_avg"],
            (true, false) => &["square_avg", "momentum_buffer"],
            (false, true) => &["square_avg", "grad_avg"],
            (true, true) => &["square_avg", "momentum_buffer", "grad_avg"],
        },
        Kind::Adadelta => &["square_avg", "acc_delta"],
        Kind::Adamax => &["exp_avg", "exp_inf"],
        Kind::Lion => &["exp_avg"],
        Kind::AdEmaMix => &["exp_avg_fast", "exp_avg_slow", "exp_avg_sq"],
        Kind::Rprop => &["prev", "step_size"],
    }
}

/// Returns NAdam's momentum of a step.
pub(crate) fn nadam_momentum(rule: &Rule, step: u64) -> f64 {
    rule.beta1 * (1.0 - 0.5 * 0.96f64.powf(step as f64 * MOMENTUM_DECAY))
}

/// The scalars of one update, which are the same for all elements of a parameter.
pub(crate) struct Update<'r> {
    pub(crate) rule: &'r Rule,
    /// The learning rate, multiplied by the parameter's factor.
    pub(crate) lr: f64,
    /// The number of this update, from 1.
    pub(crate) step: u64,
    /// NAdam's product of momenta before this update.
    pub(crate) carried: f64,
}

impl Update<'_> {
    /// Steps one element; for LAMB, only its moments. If only the sign of a direction matters, returns the distance
    /// from the point where the sign changes.
    pub(crate) fn apply(&self, x: &mut Element, gradient: f64) -> Option<f64> {
        let Update { rule, lr, step, carried } = *self;
        let mut g = if rule.maximize { -gradient } else { gradient };
        let decay = rule.weight_decay;
        let corrected = |beta: f64| 1.0 - beta.powf(step as f64);
        let [first, second, third] = &mut x.states;
        let average = |old: &mut f64, beta: f64, new: f64| *old = beta * *old + (1.0 - beta) * new;
        match rule.kind {
            Kind::Sgd => {
                g += decay * x.value;
                if rule.beta1 != 0.0 {
                    *first = if step == 1 { g } else { rule.beta1 * *first + g };
                    g = if rule.flag { g + rule.beta1 * *first } else { *first };
                }
                x.value -= lr * g;
            }
            Kind::Adam | Kind::AdamW => {
                if rule.kind == Kind::AdamW {
                    x.value -= lr * decay * x.value;
                } else {
                    g += decay * x.value;
                }
                average(first, rule.beta1, g);
                average(second, rule.beta2, g * g);
                let mut square = *second;
                if rule.flag {
                    *third = third.max(*second);
                    square = *third;
                }
                let root = (square / corrected(rule.beta2)).sqrt();
                x.value -= lr * (*first / corrected(rule.beta1)) / (root + rule.eps);
            }
            Kind::Adagrad => {
                g += decay * x.value;
                let before = if step > 1 { *first } else { if rule.flag { INITIAL_SUM } else { 0.0 } };
                *first = before + g * g;
                let rate = lr / (1.0 + (step - 1) as f64 * LR_DECAY);
                x.value -= rate * g / (first.sqrt() + rule.eps);
            }
            Kind::RmsProp => {
                g += decay * x.value;
                average(first, rule.beta2, g * g);
                let (buffer, mean) = if rule.beta1 != 0.0 { (second, third) } else { (third, second) };
                let mut variance = *first;
                if rule.flag {
                    average(mean, rule.beta2, g);
                    variance -= *mean * *mean;
                }
                let mut change = g / (variance.sqrt() + rule.eps);
                if rule.beta1 != 0.0 {
                    *buffer = rule.beta1 * *buffer + change;
                    change = *buffer;
                }
                x.value -= lr * change;
            }
            Kind::Adadelta => {
                g += decay * x.value;
                average(first, rule.beta2, g * g);
                let change = (*second + rule.eps).sqrt() / (*first + rule.eps).sqrt() * g;
                average(second, rule.beta2, change * change);
                x.value -= lr * change;
            }
            Kind::Adamax => {
                g += decay * x.value;
                average(first, rule.beta1, g);
                *second = (rule.beta2 * *second).max(g.abs() + rule.eps);
                x.value -= lr / corrected(rule.beta1) * *first / *second;
            }
            Kind::Lion => {
                let direction = rule.beta1 * *first + (1.0 - rule.beta1) * g;
                let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
                x.value -= lr * (sign + decay * x.value);
                average(first, rule.beta2, g);
                return Some(direction.abs());
            }
            Kind::NAdam => {
                if rule.flag {
                    x.value -= lr * decay * x.value;
                } else {
                    g += decay * x.value;
                }
                average(first, rule.beta1, g);
                average(second, rule.beta2, g * g);
                let (now, next) = (nadam_momentum(rule, step), nadam_momentum(rule, step + 1));
                let product = carried * now;
                let root = (*second / corrected(rule.beta2)).sqrt() + rule.eps;
                x.value -= lr * (1.0 - now) / (1.0 - product) * g / root;
                x.value -= lr * next / (1.0 - product * next) * *first / root;
            }
            Kind::RAdam => {
                if rule.flag {
                    x.value -= lr * decay * x.value;
                } else {
                    g += decay * x.value;
                }
                average(first, rule.beta1, g);
                average(second, rule.beta2, g * g);
                let mean = *first / corrected(rule.beta1);
                let longest = 2.0 / (1.0 - rule.beta2) - 1.0;
                let power = rule.beta2.powf(step as f64);
                let length = longest - 2.0 * step as f64 * power / (1.0 - power);
                x.value -= if length > 5.0 {
                    let above = (length - 4.0) * (length - 2.0) * longest;
                    let below = (longest - 4.0) * (longest - 2.0) * length;
                    lr * mean * (above / below).sqrt() * corrected(rule.beta2).sqrt()
                        / (second.sqrt() + rule.eps)
                } else {
                    lr * mean
                };
            }
            Kind::AdEmaMix => {
                average(first, rule.beta1, g);
                average(second, BETA3, g);
                average(third, rule.beta2, g * g);
                let root = (*third / corrected(rule.beta2)).sqrt() + rule.eps;
                let direction = (*first / corrected(rule.beta1) + ALPHA * *second) / root;
                x.value -= lr * (direction + decay * x.value);
            }
            Kind::Rprop => {
                if step == 1 {
                    *second = lr;
                }
                let same = g * *first;
                if same > 0.0 {
                    *second *= ETAS.1;
                } else if same < 0.0 {
                    *second *= ETAS.0;
                    g = 0.0;
                }
                *second = second.clamp(STEP_SIZES.0, STEP_SIZES.1);
                if g != 0.0 {
                    x.value -= g.signum() * *second;
                }
                *first = g;
            }
            // The moments; the change needs the norms of the whole parameter.
            Kind::Lamb => {
                average(first, rule.beta1, g);
                average(second, rule.beta2, g * g);
            }
        }
        None
    }

    /// Applies LAMB's change of a full parameter, after its moments.
    pub(crate) fn scale_by_norms(&self, elements: &mut [Element]) {
        let corrected = |beta: f64| 1.0 - beta.powf(self.step as f64);
        let change = |x: &Element| {
            let root = (x.states[1] / corrected(self.rule.beta2)).sqrt() + self.rule.eps;
            x.states[0] / corrected(self.rule.beta1) / root + self.rule.weight_decay * x.value
        };
        let norm = |of: &dyn Fn(&Element) -> f64| elements.iter().map(|x| of(x).powi(2)).sum::<f64>().sqrt();
        let (values, changes) = (norm(&|x| x.value), norm(&change));
        let ratio = if values > 0.0 && changes > 0.0 { values / changes } else { 1.0 };
        for x in elements {
            let moved = self.lr * ratio * change(x);
            x.value -= moved;
        }
    }
}
