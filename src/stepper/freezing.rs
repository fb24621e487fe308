//! Frozen parameters: no gradient, no step, no wait.
//!
//! The schedule and the settings learn of it together, between passes.

use crate::device::Device;
use crate::error::Result;
use crate::layout::ParamId;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Freezes a parameter from the next pass on, or unfreezes it. Frozen, it can be read at any moment of a pass and
    /// takes no gradient; value, state and step count stay, and no bucket waits for it. A bucket in which every
    /// parameter is frozen is neither reduced nor stepped. In any other bucket, the gradient of a frozen parameter is
    /// reduced as zeros. Ranks must freeze the same: if they differ, the next collective is a `Mismatch`, if it
    /// [compares](Self::set_lr); a rank that has none left, because it froze everything, is a `Deadline` or `PeerLost`
    /// to the others.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// let layout = Layout::builder().param("backbone", 2).param("head", 2).build()?;
    /// let (backbone, head) = (layout.id("backbone")?, layout.id("head")?);
    /// let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Solo::default())?;
    /// stepper.set_frozen(backbone, true)?;
    /// let mut pass = stepper.begin()?;
    /// pass.grads().write(head, &[1.0, 1.0])?;
    /// pass.grad_ready(head)?; // the bucket is on its way
    /// assert_eq!(pass.params().get(backbone)?, [0.0, 0.0]); // but not this part of it
    /// assert!(pass.grads().get_mut(backbone).is_err());
    /// pass.finish()?;
    /// assert_eq!((stepper.step_count(backbone)?, stepper.step_count(head)?), (0, 1));
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Waits for the last pass to have begun on the optim stream; to freeze, for the last step of the parameter's
    /// bucket.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout, `Order` inside a pass, `Poisoned` after a failure.
    pub fn set_frozen(&mut self, id: ParamId, frozen: bool) -> Result<()> {
        let param = self.layout.index(id)?;
        self.refuse_open_pass()?;
        self.run.get_mut().touch_frozen(param, frozen)?;
        self.agreement.forget();
        self.write_frozen(param, frozen);
        Ok(())
    }

    /// Returns whether a parameter is frozen.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout.
    pub fn is_frozen(&self, id: ParamId) -> Result<bool> {
        let param = self.layout.index(id)?;
        Ok(self.run.borrow().schedule.is_frozen(param))
    }
}
