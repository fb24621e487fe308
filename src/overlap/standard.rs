//! The registry of what is there: every optimizer of the crate by its name in `torch.optim`, and its keywords.
//!
//! A keyword has the name of its field. Must take every default from the optimizer's own `Default`: there is no second
//! list of them to drift.

use super::registry::{Keywords, Registry};
use crate::error::Result;
use crate::optim::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, Lamb, Lion, NAdam, Optimizer, RAdam, RmsProp, Rprop, Sgd,
};

impl Registry {
    /// With the optimizers of this crate, under the names that they have in `torch.optim`, and Lion and LAMB, which
    /// that has not, under those of their papers: [`names`](Self::names) lists them. Hyperparameters have the names of
    /// their fields; `betas` are `beta1` and `beta2`, `etas` are `eta_minus` and `eta_plus`, `step_sizes` are
    /// `step_size_min` and `step_size_max`. Defaults are `torch.optim`'s, where the functional classes of PyTorch's own
    /// map have others (lr of SGD 1e-2, of Adamax 1e-3).
    pub fn standard() -> Registry {
        let mut registry = Registry::new();
        add(&mut registry, "SGD", sgd);
        add(&mut registry, "Adam", adam);
        add(&mut registry, "AdamW", adamw);
        add(&mut registry, "Adagrad", adagrad);
        add(&mut registry, "RMSprop", rmsprop);
        add(&mut registry, "Adadelta", adadelta);
        add(&mut registry, "Adamax", adamax);
        add(&mut registry, "Rprop", rprop);
        add(&mut registry, "Lion", lion);
        add(&mut registry, "NAdam", nadam);
        add(&mut registry, "RAdam", radam);
        add(&mut registry, "LAMB", lamb);
        registry
    }
}

