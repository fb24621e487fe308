//! A factor per parameter in its optimizers' learning rates, which the device multiplies when a pass begins.
//!
//! So parameters with rates of their own share hyperparameters, buckets and launches. Must be told to a device that is
//! built anew, whose settings start at 1.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout::ParamId;
use crate::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Multiplies the learning rate of every optimizer of a parameter, from the next pass on: what
    /// [`set_lr`](Self::set_lr) and schedules set for its group comes times this. 1 until it is set, and not saved with
    /// a run. Where the rate is only what a first update starts from (Rprop), it is multiplied there. Ranks must set
    /// the same: if they differ, the next collective is a `Mismatch`, if it [compares](Self::set_lr).
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// let layout = Layout::builder().param("backbone", 1).param("head", 1).build()?;
    /// let (backbone, head) = (layout.id("backbone")?, layout.id("head")?);
    /// let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Solo::default())?;
    /// stepper.set_lr_multiplier(backbone, 0.125)?;
    /// let mut pass = stepper.begin()?;
    /// pass.write_grad(backbone, &[1.0])?;
    /// pass.write_grad(head, &[1.0])?;
    /// pass.finish()?;
    /// assert_eq!((stepper.params()?.get(backbone)?[0], stepper.params()?.get(head)?[0]), (-0.125, -1.0));
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// As [`set_lr`](Self::set_lr).
    ///
    /// # Errors
    /// `Config` if it is negative or not finite, or an optimizer of the parameter refuses the rate that comes of it,
    /// which changes nothing; `Layout` if `id` is of another layout; `Order` inside a pass, `Poisoned` after a failure.
    pub fn set_lr_multiplier(&mut self, id: ParamId, multiplier: f64) -> Result<()> {
        let param = self.layout.index(id)?;
        if !(multiplier >= 0.0 && multiplier.is_finite()) {
            return Err(Error::config("lr_multiplier", multiplier, "must be finite and not negative"));
        }
        self.refuse_open_pass()?;
        self.run.get_mut().touch_settings()?;
        self.optimizers.set_lr_multiplier(param, multiplier)?;
        self.agreement.forget();
        self.write_lr_multiplier(param);
        Ok(())
    }

    /// What the learning rates of a parameter's optimizers are multiplied by.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout.
    pub fn lr_multiplier(&self, id: ParamId) -> Result<f64> {
        Ok(self.optimizers.lr_multiplier(self.layout.index(id)?))
    }
}
