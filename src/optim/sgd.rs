//! SGD's hyperparameters and states.
//!
//! Defaults are those of `torch.optim.SGD`; PyTorch's functional SGD has another `lr`, 1e-2. As in PyTorch, `nesterov`
//! without momentum is refused, because the formula would silently be plain SGD.

use super::declare::optimizer;
use crate::abi::INSTEP_OPTIMIZER_sgd;
use crate::error::{Result, refuse};

optimizer! {
    /// Stochastic gradient descent, with optional momentum.
    ///
    /// State: `momentum_buffer`, if `momentum` is not zero.
    pub struct Sgd: "SGD" {
        /// Learning rate.
        pub lr: f64 = 1e-3 => lr: NonNegative;
        /// Momentum factor; 0 disables momentum.
        pub momentum: f64 = 0.0 => momentum: NonNegative;
        /// The buffer adds `(1 - dampening) * gradient`.
        pub dampening: f64 = 0.0 => dampening: Finite;
        /// L2 penalty, added to the gradient.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Uses Nesterov momentum; needs `momentum` > 0 and `dampening` = 0.
        pub nesterov: bool = false => nesterov: Flag;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Sutskever et al., ICML 2013, in the variant of `torch.optim.SGD`: a parameter's first buffer is a copy of \
             its gradient, without dampening.";
    kernel: INSTEP_OPTIMIZER_sgd, sgd;
    states: [];
    states: ["momentum_buffer"] if momentum;
    relations: Sgd::relate;
}

impl Sgd {
    fn relate(&self) -> Result<()> {
        refuse! {
            "nesterov" = true, if self.nesterov && (self.momentum <= 0.0 || self.dampening != 0.0)
                => "works only with momentum and without dampening", "set a momentum above 0 and dampening to 0";
        }
        Ok(())
    }
}