fn add<O: Optimizer>(registry: &mut Registry, name: &str, construct: fn(&mut Keywords<'_>) -> Result<O>) {
    registry.insert::<O>(name, move |keywords| Ok(Box::new(construct(keywords)?)));
}

fn sgd(keywords: &mut Keywords<'_>) -> Result<Sgd> {
    let Sgd { lr, momentum, dampening, weight_decay, nesterov, maximize } = Sgd::default();
    Ok(Sgd {
        lr: keywords.number("lr", lr),
        momentum: keywords.number("momentum", momentum),
        dampening: keywords.number("dampening", dampening),
        weight_decay: keywords.number("weight_decay", weight_decay),
        nesterov: keywords.flag("nesterov", nesterov)?,
        maximize: keywords.flag("maximize", maximize)?,
    })
}

fn adam(keywords: &mut Keywords<'_>) -> Result<Adam> {
    let Adam { lr, betas, eps, weight_decay, amsgrad, maximize } = Adam::default();
    Ok(Adam {
        lr: keywords.number("lr", lr),
        betas: (keywords.number("beta1", betas.0), keywords.number("beta2", betas.1)),
        eps: keywords.number("eps", eps),
        weight_decay: keywords.number("weight_decay", weight_decay),
        amsgrad: keywords.flag("amsgrad", amsgrad)?,
        maximize: keywords.flag("maximize", maximize)?,
    })
}

fn adamw(keywords: &mut Keywords<'_>) -> Result<AdamW> {
    let AdamW { lr, betas, eps, weight_decay, amsgrad, maximize } = AdamW::default();
    Ok(AdamW {
        lr: keywords.number("lr", lr),
        betas: (keywords.number("beta1", betas.0), keywords.number("beta2", betas.1)),
        eps: keywords.number("eps", eps),
        weight_decay: keywords.number("weight_decay", weight_decay),
        amsgrad: keywords.flag("amsgrad", amsgrad)?,
        maximize: keywords.flag("maximize", maximize)?,
    })
}

fn adagrad(keywords: &mut Keywords<'_>) -> Result<Adagrad> {
    let Adagrad { lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize } = Adagrad::default();
    Ok(Adagrad {
        lr: keywords.number("lr", lr),
        lr_decay: keywords.number("lr_decay", lr_decay),
        weight_decay: keywords.number("weight_decay", weight_decay),
        initial_accumulator_value: keywords.number("initial_accumulator_value", initial_accumulator_value),
        eps: keywords.number("eps", eps),
        maximize: keywords.flag("maximize", maximize)?,
    })
}

fn rmsprop(keywords: &mut Keywords<'_>) -> Result<RmsProp> {
    let RmsProp { lr, alpha, eps, weight_decay, momentum, centered, maximize } = RmsProp::default();
    Ok(RmsProp {
        lr: keywords.number("lr", lr),
        alpha: keywords.number("alpha", alpha),
        eps: keywords.number("eps", eps),
        weight_decay: keywords.number("weight_decay", weight_decay),
        momentum: keywords.number("momentum", momentum),
        centered: keywords.flag("centered", centered)?,
        maximize: keywords.flag("maximize", maximize)?,
    })
}

fn adadelta(keywords: &mut Keywords<'_>) -> Result<Adadelta> {
    let Adadelta { lr, rho, eps, weight_decay, maximize } = Adadelta::default();
    Ok(Adadelta {
        lr: keywords.number("lr", lr),
        rho: keywords.number("rho", rho),
        eps: keywords.number("eps", eps),
        weight_decay: keywords.number("weight_decay", weight_decay),
        maximize: keywords.flag("maximize", maximize)?,
    })
}

fn adamax(keywords: &mut Keywords<'_>) -> Result<Adamax> {
    let Adamax { lr, betas, eps, weight_decay, maximize } = Adamax::default();
    Ok(Adamax {
        lr: keywords.number("lr", lr),
        betas: (keywords.number("beta1", betas.0), keywords.number("beta2", betas.1)),
        eps: keywords.number("eps", eps),
        weight_decay: keywords.number("weight_decay", weight_decay),
        maximize: keywords.flag("maximize", maximize)?,
    })
}

fn rprop(keywords: &mut Keywords<'_>) -> Result<Rprop> {
    let Rprop { lr, etas, step_sizes, maximize } = Rprop::default();
    Ok(Rprop {
        lr: keywords.number("lr", lr),
        etas: (keywords.number("eta_minus", etas.0), keywords.number("eta_plus", etas.1)),
        step_sizes: (
            keywords.number("step_size_min", step_sizes.0),
            keywords.number("step_size_max", step_sizes.1),
        ),
        maximize: keywords.flag("maximize", maximize)?,
    })
}

fn lion(keywords: &mut Keywords<'_>) -> Result<Lion> {
    let Lion { lr, betas, weight_decay, maximize } = Lion::default();
    Ok(Lion {
        lr: keywords.number("lr", lr),
        betas: (keywords.number("beta1", betas.0), keywords.number("beta2", betas.1)),
        weight_decay: keywords.number("weight_decay", weight_decay),
        maximize: keywords.flag("maximize", maximize)?,
    })
}

fn nadam(keywords: &mut Keywords<'_>) -> Result<NAdam> {
    let NAdam { lr, betas, eps, weight_decay, momentum_decay, decoupled_weight_decay, maximize } =
        NAdam::default();
    Ok(NAdam {
        lr: keywords.number("lr", lr),
        betas: (keywords.number("beta1", betas.0), keywords.number("beta2", betas.1)),
        eps: keywords.number("eps", eps),
        weight_decay: keywords.number("weight_decay", weight_decay),
        momentum_decay: keywords.number("momentum_decay", momentum_decay),
        decoupled_weight_decay: keywords.flag("decoupled_weight_decay", decoupled_weight_decay)?,
        maximize: keywords.flag("maximize", maximize)?,
    })
}

fn radam(keywords: &mut Keywords<'_>) -> Result<RAdam> {
    let RAdam { lr, betas, eps, weight_decay, decoupled_weight_decay, maximize } = RAdam::default();
    Ok(RAdam {
        lr: keywords.number("lr", lr),
        betas: (keywords.number("beta1", betas.0), keywords.number("beta2", betas.1)),
        eps: keywords.number("eps", eps),
        weight_decay: keywords.number("weight_decay", weight_decay),
        decoupled_weight_decay: keywords.flag("decoupled_weight_decay", decoupled_weight_decay)?,
        maximize: keywords.flag("maximize", maximize)?,
    })
}

fn lamb(keywords: &mut Keywords<'_>) -> Result<Lamb> {
    let Lamb { lr, betas, eps, weight_decay, maximize } = Lamb::default();
    Ok(Lamb {
        lr: keywords.number("lr", lr),
        betas: (keywords.number("beta1", betas.0), keywords.number("beta2", betas.1)),
        eps: keywords.number("eps", eps),
        weight_decay: keywords.number("weight_decay", weight_decay),
        maximize: keywords.flag("maximize", maximize)?,
    })
}
