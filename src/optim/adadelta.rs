//! Adadelta's hyperparameters; the update is in `kernels/rules/adadelta.h`.
//!
//! Defaults are those of `torch.optim.Adadelta`. Must not scale lr by itself: 1 is the paper's method.

use super::{Optimizer, hyper_of, non_negative, sealed::Rule, share};
use crate::abi::{INSTEP_OPTIMIZER_adadelta, InstepAdadeltaHyper, InstepHyper};
use crate::error::Result;

/// Adadelta: steps in the unit of the parameter, by the ratio of average changes to average gradients.
///
/// States: `square_avg`, `acc_delta`.
///
/// # Source
/// Zeiler, 2012, in the variant of `torch.optim.Adadelta`, which adds a learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adadelta {
    /// Factor of the change; the paper has none. Default 1.
    pub lr: f64,
    /// Decay rate of both averages. Default 0.9.
    pub rho: f64,
    /// Added to both averages inside their roots; the first changes are of its size. Default 1e-6.
    pub eps: f64,
    /// L2 penalty, added to the gradient. Default 0.
    pub weight_decay: f64,
    /// Ascend instead of descend. Default false.
    pub maximize: bool,
}

impl Default for Adadelta {
    fn default() -> Self {
        Adadelta { lr: 1.0, rho: 0.9, eps: 1e-6, weight_decay: 0.0, maximize: false }
    }
}

impl Optimizer for Adadelta {
    fn state_names(&self) -> &'static [&'static str] {
        &["square_avg", "acc_delta"]
    }
}

impl Rule for Adadelta {
    fn kernel(&self) -> u32 {
        INSTEP_OPTIMIZER_adadelta
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

    fn hyper(&self) -> Result<InstepHyper> {
        let hyper = InstepAdadeltaHyper {
            lr: non_negative("lr", self.lr)?,
            rho: share("rho", self.rho)?,
            eps: non_negative("eps", self.eps)?,
            weight_decay: non_negative("weight_decay", self.weight_decay)?,
            maximize: self.maximize.into(),
            reserved: 0,
        };
        Ok(hyper_of(|all| all.adadelta = hyper))
    }
}
