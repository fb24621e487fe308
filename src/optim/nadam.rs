//! NAdam's hyperparameters; the update is in `kernels/rules/nadam.h`.
//!
//! Defaults are those of `torch.optim.NAdam`. Must leave the momenta themselves to the kernel: a power of libm's
//! depends on the machine, and on the caller's rounding mode.

use super::{Optimizer, decay_rate, hyper_of, non_negative, sealed::Rule};
use crate::abi::{INSTEP_OPTIMIZER_nadam, InstepHyper, InstepNAdamHyper};
use crate::error::{Error, Result};

/// NAdam: Adam that looks ahead along its new first moment, with a momentum that grows over the first steps.
///
/// States: `exp_avg`, `exp_avg_sq`, and one number per parameter, `mu_product`
/// ([`carried_of`](crate::Stepper::carried_of)).
///
/// # Source
/// Dozat, "Incorporating Nesterov Momentum into Adam", ICLR 2016 workshop, in the variant of `torch.optim.NAdam`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NAdam {
    /// Learning rate. Default 2e-3.
    pub lr: f64,
    /// Decay rates of the first and second moment. Default (0.9, 0.999).
    pub betas: (f64, f64),
    /// Added to the root of the corrected second moment. Default 1e-8.
    pub eps: f64,
    /// L2 penalty, added to the gradient, unless `decoupled_weight_decay`. Default 0.
    pub weight_decay: f64,
    /// How fast the momentum reaches `betas.0`, from half of it. Default 4e-3.
    pub momentum_decay: f64,
    /// The decay acts on the parameter, multiplied by the learning rate, apart from the gradient. Default false.
    pub decoupled_weight_decay: bool,
    /// Ascend instead of descend. Default false.
    pub maximize: bool,
}

impl Default for NAdam {
    fn default() -> Self {
        NAdam {
            lr: 2e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            momentum_decay: 4e-3,
            decoupled_weight_decay: false,
            maximize: false,
        }
    }
}

impl Optimizer for NAdam {
    fn state_names(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }
}

impl Rule for NAdam {
    fn kernel(&self) -> u32 {
        INSTEP_OPTIMIZER_nadam
    }

    fn lr_mut(&mut self) -> &mut f64 {
        &mut self.lr
    }

    fn eps(&self) -> Option<f64> {
        Some(self.eps)
    }

    fn boxed(&self) -> Box<dyn Optimizer> {
        Box::new(*self)
    }

    fn carried(&self) -> Option<&'static str> {
        Some("mu_product")
    }

    fn hyper(&self) -> Result<InstepHyper> {
        if !(self.momentum_decay >= 0.0 && self.momentum_decay.is_finite()) {
            return Err(Error::config(
                "momentum_decay",
                self.momentum_decay,
                "must be finite and not negative",
            ));
        }
        let hyper = InstepNAdamHyper {
            lr: non_negative("lr", self.lr)?,
            beta1: decay_rate("betas.0", self.betas.0)?,
            beta2: decay_rate("betas.1", self.betas.1)?,
            eps: non_negative("eps", self.eps)?,
            weight_decay: non_negative("weight_decay", self.weight_decay)?,
            momentum_decay: self.momentum_decay,
            decoupled: self.decoupled_weight_decay.into(),
            maximize: self.maximize.into(),
        };
        // No factor of the gradient or of its average is larger: the product of momenta is at most betas.0.
        if !((self.lr / (1.0 - self.betas.0)) as f32).is_finite() {
            return Err(Error::config("lr", self.lr, "lr / (1 - betas.0) must be finite as f32"));
        }
        if self.decoupled_weight_decay && !((self.lr * self.weight_decay) as f32).is_finite() {
            return Err(Error::config(
                "weight_decay",
                self.weight_decay,
                "lr * weight_decay must be finite as f32",
            ));
        }
        Ok(hyper_of(|all| all.nadam = hyper))
    }
}
