//! Adamax's hyperparameters; the update is in `kernels/rules/adamax.h`.
//!
//! Defaults are those of `torch.optim.Adamax` (its functional twin says 1e-3 for lr). Must refuse a rate whose first,
//! largest step size overflows.

use super::{Optimizer, decay_rate, hyper_of, non_negative, sealed::Rule};
use crate::abi::{INSTEP_OPTIMIZER_adamax, InstepAdamaxHyper, InstepHyper};
use crate::error::{Error, Result};

/// Adamax: Adam with a fading maximum in the place of the second moment's root.
///
/// States: `exp_avg`, `exp_inf`.
///
/// # Source
/// Kingma & Ba, ICLR 2015, section 7.1, in the variant of `torch.optim.Adamax`, which adds eps to the gradient's size
/// inside the maximum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adamax {
    /// Learning rate. Default 2e-3.
    pub lr: f64,
    /// Decay rates of the first moment and of the maximum. Default (0.9, 0.999).
    pub betas: (f64, f64),
    /// Added to the size of the gradient. Default 1e-8.
    pub eps: f64,
    /// L2 penalty, added to the gradient. Default 0.
    pub weight_decay: f64,
    /// Ascend instead of descend. Default false.
    pub maximize: bool,
}

impl Default for Adamax {
    fn default() -> Self {
        Adamax { lr: 2e-3, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, maximize: false }
    }
}

impl Optimizer for Adamax {
    fn state_names(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_inf"]
    }
}

impl Rule for Adamax {
    fn kernel(&self) -> u32 {
        INSTEP_OPTIMIZER_adamax
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

    fn hyper(&self) -> Result<InstepHyper> {
        // The first step's size is the largest one.
        if !((self.lr / (1.0 - self.betas.0)) as f32).is_finite() && self.betas.0 < 1.0 {
            return Err(Error::config("lr", self.lr, "lr / (1 - betas.0) must be finite as f32"));
        }
        let hyper = InstepAdamaxHyper {
            lr: non_negative("lr", self.lr)?,
            beta1: decay_rate("betas.0", self.betas.0)?,
            beta2: decay_rate("betas.1", self.betas.1)?,
            eps: non_negative("eps", self.eps)?,
            weight_decay: non_negative("weight_decay", self.weight_decay)?,
            maximize: self.maximize.into(),
            reserved: 0,
        };
        Ok(hyper_of(|all| all.adamax = hyper))
    }
}
