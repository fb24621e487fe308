//! Lion's hyperparameters and states.
//!
//! `torch.optim` has no Lion; defaults are the paper's. Every element changes by the full learning rate, so the default
//! learning rate is a tenth of AdamW's.

use super::declare::optimizer;
use super::decay_fits;
use crate::abi::INSTEP_OPTIMIZER_lion;
use crate::error::Result;

optimizer! {
    /// Lion: every element changes by the learning rate, with the sign of a momentum. Its states take half as much
    /// memory as Adam's.
    ///
    /// State: `exp_avg`.
    pub struct Lion: "Lion" {
        /// Learning rate.
        pub lr: f64 = 1e-4 => lr: NonNegative;
        /// Decay rates of the average that gives the sign, and of the stored average.
        pub betas: (f64, f64) = (0.9, 0.99) => beta1: BelowOne, beta2: BelowOne;
        /// Decoupled weight decay; multiplied by the learning rate.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Chen et al., \"Symbolic Discovery of Optimization Algorithms\", NeurIPS 2023.";
    kernel: INSTEP_OPTIMIZER_lion, lion;
    states: ["exp_avg"];
    relations: Lion::relate;
}

impl Lion {
    fn relate(&self) -> Result<()> {
        decay_fits(self.lr, self.weight_decay)
    }
}
