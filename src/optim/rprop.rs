//! Rprop's hyperparameters; the update is in `kernels/rules/rprop.h`.
//!
//! Defaults are those of `torch.optim.Rprop`. Must refuse limits in the wrong order, which torch does not look at: they
//! would make every step size the same.

use super::{Optimizer, hyper_of, non_negative, sealed::Rule};
use crate::abi::{INSTEP_OPTIMIZER_rprop, InstepHyper, InstepRpropHyper};
use crate::error::{Error, Result};

/// Resilient backpropagation: every element has a step size of its own, which grows while its gradient keeps its sign.
/// For gradients of the whole data set: those of small batches change their signs by chance.
///
/// States: `prev`, `step_size`.
///
/// # Source
/// Riedmiller & Braun, ICNN 1993, in the variant of `torch.optim.Rprop`: where the sign changes, the element stays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rprop {
    /// What a parameter's step sizes are before its first update; without effect behind it. Default 1e-2.
    pub lr: f64,
    /// Factors of a step size whose gradient has changed its sign, and kept it. Default (0.5, 1.2).
    pub etas: (f64, f64),
    /// Smallest and largest step size. Default (1e-6, 50).
    pub step_sizes: (f64, f64),
    /// Ascend instead of descend. Default false.
    pub maximize: bool,
}

impl Default for Rprop {
    fn default() -> Self {
        Rprop { lr: 1e-2, etas: (0.5, 1.2), step_sizes: (1e-6, 50.0), maximize: false }
    }
}

impl Optimizer for Rprop {
    fn state_names(&self) -> &'static [&'static str] {
        &["prev", "step_size"]
    }
}

impl Rule for Rprop {
    fn kernel(&self) -> u32 {
        INSTEP_OPTIMIZER_rprop
    }

    fn lr_mut(&mut self) -> &mut f64 {
        &mut self.lr
    }

    fn boxed(&self) -> Box<dyn Optimizer> {
        Box::new(*self)
    }

    fn needs_floats(&self) -> Option<&'static str> {
        Some("Rprop multiplies step sizes by factors near 1, which codes of 8 bits would round away")
    }

    fn hyper(&self) -> Result<InstepHyper> {
        let ((eta_minus, eta_plus), (smallest, largest)) = (self.etas, self.step_sizes);
        if !(eta_minus > 0.0 && eta_minus < 1.0) {
            return Err(Error::config("etas.0", eta_minus, "must be above 0 and below 1"));
        }
        if eta_plus.is_nan() || eta_plus <= 1.0 {
            return Err(Error::config("etas.1", eta_plus, "must be above 1"));
        }
        let hyper = InstepRpropHyper {
            lr: non_negative("lr", self.lr)?,
            eta_minus: non_negative("etas.0", eta_minus)?,
            eta_plus: non_negative("etas.1", eta_plus)?,
            step_size_min: non_negative("step_sizes.0", smallest)?,
            step_size_max: non_negative("step_sizes.1", largest)?,
            maximize: self.maximize.into(),
            reserved: 0,
        };
        if smallest > largest {
            return Err(Error::config("step_sizes.0", smallest, "must not be above step_sizes.1"));
        }
        Ok(hyper_of(|all| all.rprop = hyper))
    }
}
