//! LAMB's hyperparameters and states.
//!
//! `torch.optim` has no LAMB; defaults are the paper's with the moments of Adam.

use super::declare::optimizer;
use crate::abi::INSTEP_OPTIMIZER_lamb;

optimizer! {
    /// LAMB: AdamW's update, scaled by the ratio of the parameter's norm to the update's norm.
    ///
    /// The ratio is 1 if one of the norms is 0, infinite or NaN. Each bucket takes two launches, which move 40 bytes
    /// per element in f32. The norms are exact sums, so buckets do not change the bits. As in the paper, parameters
    /// without weight decay are scaled too. Some implementations do not scale these parameters, and clip gradients
    /// inside LAMB. To clip in instep, set [`Clip::Global`](crate::Clip::Global).
    ///
    /// States: `exp_avg`, `exp_avg_sq`.
    pub struct Lamb: "LAMB" {
        /// Learning rate, multiplied by the trust ratio.
        pub lr: f64 = 1e-3 => lr: NonNegative;
        /// Decay rates of the first and second moment.
        pub betas: (f64, f64) = (0.9, 0.999) => beta1: BelowOne, beta2: BelowOne;
        /// Added to the root of the second moment.
        pub eps: f64 = 1e-6 => eps: NonNegative;
        /// Weight decay, added to the update before the trust ratio.
        pub weight_decay: f64 = 0.01 => weight_decay: NonNegative;
        /// Ascend instead of descend.
        pub maximize: bool = false => maximize: Flag;
    }
    source: "You et al., \"Large Batch Optimization for Deep Learning: Training BERT in 76 minutes\", ICLR 2020, \
             algorithm 2.";
    kernel: INSTEP_OPTIMIZER_lamb, lamb;
    states: ["exp_avg", "exp_avg_sq"];
    facts { is_scaled: true }
}
