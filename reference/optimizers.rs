//! The specification of every optimizer, in f64 and one element at a time, as in the papers and `torch.optim`. Only
//! LAMB's ratio needs all elements of a parameter.
//!
//! The tests compare the kernels with this file. Before the host's step bench times f32 steps, it also compares their
//! results with this file's. This file is short enough to be checked by eye, imports nothing, and shares no line with
//! the kernels. The file uses the textbook forms: averages are beta*old + (1-beta)*new, powers of betas are powi, and
//! AdamW's decay multiplies by 1 - lr*weight_decay.

/// One element of a parameter, with its states.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Scalar {
    pub param: f64,
    /// The states, in the order of `state_names`.
    pub states: [f64; 3],
    /// Number of updates so far.
    pub steps: i32,
}

/// For each rule, declares a struct of hyperparameters and a function that reads them by name. Numbers come before
/// flags.
macro_rules! hyperparameters {
    ($($(#[$doc:meta])* $rule:ident { $($number:ident),*; $($flag:ident),* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $rule {
            $(pub $number: f64,)*
            $(pub $flag: bool,)*
        }

        impl $rule {
            fn named(number: &dyn Fn(&str) -> f64) -> $rule {
                $(let $number = number(stringify!($number));)*
                $(let $flag = number(stringify!($flag)) != 0.0;)*
                $rule { $($number,)* $($flag),* }
            }
        }
    )*};
}

hyperparameters! {
    /// `torch.optim.SGD`.
    Sgd { lr, momentum, dampening, weight_decay; nesterov, maximize }
    /// `torch.optim.Adam`, or `torch.optim.AdamW` if `decoupled` is set.
    Adam { lr, beta1, beta2, eps, weight_decay; decoupled, amsgrad, maximize }
    /// `torch.optim.Adagrad`.
    Adagrad { lr, lr_decay, weight_decay, initial_accumulator_value, eps; maximize }
    /// `torch.optim.RMSprop`.
    RmsProp { lr, alpha, eps, weight_decay, momentum; centered, maximize }
    /// `torch.optim.Adadelta`.
    Adadelta { lr, rho, eps, weight_decay; maximize }
    /// `torch.optim.Adamax`.
    Adamax { lr, beta1, beta2, eps, weight_decay; maximize }
    /// `torch.optim.Rprop`.
    Rprop { lr, eta_minus, eta_plus, step_size_min, step_size_max; maximize }
    /// Algorithm 2 of Chen et al., 2023.
    Lion { lr, beta1, beta2, weight_decay; maximize }
    /// `torch.optim.NAdam`.
    NAdam { lr, beta1, beta2, eps, weight_decay, momentum_decay; decoupled_weight_decay, maximize }
    /// `torch.optim.RAdam`.
    RAdam { lr, beta1, beta2, eps, weight_decay; decoupled_weight_decay, maximize }
    /// Algorithm 2 of You et al., 2020, with phi(z) = z.
    Lamb { lr, beta1, beta2, eps, weight_decay; maximize }
    /// Algorithm 1 of Pagliardini et al., 2024, with constant alpha and beta3.
    AdEmaMix { lr, beta1, beta2, beta3, alpha, eps, weight_decay; maximize }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    Sgd(Sgd),
    Adam(Adam),
    Adagrad(Adagrad),
    RmsProp(RmsProp),
    Adadelta(Adadelta),
    Adamax(Adamax),
    Rprop(Rprop),
    Lion(Lion),
    NAdam(NAdam),
    RAdam(RAdam),
    Lamb(Lamb),
    AdEmaMix(AdEmaMix),
}

impl Rule {
    /// Returns the rule with this name in `vectors.txt`. `number` returns the hyperparameter with a given name. A flag
    /// is 0 or 1.
    pub(crate) fn named(name: &str, number: &dyn Fn(&str) -> f64) -> Rule {
        let decoupled = f64::from(u8::from(name == "adamw"));
        let of_adam = |field: &str| if field == "decoupled" { decoupled } else { number(field) };
        match name {
            "sgd" => Rule::Sgd(Sgd::named(number)),
            "adam" | "adamw" => Rule::Adam(Adam::named(&of_adam)),
            "adagrad" => Rule::Adagrad(Adagrad::named(number)),
            "rmsprop" => Rule::RmsProp(RmsProp::named(number)),
            "adadelta" => Rule::Adadelta(Adadelta::named(number)),
            "adamax" => Rule::Adamax(Adamax::named(number)),
            "rprop" => Rule::Rprop(Rprop::named(number)),
            "lion" => Rule::Lion(Lion::named(number)),
            "nadam" => Rule::NAdam(NAdam::named(number)),
            "radam" => Rule::RAdam(RAdam::named(number)),
            "lamb" => Rule::Lamb(Lamb::named(number)),
            "ademamix" => Rule::AdEmaMix(AdEmaMix::named(number)),
            other => panic!("no formula is named {other}"),
        }
    }

