//! The optimizers of the tests: each flag of each optimizer, and a few for tests that do not depend on the rule.
//!
//! A case is a value (`Optim`) that a builder, the f64 reference and the raw kernels all accept. The tables must have
//! every optimizer of the crate, because no test checks one that is missing.

use instep::optim::{ALL, Descriptor, Optimizer, Value};
use instep::{
    AdEmaMix, Adadelta, Adagrad, Adam, AdamW, Adamax, Lamb, Lion, NAdam, RAdam, RmsProp, Rprop, Sgd,
};
use instep::{Layout, Stepper, StepperBuilder};

use crate::support::reference::Rule;

/// The largest number of an optimizer's hyperparameters.
const MOST: usize = 8;

/// An optimizer as a value: its descriptor, and its numbers in the order of the keywords.
#[derive(Clone, Copy)]
pub(crate) struct Optim {
    pub descriptor: &'static Descriptor,
    numbers: [f64; MOST],
}

impl std::fmt::Debug for Optim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.boxed().fmt(f)
    }
}

impl Optim {
    pub(crate) fn of(optimizer: impl Optimizer) -> Optim {
        let descriptor = optimizer.descriptor().expect("one of the crate's");
        let mut numbers = [0.0; MOST];
        let given = descriptor.fields.iter().flat_map(|field| optimizer.get(field.name).unwrap().numbers());
        given.enumerate().for_each(|(k, number)| numbers[k] = number);
        Optim { descriptor, numbers }
    }

    /// Returns the same optimizer with one hyperparameter changed.
    pub(crate) fn with(self, field: &str, value: Value) -> Optim {
        let mut optimizer = self.boxed();
        optimizer.set(field, value).unwrap();
        Optim::of(optimizer)
    }

    /// Returns the keywords with their numbers; flags are 0 or 1.
    pub(crate) fn keywords(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let parts = self.descriptor.fields.iter().flat_map(|field| field.parts);
        parts.map(|part| part.keyword).zip(self.numbers)
    }

    /// Returns the optimizer as a builder takes it.
    pub(crate) fn boxed(&self) -> Box<dyn Optimizer> {
        let mut optimizer = self.descriptor.build();
        let mut numbers = &self.numbers[..];
        for field in self.descriptor.fields {
            let (own, rest) = numbers.split_at(field.parts.len());
            optimizer.set(field.name, field.value(own).unwrap()).unwrap();
            numbers = rest;
        }
        optimizer
    }

    pub(crate) fn builder(self, layout: &Layout) -> StepperBuilder<'_> {
        Stepper::builder(layout, self.boxed())
    }

    /// Returns the same hyperparameters for the f64 reference.
    pub(crate) fn rule(self) -> Rule {
        let number = |name: &str| {
            let found = self.keywords().find(|(keyword, _)| *keyword == name);
            found.unwrap_or_else(|| panic!("{self:?} has no {name}")).1
        };
        Rule::named(&self.descriptor.key(), &number)
    }
}

/// Returns every single flag, the combinations in which flags interact, and both roles of an average (beta near 0.5).
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
    let ademamix = AdEmaMix::default();
    let ademamixes = [
        ademamix,
        AdEmaMix { weight_decay: 0.3, maximize: true, beta3: 0.99, alpha: 8.0, eps: 1e-3, ..ademamix },
        AdEmaMix { betas: (0.3, 0.45), beta3: 0.4, weight_decay: 0.04, ..ademamix },
    ];
    let mut all: Vec<Optim> = sgds.map(Optim::of).into();
    all.extend(adams.map(Optim::of));
    all.extend(adamws.map(Optim::of));
    all.extend(adagrads.map(Optim::of));
    all.extend(rmsprops.map(Optim::of));
    all.extend(adadeltas.map(Optim::of));
    all.extend(adamaxes.map(Optim::of));
    all.extend(rprops.map(Optim::of));
    all.extend(lions.map(Optim::of));
    all.extend(nadams.map(Optim::of));
    all.extend(radams.map(Optim::of));
    all.extend(lambs.map(Optim::of));
    all.extend(ademamixes.map(Optim::of));
    for descriptor in ALL {
        let has_case = all.iter().any(|optim| optim.descriptor.name == descriptor.name);
        assert!(has_case, "{} has no case here", descriptor.name);
    }
    all
}

/// Returns one optimizer for each number of states with as many flags as possible, one that carries a number, and one
/// that takes two launches. They are for tests that do not depend on the rule. Such tests may select an optimizer by
/// its index.
#[rustfmt::skip] // A table: one case per line.
pub(crate) fn few_optimizers() -> [Optim; 6] {
    [
        Optim::of(Sgd { lr: 0.05, ..Sgd::default() }),
        Optim::of(Sgd { lr: 0.05, momentum: 0.9, nesterov: true, weight_decay: 0.04, ..Sgd::default() }),
        Optim::of(Adam { weight_decay: 0.04, ..Adam::default() }),
        Optim::of(AdamW { lr: 0.01, amsgrad: true, betas: (0.9, 0.8), ..AdamW::default() }),
        Optim::of(NAdam { weight_decay: 0.04, decoupled_weight_decay: true, ..NAdam::default() }),
        Optim::of(Lamb { lr: 0.01, weight_decay: 0.04, ..Lamb::default() }),
    ]
}

/// Returns one optimizer for each number of states, for tests that do not depend on a carried number either.
pub(crate) fn one_per_state_count() -> [Optim; 4] {
    let [none, momentum, moments, maximum, ..] = few_optimizers();
    [none, momentum, moments, maximum]
}
