//! The standard registry: every optimizer, by name and by type, and every hyperparameter; all of PyTorch's
//! `functional_optim_map` is there.
//!
//! A keyword that reached another field, or none, would train with a default and say nothing. Must give each field a
//! value of its own.

use std::any::Any;
use std::fmt::Debug;

use instep::optim::Optimizer;
use instep::overlap::Registry;
use instep::{Adadelta, Adagrad, Adam, AdamW, Adamax, Error, Lamb, Lion, NAdam, RAdam, RmsProp, Rprop, Sgd};

/// `name` stands for `O` with its defaults, and these keywords, all that it has, for `expected`.
fn assert_stands_for<O>(name: &str, keywords: &[(&str, f64)], expected: O)
where
    O: Optimizer + PartialEq + Default + Debug,
{
    let registry = Registry::standard();
    let entry = registry.resolve(name).unwrap();
    let built = |keywords| -> Box<dyn Any> { entry.build(keywords).unwrap() };
    assert_eq!(built(&[]).downcast_ref(), Some(&O::default()));
    assert_eq!(built(keywords).downcast_ref(), Some(&expected));
    assert_eq!(registry.resolve_type::<O>().unwrap().name(), name);
    let Err(Error::Unsupported { have, .. }) = entry.build(&[("no such keyword", 0.0)]) else {
        panic!("{name} takes any keyword");
    };
    let given: Vec<&str> = keywords.iter().map(|(keyword, _)| *keyword).collect();
    assert_eq!(have, given.join(", "), "{name}");
    let bad = entry.build(&[("lr", f64::NAN)]);
    assert!(matches!(bad, Err(Error::Config { field: "lr", .. })), "{name}: {bad:?}");
}

#[test]
#[rustfmt::skip] // A table: keywords above the optimizer that they stand for.
fn every_name_stands_for_its_optimizer_and_every_keyword_for_its_field() {
    assert_stands_for(
        "SGD",
        &[("lr", 0.1), ("momentum", 0.2), ("dampening", 0.0), ("weight_decay", 0.3), ("nesterov", 1.0), ("maximize", 1.0)],
        Sgd { lr: 0.1, momentum: 0.2, dampening: 0.0, weight_decay: 0.3, nesterov: true, maximize: true },
    );
    assert_stands_for(
        "Adam",
        &[("lr", 0.1), ("beta1", 0.2), ("beta2", 0.3), ("eps", 0.4), ("weight_decay", 0.5), ("amsgrad", 1.0), ("maximize", 1.0)],
        Adam { lr: 0.1, betas: (0.2, 0.3), eps: 0.4, weight_decay: 0.5, amsgrad: true, maximize: true },
    );
    assert_stands_for(
        "AdamW",
        &[("lr", 0.1), ("beta1", 0.2), ("beta2", 0.3), ("eps", 0.4), ("weight_decay", 0.5), ("amsgrad", 1.0), ("maximize", 1.0)],
        AdamW { lr: 0.1, betas: (0.2, 0.3), eps: 0.4, weight_decay: 0.5, amsgrad: true, maximize: true },
    );
    assert_stands_for(
        "Adagrad",
        &[("lr", 0.1), ("lr_decay", 0.2), ("weight_decay", 0.3), ("initial_accumulator_value", 0.4), ("eps", 0.5), ("maximize", 1.0)],
        Adagrad { lr: 0.1, lr_decay: 0.2, weight_decay: 0.3, initial_accumulator_value: 0.4, eps: 0.5, maximize: true },
    );
    assert_stands_for(
        "RMSprop",
        &[("lr", 0.1), ("alpha", 0.2), ("eps", 0.3), ("weight_decay", 0.4), ("momentum", 0.5), ("centered", 1.0), ("maximize", 1.0)],
        RmsProp { lr: 0.1, alpha: 0.2, eps: 0.3, weight_decay: 0.4, momentum: 0.5, centered: true, maximize: true },
    );
    assert_stands_for(
        "Adadelta",
        &[("lr", 0.1), ("rho", 0.2), ("eps", 0.3), ("weight_decay", 0.4), ("maximize", 1.0)],
        Adadelta { lr: 0.1, rho: 0.2, eps: 0.3, weight_decay: 0.4, maximize: true },
    );
    assert_stands_for(
        "Adamax",
        &[("lr", 0.1), ("beta1", 0.2), ("beta2", 0.3), ("eps", 0.4), ("weight_decay", 0.5), ("maximize", 1.0)],
        Adamax { lr: 0.1, betas: (0.2, 0.3), eps: 0.4, weight_decay: 0.5, maximize: true },
    );
    assert_stands_for(
        "Rprop",
        &[("lr", 0.1), ("eta_minus", 0.2), ("eta_plus", 1.3), ("step_size_min", 0.4), ("step_size_max", 0.5), ("maximize", 1.0)],
        Rprop { lr: 0.1, etas: (0.2, 1.3), step_sizes: (0.4, 0.5), maximize: true },
    );
    assert_stands_for(
        "Lion",
        &[("lr", 0.1), ("beta1", 0.2), ("beta2", 0.3), ("weight_decay", 0.4), ("maximize", 1.0)],
        Lion { lr: 0.1, betas: (0.2, 0.3), weight_decay: 0.4, maximize: true },
    );
    assert_stands_for(
        "NAdam",
        &[("lr", 0.1), ("beta1", 0.2), ("beta2", 0.3), ("eps", 0.4), ("weight_decay", 0.5), ("momentum_decay", 0.6), ("decoupled_weight_decay", 1.0), ("maximize", 1.0)],
        NAdam { lr: 0.1, betas: (0.2, 0.3), eps: 0.4, weight_decay: 0.5, momentum_decay: 0.6, decoupled_weight_decay: true, maximize: true },
    );
    assert_stands_for(
        "RAdam",
        &[("lr", 0.1), ("beta1", 0.2), ("beta2", 0.3), ("eps", 0.4), ("weight_decay", 0.5), ("decoupled_weight_decay", 1.0), ("maximize", 1.0)],
        RAdam { lr: 0.1, betas: (0.2, 0.3), eps: 0.4, weight_decay: 0.5, decoupled_weight_decay: true, maximize: true },
    );
    assert_stands_for(
        "LAMB",
        &[("lr", 0.1), ("beta1", 0.2), ("beta2", 0.3), ("eps", 0.4), ("weight_decay", 0.5), ("maximize", 1.0)],
        Lamb { lr: 0.1, betas: (0.2, 0.3), eps: 0.4, weight_decay: 0.5, maximize: true },
    );
}

#[test]
fn every_name_of_pytorchs_own_map_is_there() {
    let registry = Registry::standard();
    for name in ["Adagrad", "Adam", "AdamW", "SGD", "Adadelta", "RMSprop", "Rprop", "Adamax"] {
        registry.resolve(name).unwrap();
    }
}
