//! Adamax's hyperparameters and states.
//!
//! Defaults are those of `torch.optim.Adamax`; PyTorch's functional Adamax has another `lr`, 1e-3.

use super::declare::optimizer;
use super::first_step_fits;
use crate::abi::INSTEP_OPTIMIZER_adamax;
use crate::error::Result;

optimizer! {
    /// Adamax: Adam with a decaying maximum of the gradient's magnitude instead of the root of the second moment.
    ///
    /// States: `exp_avg`, `exp_inf`.
    pub struct Adamax: "Adamax" {
        /// Learning rate.
        pub lr: f64 = 2e-3 => lr: NonNegative;
        /// Decay rates of the first moment and of the maximum.
        pub betas: (f64, f64) = (0.9, 0.999) => beta1: BelowOne, beta2: BelowOne;
        /// Added to the absolute value of the gradient.
        pub eps: f64 = 1e-8 => eps: NonNegative;
        /// L2 penalty, added to the gradient.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Kingma & Ba, ICLR 2015, section 7.1, in the variant of `torch.optim.Adamax`, which adds eps to the \
             gradient's size inside the maximum.";
    kernel: INSTEP_OPTIMIZER_adamax, adamax;
    states: ["exp_avg", "exp_inf"];
    relations: Adamax::relate;
}

impl Adamax {
    fn relate(&self) -> Result<()> {
        first_step_fits(self.lr, self.betas.0)
    }
}
