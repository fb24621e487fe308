//! What can still be read after a failure, above all of a peer.
//!
//! The host device skips every op after the first failure, so memory is as the last op that ran left it. A GPU runs
//! steps that were queued after a sum that fails, so a stepper there cannot be rescued.

use crate::error::Result;
use crate::stepper::stepper::Stepper;

impl Stepper {
    /// Opens a stepper that has failed for reading, to save what this rank has learnt when a peer has died. From then
    /// on [`params`](Self::params), [`state`](Self::state), step counts, [`status`](Self::status) and
    /// [checkpoints](crate::checkpoint) give what there is; passes stay refused. Does nothing if nothing has failed.
    ///
    /// Everything is as the last op that ran left it. In Sequential and Normed a pass whose sum failed has changed
    /// nothing. In Eager its first buckets may have been stepped, which their [step counts](Self::step_count) show.
    ///
    /// ```
    /// use instep::{AdamW, Layout, Stepper, in_process};
    ///
    /// let layout = Layout::builder().param("w", 4).build()?;
    /// let w = layout.id("w")?;
    /// let _ = in_process(2, |comm| {
    ///     let is_lost = comm.rank() == 1;
    ///     let mut stepper = Stepper::host(&layout, AdamW::default(), comm)?;
    ///     for step in 0..3 {
    ///         if is_lost && step == 2 {
    ///             return Ok(()); // as if its process had died
    ///         }
    ///         let mut pass = stepper.begin()?;
    ///         pass.grads().write(w, &[1.0; 4])?;
    ///         pass.finish()?;
    ///     }
    ///     if stepper.params().is_err() {
    ///         stepper.rescue()?;
    ///         assert_eq!(stepper.step_count(w)?, 2);
    ///         assert!(stepper.params()?.get(w)?[0] < 0.0);
    ///         assert!(stepper.begin().is_err());
    ///     }
    ///     Ok::<(), instep::Error>(())
    /// });
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Waits until every op has ended or been skipped; for peers up to the deadline.
    ///
    /// # Errors
    /// `Order` inside a pass.
    pub fn rescue(&mut self) -> Result<()> {
        self.refuse_open_pass()?;
        self.run.get_mut().rescue();
        Ok(())
    }
}
