//! Adam's and AdamW's hyperparameters and states, for one kernel.
//!
//! Defaults are those of `torch.optim`. There are two types because Adam and AdamW apply weight decay differently and
//! have different defaults for it.

use super::declare::optimizer;
use super::{decay_fits, first_step_fits};
use crate::abi::INSTEP_OPTIMIZER_adam;
use crate::error::Result;

optimizer! {
    /// Adam: weight decay is an L2 penalty, added to the gradient.
    ///
    /// States: `exp_avg`, `exp_avg_sq`, and with `amsgrad` `max_exp_avg_sq`.
    pub struct Adam: "Adam" {
        /// Learning rate.
        pub lr: f64 = 1e-3 => lr: NonNegative;
        /// Decay rates of the first and second moment.
        pub betas: (f64, f64) = (0.9, 0.999) => beta1: BelowOne, beta2: BelowOne;
        /// Added to the root of the corrected second moment.
        pub eps: f64 = 1e-8 => eps: NonNegative;
        /// L2 penalty.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Divide by the largest second moment seen, instead of the current one.
        pub amsgrad: bool = false => amsgrad: Flag;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Kingma & Ba, ICLR 2015; amsgrad: Reddi, Kale & Kumar, ICLR 2018.";
    kernel: INSTEP_OPTIMIZER_adam, adam { decoupled: 0 };
    states: ["exp_avg", "exp_avg_sq"];
    states: ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"] if amsgrad;
    relations: Adam::relate;
}

optimizer! {
    /// AdamW: weight decay is decoupled: it changes the parameter directly, not the gradient.
    ///
    /// States: `exp_avg`, `exp_avg_sq`, and with `amsgrad` `max_exp_avg_sq`.
    pub struct AdamW: "AdamW" {
        /// Learning rate.
        pub lr: f64 = 1e-3 => lr: NonNegative;
        /// Decay rates of the first and second moment.
        pub betas: (f64, f64) = (0.9, 0.999) => beta1: BelowOne, beta2: BelowOne;
        /// Added to the root of the corrected second moment.
        pub eps: f64 = 1e-8 => eps: NonNegative;
        /// Decoupled weight decay; multiplied by the learning rate.
        pub weight_decay: f64 = 1e-2 => weight_decay: NonNegative;
        /// Divide by the largest second moment seen, instead of the current one.
        pub amsgrad: bool = false => amsgrad: Flag;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Loshchilov & Hutter, ICLR 2019; amsgrad: Reddi, Kale & Kumar, ICLR 2018.";
    kernel: INSTEP_OPTIMIZER_adam, adam { decoupled: 1 };
    states: ["exp_avg", "exp_avg_sq"];
    states: ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"] if amsgrad;
    relations: AdamW::relate;
}

impl Adam {
    fn relate(&self) -> Result<()> {
        first_step_fits(self.lr, self.betas.0)
    }
}

impl AdamW {
    fn relate(&self) -> Result<()> {
        first_step_fits(self.lr, self.betas.0)?;
        decay_fits(self.lr, self.weight_decay)
    }
}
