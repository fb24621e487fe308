//! Every optimizer in f64, one scalar at a time, as the papers and `torch.optim` state them.
//!
//! What everything else is checked against, so it is kept short enough to be checked by eye. Must import nothing
//! from the crate, and must not borrow the kernels' spelling: averages are beta*old + (1-beta)*new here, powers are
//! powi, the decay of AdamW multiplies by 1 - lr*weight_decay.

/// One parameter element and what the optimizer remembers of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Scalar {
    pub param: f64,
    /// In the order of `state_names`.
    pub states: [f64; 3],
    /// Updates so far.
    pub steps: i32,
}

/// `torch.optim.SGD`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sgd {
    pub lr: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub weight_decay: f64,
    pub nesterov: bool,
    pub maximize: bool,
}

/// `torch.optim.Adam`, and with `decoupled` `torch.optim.AdamW`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adam {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub decoupled: bool,
    pub amsgrad: bool,
    pub maximize: bool,
}

/// `torch.optim.Adagrad`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adagrad {
    pub lr: f64,
    pub lr_decay: f64,
    pub weight_decay: f64,
    pub initial_accumulator_value: f64,
    pub eps: f64,
    pub maximize: bool,
}

/// `torch.optim.RMSprop`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RmsProp {
    pub lr: f64,
    pub alpha: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub momentum: f64,
    pub centered: bool,
    pub maximize: bool,
}

/// `torch.optim.Adadelta`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adadelta {
    pub lr: f64,
    pub rho: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub maximize: bool,
}

/// `torch.optim.Adamax`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adamax {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub maximize: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    Sgd(Sgd),
    Adam(Adam),
    Adagrad(Adagrad),
    RmsProp(RmsProp),
    Adadelta(Adadelta),
    Adamax(Adamax),
}

impl Rule {
    /// One update with `gradient`, the mean over ranks.
    pub(crate) fn step(&self, x: &mut Scalar, gradient: f64) {
        x.steps += 1;
        match self {
            Rule::Sgd(sgd) => sgd.step(x, gradient),
            Rule::Adam(adam) => adam.step(x, gradient),
            Rule::Adagrad(adagrad) => adagrad.step(x, gradient),
            Rule::RmsProp(rmsprop) => rmsprop.step(x, gradient),
            Rule::Adadelta(adadelta) => adadelta.step(x, gradient),
            Rule::Adamax(adamax) => adamax.step(x, gradient),
        }
    }

    /// The learning rate, whatever the rule.
    pub(crate) fn lr_mut(&mut self) -> &mut f64 {
        match self {
            Rule::Sgd(Sgd { lr, .. })
            | Rule::Adam(Adam { lr, .. })
            | Rule::Adagrad(Adagrad { lr, .. })
            | Rule::RmsProp(RmsProp { lr, .. })
            | Rule::Adadelta(Adadelta { lr, .. })
            | Rule::Adamax(Adamax { lr, .. }) => lr,
        }
    }
}

impl Sgd {
    fn step(&self, x: &mut Scalar, gradient: f64) {
        let mut g = if self.maximize { -gradient } else { gradient };
        g += self.weight_decay * x.param;
        if self.momentum != 0.0 {
            // The first buffer is a copy: neither momentum nor dampening enters it.
            let buffer =
                if x.steps == 1 { g } else { self.momentum * x.states[0] + (1.0 - self.dampening) * g };
            g = if self.nesterov { g + self.momentum * buffer } else { buffer };
            x.states[0] = buffer;
        }
        x.param -= self.lr * g;
    }
}

impl Adam {
    fn step(&self, x: &mut Scalar, gradient: f64) {
        let mut g = if self.maximize { -gradient } else { gradient };
        if self.decoupled {
            x.param *= 1.0 - self.lr * self.weight_decay;
        } else {
            g += self.weight_decay * x.param;
        }
        let [m, v, largest] = &mut x.states;
        *m = self.beta1 * *m + (1.0 - self.beta1) * g;
        *v = self.beta2 * *v + (1.0 - self.beta2) * g * g;
        let mut second_moment = *v;
        if self.amsgrad {
            // The maximum of the uncorrected moments, as torch takes it; like torch.maximum it keeps a NaN.
            *largest = if v.is_nan() { *v } else { largest.max(*v) };
            second_moment = *largest;
        }
        let m_hat = *m / (1.0 - self.beta1.powi(x.steps));
        let v_hat = second_moment / (1.0 - self.beta2.powi(x.steps));
        x.param -= self.lr * m_hat / (v_hat.sqrt() + self.eps);
    }
}

impl Adagrad {
    fn step(&self, x: &mut Scalar, gradient: f64) {
        let g = (if self.maximize { -gradient } else { gradient }) + self.weight_decay * x.param;
        // torch makes the sum with the optimizer, instep with the first update.
        let sum = if x.steps == 1 { self.initial_accumulator_value } else { x.states[0] } + g * g;
        x.states[0] = sum;
        let rate = self.lr / (1.0 + f64::from(x.steps - 1) * self.lr_decay);
        x.param -= rate * g / (sum.sqrt() + self.eps);
    }
}

impl RmsProp {
    fn step(&self, x: &mut Scalar, gradient: f64) {
        let g = (if self.maximize { -gradient } else { gradient }) + self.weight_decay * x.param;
        let average = |old: f64, new: f64| self.alpha * old + (1.0 - self.alpha) * new;
        let has_momentum = self.momentum != 0.0;
        x.states[0] = average(x.states[0], g * g);
        let mut variance = x.states[0];
        if self.centered {
            let mean = &mut x.states[if has_momentum { 2 } else { 1 }];
            *mean = average(*mean, g);
            variance -= *mean * *mean;
        }
        let mut change = g / (variance.sqrt() + self.eps);
        if has_momentum {
            change += self.momentum * x.states[1];
            x.states[1] = change;
        }
        x.param -= self.lr * change;
    }
}

impl Adadelta {
    fn step(&self, x: &mut Scalar, gradient: f64) {
        let g = (if self.maximize { -gradient } else { gradient }) + self.weight_decay * x.param;
        let average = |old: f64, new: f64| self.rho * old + (1.0 - self.rho) * new;
        x.states[0] = average(x.states[0], g * g);
        let rms = |mean_square: f64| (mean_square + self.eps).sqrt();
        let change = rms(x.states[1]) / rms(x.states[0]) * g;
        x.states[1] = average(x.states[1], change * change);
        x.param -= self.lr * change;
    }
}

impl Adamax {
    fn step(&self, x: &mut Scalar, gradient: f64) {
        let g = (if self.maximize { -gradient } else { gradient }) + self.weight_decay * x.param;
        x.states[0] = self.beta1 * x.states[0] + (1.0 - self.beta1) * g;
        x.states[1] = (self.beta2 * x.states[1]).max(g.abs() + self.eps);
        let m_hat = x.states[0] / (1.0 - self.beta1.powi(x.steps));
        x.param -= self.lr * m_hat / x.states[1];
    }
}

/// Euclidean norm. The sum is compensated (Neumaier), so its error does not grow with the length.
pub(crate) fn norm(values: impl IntoIterator<Item = f64>) -> f64 {
    let (mut sum, mut lost) = (0.0f64, 0.0f64);
    for value in values {
        let square = value * value;
        let next = sum + square;
        lost += if sum >= square { (sum - next) + square } else { (square - next) + sum };
        sum = next;
    }
    (sum + lost).sqrt()
}

/// What `torch.nn.utils.clip_grad_norm_` multiplies gradients of this norm by.
pub(crate) fn clip_coefficient(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + 1e-6)).min(1.0)
}
