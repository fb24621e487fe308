//! Lion's hyperparameters; the update is in `kernels/rules/lion.h`.
//!
//! Defaults are the paper's, since `torch.optim` has no Lion: its learning rate is a tenth of AdamW's, because every
//! element moves by all of it. Must refuse what vanishes or overflows in f32, as the others do.

use super::{Optimizer, decay_rate, hyper_of, non_negative, sealed::Rule};
use crate::abi::{INSTEP_OPTIMIZER_lion, InstepHyper, InstepLionHyper};
use crate::error::{Error, Result};

/// Lion: every element moves by the learning rate, in the direction of a momentum's sign; half of Adam's memory.
///
/// State: `exp_avg`.
///
/// # Source
/// Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// Learning rate. Default 1e-4.
    pub lr: f64,
    /// Decay rates of the average whose sign is taken, and of the average that is kept. Default (0.9, 0.99).
    pub betas: (f64, f64),
    /// Decay, multiplied by the learning rate. Default 0.
    pub weight_decay: f64,
    /// Ascend instead of descend. Default false.
    pub maximize: bool,
}

impl Default for Lion {
    fn default() -> Self {
        Lion { lr: 1e-4, betas: (0.9, 0.99), weight_decay: 0.0, maximize: false }
    }
}

impl Optimizer for Lion {
    fn state_names(&self) -> &'static [&'static str] {
        &["exp_avg"]
    }
}

impl Rule for Lion {
    fn kernel(&self) -> u32 {
        INSTEP_OPTIMIZER_lion
    }

    fn lr_mut(&mut self) -> &mut f64 {
        &mut self.lr
    }

    fn boxed(&self) -> Box<dyn Optimizer> {
        Box::new(*self)
    }

    fn hyper(&self) -> Result<InstepHyper> {
        let hyper = InstepLionHyper {
            lr: non_negative("lr", self.lr)?,
            beta1: decay_rate("betas.0", self.betas.0)?,
            beta2: decay_rate("betas.1", self.betas.1)?,
            weight_decay: non_negative("weight_decay", self.weight_decay)?,
            maximize: self.maximize.into(),
            reserved: 0,
        };
        if !((self.lr * self.weight_decay) as f32).is_finite() {
            return Err(Error::config(
                "weight_decay",
                self.weight_decay,
                "lr * weight_decay must be finite as f32",
            ));
        }
        Ok(hyper_of(|all| all.lion = hyper))
    }
}
