//! NAdam's hyperparameters and states.
//!
//! Defaults are those of `torch.optim.NAdam`. The kernel computes the momenta, because the result of libm's `pow` depends
//! on the machine and on the caller's rounding mode.

use super::declare::optimizer;
use super::{decay_fits, first_step_fits};
use crate::abi::INSTEP_OPTIMIZER_nadam;
use crate::error::Result;

optimizer! {
    /// NAdam: Adam with Nesterov momentum, and a momentum that grows over the first steps.
    ///
    /// States: `exp_avg`, `exp_avg_sq`, and one number per parameter, `mu_product`
    /// ([`carried`](crate::Stepper::carried)).
    pub struct NAdam: "NAdam" {
        /// Learning rate.
        pub lr: f64 = 2e-3 => lr: NonNegative;
        /// Decay rates of the first and second moment.
        pub betas: (f64, f64) = (0.9, 0.999) => beta1: BelowOne, beta2: BelowOne;
        /// Added to the root of the corrected second moment.
        pub eps: f64 = 1e-8 => eps: NonNegative;
        /// L2 penalty, added to the gradient, unless `decoupled_weight_decay`.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Decay of the momentum schedule; the momentum rises from `betas.0 / 2` to `betas.0`.
        pub momentum_decay: f64 = 4e-3 => momentum_decay: NonNegativeF64;
        /// Makes weight decay decoupled: it is multiplied by the learning rate and subtracted from the parameter.
        pub decoupled_weight_decay: bool = false => decoupled: Flag;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Dozat, \"Incorporating Nesterov Momentum into Adam\", ICLR 2016 workshop, in the variant of \
             `torch.optim.NAdam`.";
    kernel: INSTEP_OPTIMIZER_nadam, nadam;
    states: ["exp_avg", "exp_avg_sq"];
    relations: NAdam::relate;
    facts { carried: Some("mu_product") }
}

impl NAdam {
    fn relate(&self) -> Result<()> {
        // The product of momenta is at most betas.0, so no factor of the gradient or of its average is larger.
        first_step_fits(self.lr, self.betas.0)?;
        if self.decoupled_weight_decay { decay_fits(self.lr, self.weight_decay) } else { Ok(()) }
    }
}
