//! Adagrad's hyperparameters and states.
//!
//! Defaults are those of `torch.optim.Adagrad`. The sum starts as zeros, and the first update adds
//! `initial_accumulator_value`. PyTorch's sum has that value before the first update.

use super::declare::optimizer;
use crate::abi::INSTEP_OPTIMIZER_adagrad;

optimizer! {
    /// Adagrad: an element's learning rate falls as the sum of its squared gradients grows.
    ///
    /// State: `sum`, which is zero until the first update adds `initial_accumulator_value`.
    pub struct Adagrad: "Adagrad" {
        /// Learning rate.
        pub lr: f64 = 1e-2 => lr: NonNegative;
        /// A parameter's learning rate at its step `t` is `lr / (1 + (t - 1) * lr_decay)`; `t` starts at 1.
        pub lr_decay: f64 = 0.0 => lr_decay: NonNegative;
        /// L2 penalty, added to the gradient.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// First value of the sum.
        pub initial_accumulator_value: f64 = 0.0 => initial_accumulator_value: NonNegative;
        /// Added to the root of the sum.
        pub eps: f64 = 1e-10 => eps: NonNegative;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Duchi, Hazan & Singer, JMLR 12, 2011, in the variant of `torch.optim.Adagrad`.";
    kernel: INSTEP_OPTIMIZER_adagrad, adagrad;
    states: ["sum"];
}
