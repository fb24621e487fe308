//! The optimizers that the tests go through: each flag of each, and a few for what does not depend on the rule.
//!
//! A case is a value (`Optim`) that a builder, the f64 reference and the raw kernels take alike. Must hold every
//! optimizer of the crate: what is not in these tables is held to nothing.

use instep::optim::Optimizer;
use instep::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, Lamb, Layout, Lion, NAdam, RAdam, RmsProp, Rprop, Sgd, Stepper,
    StepperBuilder,
};

use crate::support::reference::{self, Rule};

/// An optimizer as a value.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Optim {
    Sgd(Sgd),
    Adam(Adam),
    AdamW(AdamW),
    Adagrad(Adagrad),
    RmsProp(RmsProp),
    Adadelta(Adadelta),
    Adamax(Adamax),
    Rprop(Rprop),
    Lion(Lion),
    NAdam(NAdam),
    RAdam(RAdam),
    Lamb(Lamb),
}

impl Optim {
    /// As a builder takes it.
    pub(crate) fn boxed(self) -> Box<dyn Optimizer> {
        match self {
            Optim::Sgd(sgd) => Box::new(sgd),
            Optim::Adam(adam) => Box::new(adam),
            Optim::AdamW(adamw) => Box::new(adamw),
            Optim::Adagrad(adagrad) => Box::new(adagrad),
            Optim::RmsProp(rmsprop) => Box::new(rmsprop),
            Optim::Adadelta(adadelta) => Box::new(adadelta),
            Optim::Adamax(adamax) => Box::new(adamax),
            Optim::Rprop(rprop) => Box::new(rprop),
            Optim::Lion(lion) => Box::new(lion),
            Optim::NAdam(nadam) => Box::new(nadam),
            Optim::RAdam(radam) => Box::new(radam),
            Optim::Lamb(lamb) => Box::new(lamb),
        }
    }

    pub(crate) fn builder(self, layout: &Layout) -> StepperBuilder<'_> {
        Stepper::builder(layout, self.boxed())
    }

    /// The same hyperparameters for the f64 reference.
    pub(crate) fn rule(self) -> Rule {
        match self {
            Optim::Sgd(Sgd { lr, momentum, dampening, weight_decay, nesterov, maximize }) => {
                Rule::Sgd(reference::Sgd { lr, momentum, dampening, weight_decay, nesterov, maximize })
            }
            Optim::Adam(Adam { lr, betas, eps, weight_decay, amsgrad, maximize })
            | Optim::AdamW(AdamW { lr, betas, eps, weight_decay, amsgrad, maximize }) => {
                let (beta1, beta2) = betas;
                let decoupled = matches!(self, Optim::AdamW(_));
                let adam =
                    reference::Adam { lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize };
                Rule::Adam(adam)
            }
            Optim::Adagrad(adagrad) => {
                let Adagrad { lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize } =
                    adagrad;
                Rule::Adagrad(reference::Adagrad {
                    lr,
                    lr_decay,
                    weight_decay,
                    initial_accumulator_value,
                    eps,
                    maximize,
                })
            }
            Optim::RmsProp(RmsProp { lr, alpha, eps, weight_decay, momentum, centered, maximize }) => {
                let rmsprop =
                    reference::RmsProp { lr, alpha, eps, weight_decay, momentum, centered, maximize };
                Rule::RmsProp(rmsprop)
            }
            Optim::Adadelta(Adadelta { lr, rho, eps, weight_decay, maximize }) => {
                Rule::Adadelta(reference::Adadelta { lr, rho, eps, weight_decay, maximize })
            }
            Optim::Adamax(Adamax { lr, betas: (beta1, beta2), eps, weight_decay, maximize }) => {
                Rule::Adamax(reference::Adamax { lr, beta1, beta2, eps, weight_decay, maximize })
            }
            Optim::Rprop(Rprop { lr, etas, step_sizes, maximize }) => {
                let ((eta_minus, eta_plus), (step_size_min, step_size_max)) = (etas, step_sizes);
                let rprop =
                    reference::Rprop { lr, eta_minus, eta_plus, step_size_min, step_size_max, maximize };
                Rule::Rprop(rprop)
            }
            Optim::Lion(Lion { lr, betas: (beta1, beta2), weight_decay, maximize }) => {
                Rule::Lion(reference::Lion { lr, beta1, beta2, weight_decay, maximize })
            }
            Optim::NAdam(NAdam {
                lr,
                betas: (beta1, beta2),
                eps,
                weight_decay,
                momentum_decay,
                decoupled_weight_decay: decoupled,
                maximize,
            }) => Rule::NAdam(reference::NAdam {
                lr,
                beta1,
                beta2,
                eps,
                weight_decay,
                momentum_decay,
                decoupled,
                maximize,
            }),
            Optim::RAdam(RAdam {
                lr,
                betas: (beta1, beta2),
                eps,
                weight_decay,
                decoupled_weight_decay: decoupled,
                maximize,
            }) => Rule::RAdam(reference::RAdam { lr, beta1, beta2, eps, weight_decay, decoupled, maximize }),
            Optim::Lamb(Lamb { lr, betas: (beta1, beta2), eps, weight_decay, maximize }) => {
                Rule::Lamb(reference::Lamb { lr, beta1, beta2, eps, weight_decay, maximize })
            }
        }
    }
}

