//! Adam's and AdamW's hyperparameters; the update, one for both, is in `kernels/rules/adam.h`.
//!
//! Defaults are those of `torch.optim`. The two are separate types, as users look for them, and differ in where
//! the weight decay enters and in its default.

use super::{Optimizer, decay_rate, hyper_of, non_negative, sealed::Rule};
use crate::abi::{INSTEP_OPTIMIZER_adam, InstepAdamHyper, InstepHyper};
use crate::error::{Error, Result};

const STATES: &[&str] = &["exp_avg", "exp_avg_sq"];
const AMSGRAD_STATES: &[&str] = &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"];

/// Adam: weight decay is an L2 penalty, added to the gradient.
///
/// States: `exp_avg`, `exp_avg_sq`, and with `amsgrad` `max_exp_avg_sq`.
///
/// # Source
/// Kingma & Ba, ICLR 2015; amsgrad: Reddi, Kale & Kumar, ICLR 2018.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Learning rate. Default 1e-3.
    pub lr: f64,
    /// Decay rates of the first and second moment. Default (0.9, 0.999).
    pub betas: (f64, f64),
    /// Added to the root of the corrected second moment. Default 1e-8.
    pub eps: f64,
    /// L2 penalty. Default 0.
    pub weight_decay: f64,
    /// Divide by the largest second moment seen, instead of the current one. Default false.
    pub amsgrad: bool,
    /// Ascend instead of descend. Default false.
    pub maximize: bool,
}

/// AdamW: weight decay acts on the parameter, apart from the gradient.
///
/// States: `exp_avg`, `exp_avg_sq`, and with `amsgrad` `max_exp_avg_sq`.
///
/// # Source
/// Loshchilov & Hutter, ICLR 2019.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate. Default 1e-3.
    pub lr: f64,
    /// Decay rates of the first and second moment. Default (0.9, 0.999).
    pub betas: (f64, f64),
    /// Added to the root of the corrected second moment. Default 1e-8.
    pub eps: f64,
    /// Decay, multiplied by the learning rate. Default 1e-2.
    pub weight_decay: f64,
    /// Divide by the largest second moment seen, instead of the current one. Default false.
    pub amsgrad: bool,
    /// Ascend instead of descend. Default false.
    pub maximize: bool,
}

impl Default for Adam {
    fn default() -> Self {
        Adam { lr: 1e-3, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, amsgrad: false, maximize: false }
    }
}

impl Default for AdamW {
    fn default() -> Self {
        AdamW {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 1e-2,
            amsgrad: false,
            maximize: false,
        }
    }
}

impl Optimizer for Adam {
    fn state_names(&self) -> &'static [&'static str] {
        if self.amsgrad { AMSGRAD_STATES } else { STATES }
    }
}

impl Optimizer for AdamW {
    fn state_names(&self) -> &'static [&'static str] {
        if self.amsgrad { AMSGRAD_STATES } else { STATES }
    }
}

impl Rule for Adam {
    fn kernel(&self) -> u32 {
        INSTEP_OPTIMIZER_adam
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
        let hyper = InstepAdamHyper {
            lr: non_negative("lr", self.lr)?,
            beta1: decay_rate("betas.0", self.betas.0)?,
            beta2: decay_rate("betas.1", self.betas.1)?,
            eps: non_negative("eps", self.eps)?,
            weight_decay: non_negative("weight_decay", self.weight_decay)?,
            decoupled: 0,
            amsgrad: self.amsgrad.into(),
            maximize: self.maximize.into(),
            reserved: 0,
        };
        Ok(hyper_of(|all| all.adam = hyper))
    }
}

impl Rule for AdamW {
    fn kernel(&self) -> u32 {
        INSTEP_OPTIMIZER_adam
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
        let AdamW { lr, betas, eps, weight_decay, amsgrad, maximize } = *self;
        let mut hyper = Adam { lr, betas, eps, weight_decay, amsgrad, maximize }.hyper()?;
        if !((lr * weight_decay) as f32).is_finite() {
            return Err(Error::config(
                "weight_decay",
                weight_decay,
                "lr * weight_decay must be finite as f32",
            ));
        }
        hyper.adam.decoupled = 1;
        Ok(hyper)
    }
}
