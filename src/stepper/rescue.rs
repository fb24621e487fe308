//! Reads what a stepper still has after a failure, above all the failure of a peer.
//!
//! The host device skips every op after the first failure, so memory is as the last op that ran left it. A GPU runs
//! steps that were queued after a sum that fails, so a stepper there refuses.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Opens a stepper that has failed for reading, to save what this rank has learnt when a peer has died. From then
    /// on [tensors](Self::read), step counts, [`status`](Self::status) and [checkpoints](crate::checkpoint) give what
    /// there is; passes stay refused. It does nothing if nothing has failed.
    ///
    /// On the host, everything is as the last op that ran left it. Steps that had not run when the failure came are skipped, also
    /// those of a finished pass whose sums had all arrived. In Sequential and Normed a pass whose sum failed has changed
    /// nothing. In Eager its first buckets may have been stepped, which their [step counts](Self::step_count) show.
    ///
    /// With sharded states, a step of [`Lamb`](crate::Lamb) waits for the other ranks after it has updated the moments.
    /// After a failure there, the moments of that bucket are one update ahead of its parameters.
    ///
    /// With [`Strategy::Fsdp`](crate::Strategy), no sharded parameter can be read: the other ranks' shards are lost.
    /// With [`Strategy::Zero`](crate::Strategy), no parameter of a bucket can be read if the failure came between its
    /// step and its all-gather: only this rank's shard of it is new.
    ///
    /// A failed stepper on a GPU refuses. Its steps wait on the GPU for a sum to end, not to succeed: those that were queued
    /// after a sum that failed have run on what that sum left, up to eight passes of them. Nobody could tell a parameter
    /// that is right from one that is not. Go on from a [checkpoint](crate::checkpoint), and save often enough.
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
    ///     if stepper.status().is_err() {
    ///         stepper.rescue()?;
    ///         assert_eq!(stepper.step_count(w)?, 2);
    ///         assert!(stepper.view::<f32>(w)?[0] < 0.0);
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
    /// `Order` inside a pass; `Unsupported` on a GPU after a failure.
    pub fn rescue(&mut self) -> Result<()> {
        self.refuse_open_pass()?;
        let run = self.run.get_mut();
        if !D::TRAINER_IS_A_STREAM {
            run.rescue();
            return self.restore_params();
        }
        run.schedule.synchronize();
        // A GPU may tell of a failure only when the host has waited for it.
        let outcome = run.settle().and_then(|()| run.device.synchronize());
        outcome.map_err(|_| {
            let thing = format_args!("rescue from {}", run.device.place());
            let wrong =
                "steps that were queued after the op that failed have run, on gradients that are no sum";
            Error::unsupported(thing, wrong, "go on from the last checkpoint")
        })
    }
}
