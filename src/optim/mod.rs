//! Optimizers as plain values: their hyperparameters, their defaults with a source, and their validation.
//!
//! The formula of an update is only in the kernels' rule headers. `table.rs` lists the kernel, the hyperparameters and
//! the states of each optimizer. Validation rejects values that a kernel cannot check, especially NaN.

mod custom;
mod declare;
mod descriptor;
mod scaler;
mod schedule;
pub(crate) mod table;

pub use custom::{Custom, EnqueuedStep, ParamStep, StepParam};
pub(crate) use descriptor::short;
pub use descriptor::{Descriptor, Field, Part, Range, States, Value};
pub use scaler::{Clip, ExternalScaler, LossScale, LossScaler, ScalerState};
pub use schedule::LrSchedule;
pub use table::*;

use std::any::Any;

use crate::error::{Error, Result, refuse};

/// Every optimizer of this crate, in the order of the kernels' table.
pub const ALL: &[&Descriptor] = &[
    Sgd::DESCRIPTOR,
    Adam::DESCRIPTOR,
    AdamW::DESCRIPTOR,
    Adagrad::DESCRIPTOR,
    RmsProp::DESCRIPTOR,
    Adadelta::DESCRIPTOR,
    Adamax::DESCRIPTOR,
    Rprop::DESCRIPTOR,
    Lion::DESCRIPTOR,
    NAdam::DESCRIPTOR,
    RAdam::DESCRIPTOR,
    Lamb::DESCRIPTOR,
    AdEmaMix::DESCRIPTOR,
];

/// An optimizer with its hyperparameters.
///
/// Only the types of this module implement this trait, because each optimizer needs a kernel. [`Custom`] runs the
/// user's own code instead.
pub trait Optimizer: std::fmt::Debug + Send + Sync + Any + sealed::AsRule {
    /// Returns the names of the states that have one value per element. The names are those of `torch.optim`.
    fn state_names(&self) -> &'static [&'static str] {
        self.as_rule().state_names()
    }

    /// Returns the description of the optimizer's hyperparameters and states, or `None` for a [`Custom`] optimizer.
    fn descriptor(&self) -> Option<&'static Descriptor> {
        self.as_rule().descriptor()
    }

    /// Returns a hyperparameter by the name of its field.
    fn get(&self, name: &str) -> Option<Value> {
        self.as_rule().get(name)
    }

    /// Sets a hyperparameter by the name of its field. The value's range is checked when the optimizer is used.
    ///
    /// # Errors
    /// `Unsupported` if there is no such field, or if the field's values are of another kind.
    fn set(&mut self, name: &str, value: Value) -> Result<()> {
        if self.as_rule_mut().put(name, value) {
            return Ok(());
        }
        let of = self.descriptor().map_or("a custom optimizer", |descriptor| descriptor.name);
        let fields = self.descriptor().map(|descriptor| descriptor.fields).unwrap_or_default();
        let known: Vec<String> =
            fields.iter().map(|field| format!("{} = {}", field.name, field.default)).collect();
        let wrong = match fields.iter().find(|field| field.name == name).map(|field| field.default) {
            Some(Value::Number(_)) => format!("{of} takes one number here"),
            Some(Value::Pair(_)) => format!("{of} takes a pair of numbers here"),
            Some(Value::Flag(_)) => format!("{of} takes true or false here"),
            None => format!("{of} has no such hyperparameter"),
        };
        let remedy = format_args!("use values as in {}", known.join(", "));
        Err(Error::unsupported(format_args!("`{name}` = {value}"), wrong, remedy))
    }
}

impl<R: sealed::Rule> Optimizer for R {}

impl Optimizer for Box<dyn Optimizer> {}

impl Clone for Box<dyn Optimizer> {
    fn clone(&self) -> Self {
        self.as_rule().boxed()
    }
}

pub(crate) mod sealed {
    use std::any::Any;
    use std::fmt::Debug;
    use std::sync::Arc;

    use super::{Descriptor, Optimizer, Result, StepParam, Value};
    use crate::abi::{INSTEP_OPTIMIZER_CUSTOM, InstepHyper};

