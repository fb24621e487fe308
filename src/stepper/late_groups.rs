//! Optimizers for groups that were built without one.
//!
//! The parameters come from the layout; the move to new memory is the one of a further optimizer.

use std::sync::Arc;

use crate::device::Device;
use crate::error::{Error, Result, one_of};
use crate::layout::SegmentAction;
use crate::optim::Optimizer;
use crate::stepper::state::attached::OptimizerId;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Gives a group of the layout its optimizer, if it was built without one. It then goes by the group's name, as if
    /// the builder had been given it: for [`set_lr`](Self::set_lr), [`set_hyper`](Self::set_hyper),
    /// [`set_lr_schedule`](Self::set_lr_schedule) and [`optimizers`](Self::optimizers). It steps the group's parameters
    /// that have no optimizer of their own and whose action is [`Step`](SegmentAction::Step), also those that
    /// [`optimize_only`](crate::StepperBuilder::optimize_only) has left out. Cost and ordering as for
    /// [`add_optimizer_for`](Self::add_optimizer_for): all ranks call it at the same point between passes.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// let layout = Layout::builder().param("body", 1).param("head", 1).in_group("head").build()?;
    /// let head = layout.id("head")?;
    /// let builder = Stepper::builder_without_optimizer(&layout).group("default", Sgd::default());
    /// let mut stepper = builder.host(Solo::default())?;
    /// stepper.add_group("head", Sgd::default())?;
    /// stepper.set_lr("head", 0.5)?;
    /// let mut pass = stepper.begin()?;
    /// pass.write(head.grad(), &[2.0])?;
    /// pass.finish()?;
    /// assert_eq!(stepper.view::<f32>(head)?, [-1.0]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// `Config` if the layout has no such group, or it has an optimizer, or none of its parameters is left to step.
    /// Otherwise as for [`add_optimizer_for`](Self::add_optimizer_for).
    pub fn add_group(&mut self, name: &str, optimizer: impl Optimizer + 'static) -> Result<OptimizerId> {
        self.refuse_open_pass()?;
        let Some(group) = self.layout.group(name) else {
            let known = one_of(name, self.layout.groups().iter().map(String::as_str));
            let remedy = format_args!("use {known}");
            return Err(Error::config("group", name, "not a group of the layout", remedy));
        };
        if self.optimizers.of_group(name) > 0 {
            let remedy = "change it with Stepper::set_hyper, or add one with Stepper::add_optimizer_for";
            return Err(Error::config("group", name, "has an optimizer already", remedy));
        }
        let parameters = self.layout.parameters().iter().enumerate();
        let of_group =
            parameters.filter(|(_, p)| p.group as usize == group && p.action == SegmentAction::Step);
        let free = of_group.map(|(param, _)| param).filter(|param| self.optimizers.rounds(*param) == 0);
        let params: Vec<usize> = free.collect();
        if params.is_empty() {
            let wrong = "each of its parameters has an optimizer, or is not to be stepped";
            return Err(Error::config("group", name, wrong, "use Stepper::add_optimizer_for"));
        }
        self.add_late(params, Some(Arc::from(name)), &optimizer)
    }
}
