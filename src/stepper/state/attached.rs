//! One optimizer of a stepper as users see it: its number, its group and its hyperparameters.
//!
//! Plain data. A number never changes while its stepper lives.

use crate::optim::Optimizer;

/// One of a stepper's optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OptimizerId(pub(crate) u32);

/// One of a stepper's optimizers, as [`Stepper::optimizers`](crate::Stepper::optimizers) lists it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Attached<'a> {
    /// The number for [`Stepper::set_lr_of`](crate::Stepper::set_lr_of).
    pub id: OptimizerId,
    /// The layout's group that it was given to; `None` if to single parameters.
    pub group: Option<&'a str>,
    /// Its hyperparameters, the learning rate as it was set last. It is one of the types of [`optim`](crate::optim),
    /// which `(optimizer as &dyn Any).downcast_ref` tells apart.
    pub optimizer: &'a dyn Optimizer,
    /// Whether passes run it; they do not if it was [attached](crate::StepperBuilder::attach) alone.
    pub steps: bool,
}
