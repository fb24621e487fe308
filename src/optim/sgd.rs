//! SGD's hyperparameters; the update is in `kernels/rules/sgd.h`.
//!
//! Defaults are those of `torch.optim.SGD` (its functional twin says 1e-2 for lr). Must keep PyTorch's refusal of
//! nesterov without momentum, because the formula would silently be plain SGD.

use super::{Optimizer, hyper_of, non_negative, sealed::Rule};
use crate::abi::{INSTEP_OPTIMIZER_sgd, InstepHyper, InstepSgdHyper};
use crate::error::{Error, Result};

/// Stochastic gradient descent, with optional momentum.
///
/// State: `momentum_buffer`, if `momentum` is not zero.
///
/// # Source
/// Sutskever et al., ICML 2013, in the variant of `torch.optim.SGD`: a parameter's first buffer is a copy of its
/// gradient, without dampening.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate. Default 1e-3.
    pub lr: f64,
    /// Share of the buffer that stays; 0 switches momentum off. Default 0.
    pub momentum: f64,
    /// Share of the gradient that does not enter the buffer. Default 0.
    pub dampening: f64,
    /// L2 penalty, added to the gradient. Default 0.
    pub weight_decay: f64,
    /// Look ahead along the new buffer. Default false.
    pub nesterov: bool,
    /// Ascend instead of descend. Default false.
    pub maximize: bool,
}

impl Default for Sgd {
    fn default() -> Self {
        Sgd { lr: 1e-3, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false }
    }
}

impl Optimizer for Sgd {
    fn state_names(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum_buffer"] }
    }
}

impl Rule for Sgd {
    fn kernel(&self) -> u32 {
        INSTEP_OPTIMIZER_sgd
    }

    fn lr_mut(&mut self) -> &mut f64 {
        &mut self.lr
    }

    fn boxed(&self) -> Box<dyn Optimizer> {
        Box::new(*self)
    }

    fn hyper(&self) -> Result<InstepHyper> {
        if !self.dampening.is_finite() || !(self.dampening as f32).is_finite() {
            return Err(Error::config("dampening", self.dampening, "must be finite as f32"));
        }
        if self.nesterov && (self.momentum <= 0.0 || self.dampening != 0.0) {
            return Err(Error::config("nesterov", true, "needs a momentum and zero dampening"));
        }
        let hyper = InstepSgdHyper {
            lr: non_negative("lr", self.lr)?,
            momentum: non_negative("momentum", self.momentum)?,
            dampening: self.dampening,
            weight_decay: non_negative("weight_decay", self.weight_decay)?,
            nesterov: self.nesterov.into(),
            maximize: self.maximize.into(),
        };
        Ok(hyper_of(|all| all.sgd = hyper))
    }
}
