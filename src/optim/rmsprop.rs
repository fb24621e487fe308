//! RMSprop's hyperparameters and states.
//!
//! Defaults are those of `torch.optim.RMSprop`. The order of the states is the kernel's: `grad_avg` follows the
//! momentum buffer, if there is one.

use super::declare::optimizer;
use crate::abi::INSTEP_OPTIMIZER_rmsprop;

optimizer! {
    /// RMSprop: divides by the root of an average of squared gradients, optionally with momentum.
    ///
    /// States: `square_avg`, then `momentum_buffer` if `momentum` is not zero, then `grad_avg` if `centered`.
    ///
    /// As in PyTorch, eps is outside the root and the variance is not clamped. If gradients hardly vary, rounding can
    /// make the variance negative and the parameter NaN. With bf16 or 8-bit states this would be common, so they are
    /// refused with `centered`.
    pub struct RmsProp: "RMSprop" {
        /// Learning rate.
        pub lr: f64 = 1e-2 => lr: NonNegative;
        /// Decay rate of the averages, in \[0, 1\]. PyTorch also takes values above 1, which make the average of
        /// squares negative.
        pub alpha: f64 = 0.99 => alpha: UpToOne;
        /// Added to the root.
        pub eps: f64 = 1e-8 => eps: NonNegative;
        /// L2 penalty, added to the gradient.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Momentum factor; 0 disables momentum.
        pub momentum: f64 = 0.0 => momentum: NonNegative;
        /// Divide by the estimated standard deviation of the gradient, instead of its root mean square.
        pub centered: bool = false => centered: Flag;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Tieleman & Hinton, lecture 6.5, 2012; centered: Graves, 2013; in the variant of `torch.optim.RMSprop`.";
    kernel: INSTEP_OPTIMIZER_rmsprop, rmsprop;
    states: ["square_avg"];
    states: ["square_avg", "momentum_buffer"] if momentum;
    states: ["square_avg", "grad_avg"] if centered;
    states: ["square_avg", "momentum_buffer", "grad_avg"] if momentum & centered;
    facts {
        needs_f32_states: Some((
            "centered",
            "centered RMSprop subtracts a state's square from another, and rounded ones leave NaN"
        ))
    }
}
