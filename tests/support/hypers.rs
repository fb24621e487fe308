//! What a kernel is told of an optimizer, for tests that call kernels themselves.
//!
//! Written out field by field: a field that `src/optim` hands over wrongly must differ from this. Must take every
//! hyperparameter from the case: a default here would leave a flag untested.

use instep::abi::*;
use instep::{Adadelta, Adagrad, Adam, AdamW, Adamax, Lion, RmsProp, Rprop, Sgd};

use crate::support::optimizers::Optim;

/// Kernel, hyperparameters and number of states of an optimizer.
pub(crate) fn rule(optim: Optim) -> (u32, InstepHyper, usize) {
    let adam = |optim: Adam, decoupled: bool| {
        let Adam { lr, betas: (beta1, beta2), eps, weight_decay, amsgrad, maximize } = optim;
        let (decoupled, maximize) = (decoupled.into(), maximize.into());
        let reserved = 0;
        let states = if amsgrad { 3 } else { 2 };
        let amsgrad = amsgrad.into();
        let hyper =
            InstepAdamHyper { lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize, reserved };
        (INSTEP_OPTIMIZER_adam, InstepHyper { adam: hyper }, states)
    };
    match optim {
        Optim::Sgd(Sgd { lr, momentum, dampening, weight_decay, nesterov, maximize }) => {
            let (nesterov, maximize) = (nesterov.into(), maximize.into());
            let hyper = InstepSgdHyper { lr, momentum, dampening, weight_decay, nesterov, maximize };
            (INSTEP_OPTIMIZER_sgd, InstepHyper { sgd: hyper }, usize::from(momentum != 0.0))
        }
        Optim::Adam(optim) => adam(optim, false),
        Optim::AdamW(AdamW { lr, betas, eps, weight_decay, amsgrad, maximize }) => {
            adam(Adam { lr, betas, eps, weight_decay, amsgrad, maximize }, true)
        }
        Optim::Adagrad(adagrad) => {
            let Adagrad { lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize } = adagrad;
            let maximize = maximize.into();
            let reserved = 0;
            let adagrad = InstepAdagradHyper {
                lr,
                lr_decay,
                weight_decay,
                initial_accumulator_value,
                eps,
                maximize,
                reserved,
            };
            (INSTEP_OPTIMIZER_adagrad, InstepHyper { adagrad }, 1)
        }
        Optim::RmsProp(optim) => {
            let RmsProp { lr, alpha, eps, weight_decay, momentum, centered, maximize } = optim;
            let states = 1 + usize::from(momentum != 0.0) + usize::from(centered);
            let (centered, maximize) = (centered.into(), maximize.into());
            let rmsprop = InstepRmsPropHyper { lr, alpha, eps, weight_decay, momentum, centered, maximize };
            (INSTEP_OPTIMIZER_rmsprop, InstepHyper { rmsprop }, states)
        }
        Optim::Adadelta(Adadelta { lr, rho, eps, weight_decay, maximize }) => {
            let (maximize, reserved) = (maximize.into(), 0);
            let adadelta = InstepAdadeltaHyper { lr, rho, eps, weight_decay, maximize, reserved };
            (INSTEP_OPTIMIZER_adadelta, InstepHyper { adadelta }, 2)
        }
        Optim::Adamax(Adamax { lr, betas: (beta1, beta2), eps, weight_decay, maximize }) => {
            let (maximize, reserved) = (maximize.into(), 0);
            let adamax = InstepAdamaxHyper { lr, beta1, beta2, eps, weight_decay, maximize, reserved };
            (INSTEP_OPTIMIZER_adamax, InstepHyper { adamax }, 2)
        }
        Optim::Rprop(Rprop { lr, etas, step_sizes, maximize }) => {
            let ((eta_minus, eta_plus), (step_size_min, step_size_max)) = (etas, step_sizes);
            let (maximize, reserved) = (maximize.into(), 0);
            let hyper = InstepRpropHyper {
                lr,
                eta_minus,
                eta_plus,
                step_size_min,
                step_size_max,
                maximize,
                reserved,
            };
            (INSTEP_OPTIMIZER_rprop, InstepHyper { rprop: hyper }, 2)
        }
        Optim::Lion(Lion { lr, betas: (beta1, beta2), weight_decay, maximize }) => {
            let (maximize, reserved) = (maximize.into(), 0);
            let hyper = InstepLionHyper { lr, beta1, beta2, weight_decay, maximize, reserved };
            (INSTEP_OPTIMIZER_lion, InstepHyper { lion: hyper }, 1)
        }
        Optim::NAdam(optim) => {
            let hyper = InstepNAdamHyper {
                lr: optim.lr,
                beta1: optim.betas.0,
                beta2: optim.betas.1,
                eps: optim.eps,
                weight_decay: optim.weight_decay,
                momentum_decay: optim.momentum_decay,
                decoupled: optim.decoupled_weight_decay.into(),
                maximize: optim.maximize.into(),
            };
            (INSTEP_OPTIMIZER_nadam, InstepHyper { nadam: hyper }, 2)
        }
        Optim::RAdam(optim) => {
            let hyper = InstepRAdamHyper {
                lr: optim.lr,
                beta1: optim.betas.0,
                beta2: optim.betas.1,
                eps: optim.eps,
                weight_decay: optim.weight_decay,
                decoupled: optim.decoupled_weight_decay.into(),
                maximize: optim.maximize.into(),
            };
            (INSTEP_OPTIMIZER_radam, InstepHyper { radam: hyper }, 2)
        }
        Optim::Lamb(optim) => {
            let hyper = InstepLambHyper {
                lr: optim.lr,
                beta1: optim.betas.0,
                beta2: optim.betas.1,
                eps: optim.eps,
                weight_decay: optim.weight_decay,
                maximize: optim.maximize.into(),
                reserved: 0,
            };
            (INSTEP_OPTIMIZER_lamb, InstepHyper { lamb: hyper }, 2)
        }
    }
}

/// The launches of an optimizer's step.
pub(crate) fn parts(optim: Optim) -> &'static [InstepStepPart] {
    match optim {
        Optim::Lamb(_) => &[INSTEP_PART_MEASURE, INSTEP_PART_APPLY],
        _ => &[INSTEP_PART_WHOLE],
    }
}