    /// Gives access to the [`Rule`] of an optimizer, even of a boxed optimizer.
    pub trait AsRule {
        fn as_rule(&self) -> &dyn Rule;
        fn as_rule_mut(&mut self) -> &mut dyn Rule;
    }

    impl<R: Rule> AsRule for R {
        fn as_rule(&self) -> &dyn Rule {
            self
        }

        fn as_rule_mut(&mut self) -> &mut dyn Rule {
            self
        }
    }

    impl AsRule for Box<dyn Optimizer> {
        fn as_rule(&self) -> &dyn Rule {
            (**self).as_rule()
        }

        fn as_rule_mut(&mut self) -> &mut dyn Rule {
            (**self).as_rule_mut()
        }
    }

    /// The executors' view of an optimizer: the number of its kernel, and its validated hyperparameters.
    pub trait Rule: Debug + Send + Sync + Any {
        fn descriptor(&self) -> Option<&'static Descriptor>;
        fn get(&self, name: &str) -> Option<Value>;
        /// Sets a field. Returns false if no field has this name and this kind of value.
        fn put(&mut self, name: &str, value: Value) -> bool;
        fn hyper(&self) -> Result<InstepHyper>;
        fn lr_mut(&mut self) -> &mut f64;
        fn boxed(&self) -> Box<dyn Optimizer>;

        fn state_names(&self) -> &'static [&'static str] {
            self.descriptor().map_or(&[], |descriptor| descriptor.kept(|name| self.get(name)))
        }

        fn kernel(&self) -> u32 {
            self.descriptor().map_or(INSTEP_OPTIMIZER_CUSTOM, |descriptor| descriptor.kernel)
        }

        /// Returns the user's own code if this is a custom optimizer, which has no kernel.
        fn custom(&self) -> Option<Arc<dyn StepParam>> {
            None
        }

        /// Returns the name of a number that each update reads and changes, in addition to the step count. Only NAdam
        /// has such a number.
        fn carried(&self) -> Option<&'static str> {
            self.descriptor().and_then(|descriptor| descriptor.carried)
        }

        /// Returns whether the update is scaled by norms of the full parameter. Such an update takes two launches.
        /// `IsScaled` in the rule's header must have the same value.
        fn is_scaled(&self) -> bool {
            self.descriptor().is_some_and(|descriptor| descriptor.is_scaled)
        }

        /// Returns the hyperparameter `eps`, if there is one. `eps` prevents a division by zero if the rule divides by
        /// a state.
        fn eps(&self) -> Option<f64> {
            match self.get("eps") {
                Some(Value::Number(eps)) => Some(eps),
                _ => None,
            }
        }

        /// Returns the reason why the states must be f32, if there is one.
        fn needs_f32_states(&self) -> Option<&'static str> {
            let (field, why) = self.descriptor().and_then(|descriptor| descriptor.needs_f32_states)?;
            self.get(field).filter(|value| !value.is_off()).map(|_| why)
        }

        /// Returns the reason why 8-bit states are refused, if there is one. 8-bit codes share one exponent per block,
        /// and some optimizers need an exponent for each value.
        fn needs_floats(&self) -> Option<&'static str> {
            self.descriptor().and_then(|descriptor| descriptor.needs_floats)
        }
    }
}

/// Returns an error if the first step overflows with this learning rate. The first step is the largest, because its
/// divisor is `1 - beta1`.
fn first_step_fits(lr: f64, beta1: f64) -> Result<()> {
    refuse! {
        "lr" = short(lr), if !((lr / (1.0 - beta1)) as f32).is_finite()
            => "lr / (1 - betas.0) overflows f32", "lower lr or betas.0";
    }
    Ok(())
}

/// Returns an error if the product of a decoupled weight decay and the learning rate overflows.
fn decay_fits(lr: f64, weight_decay: f64) -> Result<()> {
    refuse! {
        "weight_decay" = short(weight_decay), if !((lr * weight_decay) as f32).is_finite()
            => "lr * weight_decay overflows f32", "lower one of them";
    }
    Ok(())
}
