//! Optimizers as plain values: hyperparameters, defaults with their source, validation.
//!
//! The update itself is in `kernels/rules/<name>.h` and nowhere else; what is here only says which kernel runs, with
//! which numbers, and how its states are called. Must reject what a kernel could not check (NaN above all).

mod adadelta;
mod adagrad;
mod adam;
mod adamax;
mod custom;
mod lamb;
mod lion;
mod nadam;
mod radam;
mod rmsprop;
mod rprop;
mod scaler;
mod schedule;
mod sgd;

pub use adadelta::Adadelta;
pub use adagrad::Adagrad;
pub use adam::{Adam, AdamW};
pub use adamax::Adamax;
pub use custom::{Custom, EnqueuedStep, ParamStep, StepParam};
pub use lamb::Lamb;
pub use lion::Lion;
pub use nadam::NAdam;
pub use radam::RAdam;
pub use rmsprop::RmsProp;
pub use rprop::Rprop;
pub use scaler::{LossScaler, ScalerState};
pub use schedule::LrSchedule;
pub use sgd::Sgd;

use std::any::Any;
use std::sync::Arc;

use crate::abi::InstepHyper;
use crate::error::{Error, Result};

/// An optimizer with its hyperparameters. Implemented by the types of this module only, since a kernel belongs to each;
/// what has none is a [`Custom`] one.
pub trait Optimizer: std::fmt::Debug + Send + Sync + Any + sealed::Rule {
    /// Names of the states that it keeps per element, as `torch.optim` calls them.
    fn state_names(&self) -> &'static [&'static str];
}

impl Optimizer for Box<dyn Optimizer> {
    fn state_names(&self) -> &'static [&'static str] {
        (**self).state_names()
    }
}

impl sealed::Rule for Box<dyn Optimizer> {
    fn kernel(&self) -> u32 {
        (**self).kernel()
    }

    fn hyper(&self) -> Result<InstepHyper> {
        (**self).hyper()
    }

    fn lr_mut(&mut self) -> &mut f64 {
        (**self).lr_mut()
    }

    fn boxed(&self) -> Box<dyn Optimizer> {
        (**self).boxed()
    }

    fn carried(&self) -> Option<&'static str> {
        (**self).carried()
    }

    fn custom(&self) -> Option<Arc<dyn StepParam>> {
        (**self).custom()
    }

    fn is_scaled(&self) -> bool {
        (**self).is_scaled()
    }

    fn eps(&self) -> Option<f64> {
        (**self).eps()
    }

    fn needs_f32_states(&self) -> Option<&'static str> {
        (**self).needs_f32_states()
    }

    fn needs_floats(&self) -> Option<&'static str> {
        (**self).needs_floats()
    }
}

pub(crate) mod sealed {
    use std::sync::Arc;

    use super::{InstepHyper, Result, StepParam};

    /// What the executors need: the kernel's number and its validated hyperparameters.
    pub trait Rule {
        fn kernel(&self) -> u32;
        fn hyper(&self) -> Result<InstepHyper>;
        fn lr_mut(&mut self) -> &mut f64;
        fn boxed(&self) -> Box<dyn super::Optimizer>;
        /// What `torch.optim` calls the number that the rule carries from update to update beside its step count, if it
        /// does.
        fn carried(&self) -> Option<&'static str> {
            None
        }
        /// The user's own code, where there is no kernel.
        fn custom(&self) -> Option<Arc<dyn StepParam>> {
            None
        }
        /// Whether its change is scaled by norms of the whole parameter, which takes two launches; as `IsScaled` of its
        /// header.
        fn is_scaled(&self) -> bool {
            false
        }
        /// What keeps it from dividing by zero, if a state is what it divides by.
        fn eps(&self) -> Option<f64> {
            None
        }
        /// Why its states need all bits of f32, if they do.
        fn needs_f32_states(&self) -> Option<&'static str> {
            None
        }
        /// Why its states need an exponent each, if they do: codes of 8 bits share one.
        fn needs_floats(&self) -> Option<&'static str> {
            None
        }
    }
}

/// Hyperparameters with every byte of the union set, as they are copied to where a GPU reads them.
fn hyper_of(write: impl FnOnce(&mut InstepHyper)) -> InstepHyper {
    let mut hyper = InstepHyper { words: [0.0; 8] };
    write(&mut hyper);
    hyper
}

/// Accepts finite values at or above zero.
fn non_negative(field: &'static str, value: f64) -> Result<f64> {
    let rounded = value as f32;
    if !(value >= 0.0 && rounded.is_finite()) {
        return Err(Error::config(field, value, "must be finite as f32 and not negative"));
    }
    if value > 0.0 && rounded == 0.0 {
        return Err(Error::config(field, value, "vanishes as f32; say 0 if that is meant"));
    }
    Ok(value)
}

/// Accepts 0 <= value < 1.
fn decay_rate(field: &'static str, value: f64) -> Result<f64> {
    if (0.0..1.0).contains(&value) {
        return Ok(value);
    }
    Err(Error::config(field, value, "must be in [0, 1)"))
}

/// Accepts 0 <= value <= 1.
fn share(field: &'static str, value: f64) -> Result<f64> {
    if (0.0..=1.0).contains(&value) {
        return Ok(value);
    }
    Err(Error::config(field, value, "must be in [0, 1]"))
}
