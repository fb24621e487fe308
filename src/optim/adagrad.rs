//! Adagrad's hyperparameters; the update is in `kernels/rules/adagrad.h`.
//!
//! Defaults are those of `torch.optim.Adagrad`. Must say that memory starts as zeros: there the sum shows its initial
//! value before the first update, here it takes it in that update.

use super::{Optimizer, hyper_of, non_negative, sealed::Rule};
use crate::abi::{INSTEP_OPTIMIZER_adagrad, InstepAdagradHyper, InstepHyper};
use crate::error::Result;

/// Adagrad: every element's rate falls with the sum of its squared gradients.
///
/// State: `sum`, zeros until the first update, which puts `initial_accumulator_value` in their place.
///
/// # Source
/// Duchi, Hazan & Singer, JMLR 12, 2011, in the variant of `torch.optim.Adagrad`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adagrad {
    /// Learning rate. Default 1e-2.
    pub lr: f64,
    /// The rate of a parameter's step `t`, from 1, is `lr / (1 + (t - 1) * lr_decay)`. Default 0.
    pub lr_decay: f64,
    /// L2 penalty, added to the gradient. Default 0.
    pub weight_decay: f64,
    /// What the sum starts from. Default 0.
    pub initial_accumulator_value: f64,
    /// Added to the root of the sum. Default 1e-10.
    pub eps: f64,
    /// Ascend instead of descend. Default false.
    pub maximize: bool,
}

impl Default for Adagrad {
    fn default() -> Self {
        Adagrad {
            lr: 1e-2,
            lr_decay: 0.0,
            weight_decay: 0.0,
            initial_accumulator_value: 0.0,
            eps: 1e-10,
            maximize: false,
        }
    }
}

impl Optimizer for Adagrad {
    fn state_names(&self) -> &'static [&'static str] {
        &["sum"]
    }
}

impl Rule for Adagrad {
    fn kernel(&self) -> u32 {
        INSTEP_OPTIMIZER_adagrad
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
        let initial = self.initial_accumulator_value;
        let hyper = InstepAdagradHyper {
            lr: non_negative("lr", self.lr)?,
            lr_decay: non_negative("lr_decay", self.lr_decay)?,
            weight_decay: non_negative("weight_decay", self.weight_decay)?,
            initial_accumulator_value: non_negative("initial_accumulator_value", initial)?,
            eps: non_negative("eps", self.eps)?,
            maximize: self.maximize.into(),
            reserved: 0,
        };
        Ok(hyper_of(|all| all.adagrad = hyper))
    }
}
