//! Adadelta's hyperparameters and states.
//!
//! Defaults are those of `torch.optim.Adadelta`. This file never changes `lr` by itself; with 1 it is the paper's method.

use super::declare::optimizer;
use crate::abi::INSTEP_OPTIMIZER_adadelta;

optimizer! {
    /// Adadelta: multiplies the gradient by the ratio of the root mean square of past changes to that of past gradients.
    ///
    /// States: `square_avg`, `acc_delta`.
    pub struct Adadelta: "Adadelta" {
        /// Factor of the update; the paper has none.
        pub lr: f64 = 1.0 => lr: NonNegative;
        /// Decay rate of both averages.
        pub rho: f64 = 0.9 => rho: UpToOne;
        /// Added inside both square roots.
        pub eps: f64 = 1e-6 => eps: NonNegative;
        /// L2 penalty, added to the gradient.
        pub weight_decay: f64 = 0.0 => weight_decay: NonNegative;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "Zeiler, 2012, in the variant of `torch.optim.Adadelta`, which adds a learning rate.";
    kernel: INSTEP_OPTIMIZER_adadelta, adadelta;
    states: ["square_avg", "acc_delta"];
    facts {
        needs_floats: Some("Adadelta divides by square_avg and feeds the quotient back into acc_delta, which codes of \
                            8 bits would bias upwards")
    }
}