    /// Makes one update of a full tensor. `gradients` are means over ranks.
    pub(crate) fn step(&self, tensor: &mut [Scalar], gradients: &[f64]) {
        assert_eq!(tensor.len(), gradients.len());
        tensor.iter_mut().zip(gradients).for_each(|(x, gradient)| self.step_element(x, *gradient));
        if let Rule::Lamb(lamb) = self {
            lamb.apply(tensor);
        }
    }

    /// Makes the elementwise part of an update. Only LAMB has a second part.
    fn step_element(&self, x: &mut Scalar, gradient: f64) {
        x.steps += 1;
        match self {
            Rule::Sgd(sgd) => sgd.step(x, gradient),
            Rule::Adam(adam) => adam.step(x, gradient),
            Rule::Adagrad(adagrad) => adagrad.step(x, gradient),
            Rule::RmsProp(rmsprop) => rmsprop.step(x, gradient),
            Rule::Adadelta(adadelta) => adadelta.step(x, gradient),
            Rule::Adamax(adamax) => adamax.step(x, gradient),
            Rule::Rprop(rprop) => rprop.step(x, gradient),
            Rule::Lion(lion) => lion.step(x, gradient),
            Rule::NAdam(nadam) => nadam.step(x, gradient),
            Rule::RAdam(radam) => radam.step(x, gradient),
            Rule::Lamb(lamb) => lamb.update(x, gradient),
            Rule::AdEmaMix(ademamix) => ademamix.step(x, gradient),
        }
    }

