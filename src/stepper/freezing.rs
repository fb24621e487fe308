//! Freezes parameters: a frozen parameter takes no gradient and is not stepped, and no bucket waits for it.
//!
//! The schedule and the settings change together, between passes.

use crate::device::Device;
use crate::error::Result;
use crate::layout::ParamId;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Freezes or unfreezes a parameter from the next pass on. A frozen parameter can be read at any time in a pass and
    /// takes no gradient. Its value, state and step count do not change, and no bucket waits for it. A bucket in which
    /// every parameter is frozen is neither reduced nor stepped. In any other bucket, the gradient of a frozen
    /// parameter is reduced as zeros. All ranks must freeze the same parameters. If they differ, the next collective
    /// that [compares](Self::set_lr) returns `Mismatch`. A rank that froze everything makes no collective, so the other
    /// ranks get a `Deadline` or `PeerLost`.
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
    /// Waits until the last pass has begun on the optim stream. Freezing also waits for the last step of the
    /// parameter's bucket.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout, `Order` inside a pass, `Poisoned` after a failure.
    pub fn set_frozen(&mut self, id: ParamId, frozen: bool) -> Result<()> {
        let param = self.layout.index(id)?;
        self.refuse_open_pass()?;
        self.run.get_mut().touch(|schedule| schedule.touch_frozen(param, frozen))?;
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
