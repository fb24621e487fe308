//! Lists the optimizers that step a parameter, and their states.
//!
//! For checkpoints, schedules and inspection. Nothing here changes the stepper.

use crate::stepper::state::attached::{Attached, OptimizerId};
use std::borrow::Cow;

use crate::device::Device;
use crate::error::Result;
use crate::layout::ParamId;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Returns all optimizers: those of groups in the layout's order, then further ones of groups, then those of single
    /// parameters in the order in which they were registered.
    ///
    /// ```
    /// use std::any::Any;
    /// use instep::{AdamW, Layout, Sgd, Solo, Stepper};
    ///
    /// let layout = Layout::builder().param("weight", 4).param("bias", 1).build()?;
    /// let (weight, bias) = (layout.id("weight")?, layout.id("bias")?);
    /// let stepper = Stepper::builder_without_optimizer(&layout)
    ///     .optimizer_for(&[weight], AdamW::default())
    ///     .optimizer_for(&[bias], Sgd { momentum: 0.9, ..Sgd::default() })
    ///     .host(Solo::default())?;
    /// let second = stepper.optimizers().nth(1).unwrap();
    /// let sgd = (second.optimizer as &dyn Any).downcast_ref::<Sgd>().unwrap();
    /// assert_eq!(sgd.momentum, 0.9);
    /// assert_eq!(stepper.optimizers_of(bias)?, [second.id]);
    /// assert_eq!(stepper.state_names(weight)?, ["exp_avg", "exp_avg_sq"]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Source
    /// `_get_in_backward_optimizers` of PyTorch.
    pub fn optimizers(&self) -> impl ExactSizeIterator<Item = Attached<'_>> {
        self.optimizers.all()
    }

    /// Returns the optimizers of a parameter: those that step it, in their order, then those that are
    /// [attached](crate::StepperBuilder::attach) to it alone.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout.
    pub fn optimizers_of(&self, id: ParamId) -> Result<Vec<OptimizerId>> {
        Ok(self.optimizers.of(self.layout.index(id)?).collect())
    }

    /// Those of them that step it.
    pub(crate) fn stepping(&self, id: ParamId) -> Result<Vec<OptimizerId>> {
        Ok(self.optimizers.stepping(self.layout.index(id)?).collect())
    }

    /// Returns the names of a parameter's states, as [`ParamId::state`] takes them: as `torch.optim` calls them,
    /// and with the suffix `#k` for the parameter's `k`-th further optimizer.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout.
    pub fn state_names(&self, id: ParamId) -> Result<Vec<Cow<'static, str>>> {
        Ok(self.optimizers.states(self.layout.index(id)?).map(|(name, _, _)| name).collect())
    }
}
