//! RMSprop's hyperparameters; the update is in `kernels/rules/rmsprop.h`.
//!
//! Defaults are those of `torch.optim.RMSprop`. Must keep its order of states: the kernel finds `grad_avg` behind the
//! momentum buffer, if there is one.

use super::{Optimizer, hyper_of, non_negative, sealed::Rule, share};
use crate::abi::{INSTEP_OPTIMIZER_rmsprop, InstepHyper, InstepRmsPropHyper};
use crate::error::Result;

/// RMSprop: divides by the root of an average of squared gradients, optionally with momentum.
///
/// States: `square_avg`, then `momentum_buffer` if `momentum` is not zero, then `grad_avg` if `centered`.
///
/// # Source
/// Tieleman & Hinton, lecture 6.5, 2012; centered: Graves, 2013; in the variant of `torch.optim.RMSprop`, which adds
/// eps outside the root and does not clamp the variance: where gradients hardly vary, rounding can make it negative and
/// the parameter NaN. With states of fewer bits than f32 that is the rule, so `centered` is refused there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsProp {
    /// Learning rate. Default 1e-2.
    pub lr: f64,
    /// Decay rate of the averages, in \[0, 1\]; PyTorch takes values above 1 too, which make the average of squares
    /// negative. Default 0.99.
    pub alpha: f64,
    /// Added to the root. Default 1e-8.
    pub eps: f64,
    /// L2 penalty, added to the gradient. Default 0.
    pub weight_decay: f64,
    /// Share of the buffer that stays; 0 switches momentum off. Default 0.
    pub momentum: f64,
    /// Divide by the estimated standard deviation of the gradient, instead of its root mean square. Default false.
    pub centered: bool,
    /// Ascend instead of descend. Default false.
    pub maximize: bool,
}

impl Default for RmsProp {
    fn default() -> Self {
        RmsProp {
            lr: 1e-2,
            alpha: 0.99,
            eps: 1e-8,
            weight_decay: 0.0,
            momentum: 0.0,
            centered: false,
            maximize: false,
        }
    }
}

impl Optimizer for RmsProp {
    fn state_names(&self) -> &'static [&'static str] {
        match (self.momentum != 0.0, self.centered) {
            (false, false) => &["square_avg"],
            (true, false) => &["square_avg", "momentum_buffer"],
            (false, true) => &["square_avg", "grad_avg"],
            (true, true) => &["square_avg", "momentum_buffer", "grad_avg"],
        }
    }
}

impl Rule for RmsProp {
    fn kernel(&self) -> u32 {
        INSTEP_OPTIMIZER_rmsprop
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

    fn needs_f32_states(&self) -> Option<&'static str> {
        self.centered
            .then_some("centered RMSprop subtracts a state's square from another, and rounded ones leave NaN")
    }

    fn hyper(&self) -> Result<InstepHyper> {
        let hyper = InstepRmsPropHyper {
            lr: non_negative("lr", self.lr)?,
            alpha: share("alpha", self.alpha)?,
            eps: non_negative("eps", self.eps)?,
            weight_decay: non_negative("weight_decay", self.weight_decay)?,
            momentum: non_negative("momentum", self.momentum)?,
            centered: self.centered.into(),
            maximize: self.maximize.into(),
        };
        Ok(hyper_of(|all| all.rmsprop = hyper))
    }
}