    /// Returns the rule's learning rate.
    pub(crate) fn lr_mut(&mut self) -> &mut f64 {
        match self {
            Rule::Sgd(Sgd { lr, .. })
            | Rule::Adam(Adam { lr, .. })
            | Rule::Adagrad(Adagrad { lr, .. })
            | Rule::RmsProp(RmsProp { lr, .. })
            | Rule::Adadelta(Adadelta { lr, .. })
            | Rule::Adamax(Adamax { lr, .. })
            | Rule::Rprop(Rprop { lr, .. })
            | Rule::Lion(Lion { lr, .. })
            | Rule::NAdam(NAdam { lr, .. })
            | Rule::RAdam(RAdam { lr, .. })
            | Rule::Lamb(Lamb { lr, .. })
            | Rule::AdEmaMix(AdEmaMix { lr, .. }) => lr,
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
        // torch sets the sum's initial value when it makes the optimizer, instep in the first update.
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

/// Returns the sign as `torch.sign` does: 0 for 0 and for NaN.
fn sign(x: f64) -> f64 {
    if x > 0.0 {
        1.0
    } else if x < 0.0 {
        -1.0
    } else {
        0.0
    }
}

impl Rprop {
    fn step(&self, x: &mut Scalar, gradient: f64) {
        let mut g = if self.maximize { -gradient } else { gradient };
        let [prev, step_size, _] = &mut x.states;
        if x.steps == 1 {
            *step_size = self.lr;
        }
        // A product of two f32 does not underflow in f64.
        let product = g * *prev;
        if product > 0.0 {
            *step_size *= self.eta_plus;
        } else if product < 0.0 {
            *step_size *= self.eta_minus;
            g = 0.0;
        }
        *step_size = step_size.clamp(self.step_size_min, self.step_size_max);
        x.param -= sign(g) * *step_size;
        *prev = g;
    }
}

impl Lion {
    /// Returns an average of gradients. The sign of this average is the direction of Lion's update.
    pub(crate) fn direction(&self, x: &Scalar, gradient: f64) -> f64 {
        let g = if self.maximize { -gradient } else { gradient };
        self.beta1 * x.states[0] + (1.0 - self.beta1) * g
    }

    fn step(&self, x: &mut Scalar, gradient: f64) {
        let g = if self.maximize { -gradient } else { gradient };
        let update = sign(self.direction(x, gradient));
        x.param -= self.lr * (update + self.weight_decay * x.param);
        x.states[0] = self.beta2 * x.states[0] + (1.0 - self.beta2) * g;
    }
}

impl NAdam {
    fn mu(&self, step: i32) -> f64 {
        self.beta1 * (1.0 - 0.5 * 0.96f64.powf(f64::from(step) * self.momentum_decay))
    }

    /// Returns the product of the momenta of all steps up to `step`.
    pub(crate) fn mu_product(&self, step: i32) -> f64 {
        (1..=step).map(|t| self.mu(t)).product()
    }

    /// Returns two factors of the update's numerator, without lr: one for the gradient, and one for the average of
    /// gradients.
    pub(crate) fn shares(&self, step: i32) -> (f64, f64) {
        let (mu, next_mu, product) = (self.mu(step), self.mu(step + 1), self.mu_product(step));
        ((1.0 - mu) / (1.0 - product), next_mu / (1.0 - product * next_mu))
    }

    fn step(&self, x: &mut Scalar, gradient: f64) {
        let mut g = if self.maximize { -gradient } else { gradient };
        if self.decoupled_weight_decay {
            x.param *= 1.0 - self.lr * self.weight_decay;
        } else {
            g += self.weight_decay * x.param;
        }
        let [m, v, _] = &mut x.states;
        *m = self.beta1 * *m + (1.0 - self.beta1) * g;
        *v = self.beta2 * *v + (1.0 - self.beta2) * g * g;
        let (of_gradient, of_average) = self.shares(x.steps);
        let v_hat = *v / (1.0 - self.beta2.powi(x.steps));
        x.param -= self.lr * (of_gradient * g + of_average * *m) / (v_hat.sqrt() + self.eps);
    }
}

impl RAdam {
    /// Returns the rectification. In the first steps, the variance of the second moment is not tractable, and the
    /// result is `None`.
    pub(crate) fn rectification(&self, step: i32) -> Option<f64> {
        let rho_inf = 2.0 / (1.0 - self.beta2) - 1.0;
        let power = self.beta2.powi(step);
        let rho = rho_inf - 2.0 * f64::from(step) * power / (1.0 - power);
        let squared = (rho - 4.0) * (rho - 2.0) * rho_inf / ((rho_inf - 4.0) * (rho_inf - 2.0) * rho);
        (rho > 5.0).then(|| squared.sqrt())
    }

    fn step(&self, x: &mut Scalar, gradient: f64) {
        let mut g = if self.maximize { -gradient } else { gradient };
        if self.decoupled_weight_decay {
            x.param *= 1.0 - self.lr * self.weight_decay;
        } else {
            g += self.weight_decay * x.param;
        }
        let [m, v, _] = &mut x.states;
        *m = self.beta1 * *m + (1.0 - self.beta1) * g;
        *v = self.beta2 * *v + (1.0 - self.beta2) * g * g;
        let m_hat = *m / (1.0 - self.beta1.powi(x.steps));
        x.param -= self.lr
            * match self.rectification(x.steps) {
                // torch adds eps before it corrects the root.
                Some(r) => r * m_hat * (1.0 - self.beta2.powi(x.steps)).sqrt() / (v.sqrt() + self.eps),
                None => m_hat,
            };
    }
}

impl Lamb {
    /// Updates both moments.
    fn update(&self, x: &mut Scalar, gradient: f64) {
        let g = if self.maximize { -gradient } else { gradient };
        let [m, v, _] = &mut x.states;
        *m = self.beta1 * *m + (1.0 - self.beta1) * g;
        *v = self.beta2 * *v + (1.0 - self.beta2) * g * g;
    }

    /// Returns the change u, computed from the moments.
    pub(crate) fn change(&self, x: &Scalar) -> f64 {
        let m_hat = x.states[0] / (1.0 - self.beta1.powi(x.steps));
        let v_hat = x.states[1] / (1.0 - self.beta2.powi(x.steps));
        m_hat / (v_hat.sqrt() + self.eps) + self.weight_decay * x.param
    }

    /// Returns |p| / |u| over the tensor, or 1 if a norm is zero or NaN.
    pub(crate) fn ratio(&self, tensor: &[Scalar]) -> f64 {
        let param_norm = norm(tensor.iter().map(|x| x.param));
        let change_norm = norm(tensor.iter().map(|x| self.change(x)));
        if param_norm > 0.0 && change_norm > 0.0 { param_norm / change_norm } else { 1.0 }
    }

    /// Subtracts u, multiplied by lr and the ratio, from the parameters.
    pub(crate) fn apply(&self, tensor: &mut [Scalar]) {
        let rate = self.lr * self.ratio(tensor);
        tensor.iter_mut().for_each(|x| x.param -= rate * self.change(x));
    }
}

impl AdEmaMix {
    fn step(&self, x: &mut Scalar, gradient: f64) {
        let g = if self.maximize { -gradient } else { gradient };
        let [m1, m2, v] = &mut x.states;
        *m1 = self.beta1 * *m1 + (1.0 - self.beta1) * g;
        *m2 = self.beta3 * *m2 + (1.0 - self.beta3) * g;
        *v = self.beta2 * *v + (1.0 - self.beta2) * g * g;
        let m1_hat = *m1 / (1.0 - self.beta1.powi(x.steps));
        let v_hat = *v / (1.0 - self.beta2.powi(x.steps));
        let direction = (m1_hat + self.alpha * *m2) / (v_hat.sqrt() + self.eps);
        x.param -= self.lr * (direction + self.weight_decay * x.param);
    }
}

/// Returns the Euclidean norm. The sum is compensated (Neumaier), so its error does not grow with the length.
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

/// Returns the factor by which `torch.nn.utils.clip_grad_norm_` multiplies gradients of this norm.
pub(crate) fn clip_coefficient(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + 1e-6)).min(1.0)
}
