//! RAdam's hyperparameters and states.
//!
//! Defaults are those of `torch.optim.RAdam`. Validation bounds the first step, the largest one.

use super::declare::optimizer;
use super::{decay_fits, first_step_fits};
use crate::abi::INSTEP_OPTIMIZER_radam;
use crate::error::Result;

optimizer! {
    /// RAdam: Adam with a built-in warm-up. The learning rate is smaller while the second moment is uncertain, and the
    /// first steps are those of plain momentum.
    ///
    /// States: `exp_avg`, `exp_avg_sq`.
    pub struct RAdam: "RAdam" {
        /// Learning rate.
        pub lr: f64 = 1e-3 => lr: NonNegative;
        /// Decay rates of the first and second moment.
        pub betas: (f64, f64) = (0.9, 0.999) => beta1: BelowOne, beta2: BelowOne;
        /// Added to the root of the second moment, before its correction.
        pub eps: f64 = 1e-8 => eps: NonNegative;
        /// L2 penalty, added to the gradient, unless `decoupled_weight_decay`.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Makes weight decay decoupled: it is multiplied by the learning rate and subtracted from the parameter.
        pub decoupled_weight_decay: bool = false => decoupled: Flag;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Liu et al., \"On the Variance of the Adaptive Learning Rate and Beyond\", ICLR 2020, in the variant of \
             `torch.optim.RAdam`.";
    kernel: INSTEP_OPTIMIZER_radam, radam;
    states: ["exp_avg", "exp_avg_sq"];
    relations: RAdam::relate;
}

impl RAdam {
    fn relate(&self) -> Result<()> {
        // Rectification and correction only make later steps smaller.
        first_step_fits(self.lr, self.betas.0)?;
        if self.decoupled_weight_decay { decay_fits(self.lr, self.weight_decay) } else { Ok(()) }
    }
}