/// Every flag alone, the combinations in which flags meet, and both roles of an average (beta around 0.5).
#[rustfmt::skip] // A table: one case per line.
pub(crate) fn optimizers() -> Vec<Optim> {
    let sgd = Sgd { lr: 0.05, ..Sgd::default() };
    let heavy = Sgd { momentum: 0.9, ..sgd };
    let adam = Adam::default();
    let adamw = AdamW { lr: 0.01, ..AdamW::default() };
    let sgds = [
        sgd,
        Sgd { weight_decay: 0.04, ..sgd },
        Sgd { maximize: true, ..sgd },
        heavy,
        Sgd { dampening: 0.3, ..heavy },
        Sgd { nesterov: true, ..heavy },
        Sgd { dampening: 0.3, weight_decay: 0.04, maximize: true, ..heavy },
        Sgd { nesterov: true, weight_decay: 0.04, maximize: true, ..heavy },
    ];
    let adams = [
        adam,
        Adam { weight_decay: 0.04, ..adam },
        Adam { maximize: true, ..adam },
        Adam { amsgrad: true, betas: (0.9, 0.8), ..adam },
        Adam { eps: 1e-2, betas: (0.95, 0.98), ..adam },
        Adam { betas: (0.0, 0.5), ..adam },
        Adam { betas: (0.3, 0.45), weight_decay: 0.04, ..adam },
        Adam { amsgrad: true, weight_decay: 0.04, maximize: true, betas: (0.5, 0.7), ..adam },
    ];
    let adamws = [
        adamw,
        AdamW { weight_decay: 0.3, maximize: true, ..adamw },
        AdamW { weight_decay: 0.0, ..adamw },
        AdamW { amsgrad: true, betas: (0.9, 0.8), ..adamw },
        AdamW { amsgrad: true, maximize: true, betas: (0.4, 0.3), eps: 1e-3, ..adamw },
    ];
    let adagrad = Adagrad::default();
    let adagrads = [
        adagrad,
        Adagrad { lr_decay: 0.1, initial_accumulator_value: 0.5, ..adagrad },
        Adagrad { weight_decay: 0.04, maximize: true, eps: 1e-2, ..adagrad },
    ];
    let rmsprop = RmsProp::default();
    let rmsprops = [
        rmsprop,
        RmsProp { weight_decay: 0.04, alpha: 0.3, ..rmsprop },
        RmsProp { momentum: 0.9, ..rmsprop },
        RmsProp { centered: true, eps: 1e-3, ..rmsprop },
        RmsProp { momentum: 0.5, centered: true, weight_decay: 0.04, maximize: true, ..rmsprop },
    ];
    let adadelta = Adadelta::default();
    let adadeltas = [
        adadelta,
        Adadelta { lr: 0.5, rho: 0.4, eps: 1e-3, weight_decay: 0.04, maximize: true },
    ];
    let adamax = Adamax::default();
    let adamaxes = [
        adamax,
        Adamax { betas: (0.3, 0.45), weight_decay: 0.04, maximize: true, eps: 1e-3, ..adamax },
    ];
    let rprop = Rprop::default();
    let rprops = [
        rprop,
        Rprop { lr: 0.3, etas: (0.3, 1.7), step_sizes: (1e-2, 0.1), maximize: true },
    ];
    let lion = Lion { lr: 1e-3, ..Lion::default() };
    let lions = [
        lion,
        Lion { weight_decay: 0.3, maximize: true, ..lion },
        Lion { betas: (0.3, 0.45), weight_decay: 0.04, ..lion },
    ];
    let nadam = NAdam::default();
    let nadams = [
        nadam,
        NAdam { weight_decay: 0.04, betas: (0.3, 0.45), ..nadam },
        NAdam { weight_decay: 0.3, decoupled_weight_decay: true, maximize: true, momentum_decay: 0.3, eps: 1e-3, ..nadam },
    ];
    let radam = RAdam::default();
    let radams = [
        radam,
        RAdam { weight_decay: 0.3, decoupled_weight_decay: true, maximize: true, betas: (0.9, 0.98), eps: 1e-3, ..radam },
        RAdam { weight_decay: 0.04, betas: (0.3, 0.45), ..radam }, // never rectified
    ];
    let lamb = Lamb::default();
    let lambs = [
        lamb,
        Lamb { weight_decay: 0.3, maximize: true, eps: 1e-3, lr: 0.01, ..lamb },
        Lamb { weight_decay: 0.0, betas: (0.3, 0.45), ..lamb },
    ];
    let mut all: Vec<Optim> = sgds.map(Optim::Sgd).into();
    all.extend(adams.map(Optim::Adam));
    all.extend(adamws.map(Optim::AdamW));
    all.extend(adagrads.map(Optim::Adagrad));
    all.extend(rmsprops.map(Optim::RmsProp));
    all.extend(adadeltas.map(Optim::Adadelta));
    all.extend(adamaxes.map(Optim::Adamax));
    all.extend(rprops.map(Optim::Rprop));
    all.extend(lions.map(Optim::Lion));
    all.extend(nadams.map(Optim::NAdam));
    all.extend(radams.map(Optim::RAdam));
    all.extend(lambs.map(Optim::Lamb));
    all
}

/// One for each number of states, with as many flags as go together, one that carries a number beside them, and one
/// that takes two launches: for tests of what no rule changes, which take them by number, too.
#[rustfmt::skip] // A table: one case per line.
pub(crate) fn few_optimizers() -> [Optim; 6] {
    [
        Optim::Sgd(Sgd { lr: 0.05, ..Sgd::default() }),
        Optim::Sgd(Sgd { lr: 0.05, momentum: 0.9, nesterov: true, weight_decay: 0.04, ..Sgd::default() }),
        Optim::Adam(Adam { weight_decay: 0.04, ..Adam::default() }),
        Optim::AdamW(AdamW { lr: 0.01, amsgrad: true, betas: (0.9, 0.8), ..AdamW::default() }),
        Optim::NAdam(NAdam { weight_decay: 0.04, decoupled_weight_decay: true, ..NAdam::default() }),
        Optim::Lamb(Lamb { lr: 0.01, weight_decay: 0.04, ..Lamb::default() }),
    ]
}

/// One for each number of states: for tests in which nothing that is carried matters either.
pub(crate) fn one_per_state_count() -> [Optim; 4] {
    let [none, momentum, moments, maximum, ..] = few_optimizers();
    [none, momentum, moments, maximum]
}
