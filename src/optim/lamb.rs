//! LAMB's hyperparameters; the update is in `kernels/rules/lamb.h`.
//!
//! `torch.optim` has none; defaults are the paper's with the moments of Adam. Must refuse what vanishes or overflows in
//! f32, as the others do.

use super::{Optimizer, decay_rate, hyper_of, non_negative, sealed::Rule};
use crate::abi::{INSTEP_OPTIMIZER_lamb, InstepHyper, InstepLambHyper};
use crate::error::Result;

/// LAMB: Adam's direction, with its decay, scaled for each parameter to the parameter's own norm.
///
/// The ratio of norms is 1 where one of them is 0, infinite or NaN. Each bucket takes two launches, and 40 bytes per
/// element in f32: the norms are exact sums, the same bits for any cut into buckets. Unlike some implementations, this
/// one scales parameters without decay too, as the paper does; clip by [`max_norm`](crate::StepperBuilder::max_norm)
/// where those clip on their own.
///
/// States: `exp_avg`, `exp_avg_sq`.
///
/// # Source
/// You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm 2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lamb {
    /// Learning rate, a share of the parameter's norm. Default 1e-3.
    pub lr: f64,
    /// Decay rates of the first and second moment. Default (0.9, 0.999).
    pub betas: (f64, f64),
    /// Added to the root of the second moment. Default 1e-6.
    pub eps: f64,
    /// Weight decay, a part of the change that is scaled. Default 0.01.
    pub weight_decay: f64,
    /// Ascend instead of descend. Default false.
    pub maximize: bool,
}

impl Default for Lamb {
    fn default() -> Self {
        Lamb { lr: 1e-3, betas: (0.9, 0.999), eps: 1e-6, weight_decay: 0.01, maximize: false }
    }
}

impl Optimizer for Lamb {
    fn state_names(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }
}

impl Rule for Lamb {
    fn kernel(&self) -> u32 {
        INSTEP_OPTIMIZER_lamb
    }

    fn lr_mut(&mut self) -> &mut f64 {
        &mut self.lr
    }

    fn eps(&self) -> Option<f64> {
        Some(self.eps)
    }

    fn boxed(&self) -> Box<dyn Optimizer> {
        Box::new(*self)
    }

    fn is_scaled(&self) -> bool {
        true
    }

    fn hyper(&self) -> Result<InstepHyper> {
        let hyper = InstepLambHyper {
            lr: non_negative("lr", self.lr)?,
            beta1: decay_rate("betas.0", self.betas.0)?,
            beta2: decay_rate("betas.1", self.betas.1)?,
            eps: non_negative("eps", self.eps)?,
            weight_decay: non_negative("weight_decay", self.weight_decay)?,
            maximize: self.maximize.into(),
            reserved: 0,
        };
        Ok(hyper_of(|all| all.lamb = hyper))
    }
}
