//! RAdam's hyperparameters; the update is in `kernels/rules/radam.h`.
//!
//! Defaults are those of `torch.optim.RAdam`. Must refuse what vanishes or overflows in f32, as the others do.

use super::{Optimizer, decay_rate, hyper_of, non_negative, sealed::Rule};
use crate::abi::{INSTEP_OPTIMIZER_radam, InstepHyper, InstepRAdamHyper};
use crate::error::{Error, Result};

/// RAdam: Adam that warms itself up, by a learning rate that is as small as the second moment is uncertain; plain
/// momentum over the first steps.
///
/// States: `exp_avg`, `exp_avg_sq`.
///
/// # Source
/// Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", ICLR 2020, in the variant of
/// `torch.optim.RAdam`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RAdam {
    /// Learning rate. Default 1e-3.
    pub lr: f64,
    /// Decay rates of the first and second moment. Default (0.9, 0.999).
    pub betas: (f64, f64),
    /// Added to the root of the second moment, before its correction. Default 1e-8.
    pub eps: f64,
    /// L2 penalty, added to the gradient, unless `decoupled_weight_decay`. Default 0.
    pub weight_decay: f64,
    /// The decay acts on the parameter, multiplied by the learning rate, apart from the gradient. Default false.
    pub decoupled_weight_decay: bool,
    /// Ascend instead of descend. Default false.
    pub maximize: bool,
}

impl Default for RAdam {
    fn default() -> Self {
        RAdam {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled_weight_decay: false,
            maximize: false,
        }
    }
}

impl Optimizer for RAdam {
    fn state_names(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }
}

impl Rule for RAdam {
    fn kernel(&self) -> u32 {
        INSTEP_OPTIMIZER_radam
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
        let hyper = InstepRAdamHyper {
            lr: non_negative("lr", self.lr)?,
            beta1: decay_rate("betas.0", self.betas.0)?,
            beta2: decay_rate("betas.1", self.betas.1)?,
            eps: non_negative("eps", self.eps)?,
            weight_decay: non_negative("weight_decay", self.weight_decay)?,
            decoupled: self.decoupled_weight_decay.into(),
            maximize: self.maximize.into(),
        };
        // The first step's size is the largest one: rectification and correction only make it smaller.
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
        Ok(hyper_of(|all| all.radam = hyper))
    }
}
