//! One optimizer of a stepper as users see it: its number, its group and its hyperparameters.
//!
//! Plain data, and the ways to name one. A number never changes while its stepper lives.

use crate::optim::Optimizer;

/// One of a stepper's optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OptimizerId(pub(crate) u32);

/// Names one of a stepper's optimizers: by its number, or as the only one of a group
/// ([`DEFAULT_GROUP`](crate::layout::DEFAULT_GROUP) if the layout names none).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerKey<'a> {
    /// The only optimizer of a group.
    Group(&'a str),
    /// Any one.
    Id(OptimizerId),
}

impl<'a> From<&'a str> for OptimizerKey<'a> {
    fn from(group: &'a str) -> Self {
        OptimizerKey::Group(group)
    }
}

impl<'a> From<&'a String> for OptimizerKey<'a> {
    fn from(group: &'a String) -> Self {
        OptimizerKey::Group(group)
    }
}

impl From<OptimizerId> for OptimizerKey<'_> {
    fn from(id: OptimizerId) -> Self {
        OptimizerKey::Id(id)
    }
}

/// One of a stepper's optimizers, as [`Stepper::optimizers`](crate::Stepper::optimizers) lists it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Attached<'a> {
    /// The number for [`Stepper::set_lr`](crate::Stepper::set_lr) and [`Stepper::set_hyper`](crate::Stepper::set_hyper).
    pub id: OptimizerId,
    /// The layout's group that it was given to; `None` if to single parameters.
    pub group: Option<&'a str>,
    /// Its hyperparameters, the learning rate as it was set last. It is one of the types of [`optim`](crate::optim),
    /// which `(optimizer as &dyn Any).downcast_ref` tells apart.
    pub optimizer: &'a dyn Optimizer,
    /// Whether passes run it; they do not if it was [attached](crate::StepperBuilder::attach) alone.
    pub steps: bool,
}
