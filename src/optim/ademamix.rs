//! AdEMAMix's hyperparameters and states.
//!
//! `torch.optim` has no AdEMAMix; defaults are the paper's. The kernel multiplies the slow average by `lr * alpha`, which
//! must be finite as f32.

use super::declare::optimizer;
use super::{decay_fits, first_step_fits};
use crate::abi::INSTEP_OPTIMIZER_ademamix;
use crate::error::{Error, Result};

optimizer! {
    /// AdEMAMix: AdamW with a second, much slower average of the gradients.
    ///
    /// The paper warms up `alpha` and `beta3` over the first steps. Here both are constant.
    ///
    /// States: `exp_avg_fast`, `exp_avg_slow`, `exp_avg_sq`.
    pub struct AdEmaMix: "AdEMAMix" {
        /// Learning rate.
        pub lr: f64 = 1e-3 => lr: NonNegative;
        /// Decay rates of the fast average and of the second moment.
        pub betas: (f64, f64) = (0.9, 0.999) => beta1: BelowOne, beta2: BelowOne;
        /// Decay rate of the slow average, which has no bias correction.
        pub beta3: f64 = 0.9999 => beta3: BelowOne;
        /// Weight of the slow average; the fast average has weight 1.
        pub alpha: f64 = 5.0 => alpha: NonNegative;
        /// Added to the root of the corrected second moment.
        pub eps: f64 = 1e-8 => eps: NonNegative;
        /// Decoupled weight decay; multiplied by the learning rate.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Pagliardini, Ablin & Grangier, \"The AdEMAMix Optimizer: Better, Faster, Older\", 2024, algorithm 1.";
    kernel: INSTEP_OPTIMIZER_ademamix, ademamix;
    states: ["exp_avg_fast", "exp_avg_slow", "exp_avg_sq"];
    relations: AdEmaMix::relate;
}

impl AdEmaMix {
    fn relate(&self) -> Result<()> {
        first_step_fits(self.lr, self.betas.0)?;
        if !((self.lr * self.alpha) as f32).is_finite() {
            return Err(Error::config("alpha", self.alpha, "lr * alpha overflows f32", "lower one of them"));
        }
        decay_fits(self.lr, self.weight_decay)
    }
}
