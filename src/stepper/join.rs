//! Uneven inputs: what a rank does that has run out of data while others go on.
//!
//! It takes part in every collective with zeros and makes every step, so its parameters and states stay those of the
//! others and nothing has to be sent at the end. How many ranks had data is counted in each bucket's own sum. Idea:
//! PyTorch's `Join`; there each iteration begins with a collective of its own to count, and the end with a broadcast.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::schedule::Opening;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Takes part in one pass without data of its own. Once a rank has no more data it calls this until it returns
    /// false: then no rank had any, and nothing was stepped. Learning rates are still the trainer's to set in between,
    /// as on the other ranks, and so are frozen parameters. It counts as one pass however many micro-batches the others
    /// make of theirs, and ordinary passes may follow once it has returned false.
    ///
    /// ```
    /// use instep::{Divisor, Layout, Sgd, Stepper, in_process};
    ///
    /// let layout = Layout::builder().param("w", 1).build()?;
    /// let weights = in_process(2, |comm| {
    ///     let batches = [3, 1][comm.rank() as usize];
    ///     let sgd = Sgd { lr: 1.0, ..Default::default() };
    ///     let mut stepper =
    ///         Stepper::builder(&layout, sgd).uneven_inputs(Divisor::ContributingRanks).host(comm)?;
    ///     let w = layout.id("w")?;
    ///     for _ in 0..batches {
    ///         let mut pass = stepper.begin()?;
    ///         pass.grads().write(w, &[1.0])?;
    ///         pass.finish()?;
    ///     }
    ///     while stepper.join()? {}
    ///     instep::Result::Ok((stepper.view::<f32>(w)?[0], stepper.step_count(w)?))
    /// })?;
    /// assert_eq!(weights, [(-3.0, 3); 2]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Waits for the pass's last reduce, not for the steps.
    ///
    /// # Errors
    /// `Config` unless the stepper was built with [`uneven_inputs`](crate::StepperBuilder::uneven_inputs), `Order` if a
    /// pass is open, `Poisoned` after a failure.
    pub fn join(&mut self) -> Result<bool> {
        if self.plan.carrier().is_none_or(|bucket| bucket.contributors.is_none()) {
            return Err(Error::config(
                "uneven_inputs",
                "unset",
                "joining needs it",
                "build with StepperBuilder::uneven_inputs",
            ));
        }
        self.refuse_capture()?;
        self.open(Opening { joined: true, ..Opening::default() })?;
        let run = self.run.get_mut();
        run.schedule.finish()?;
        run.submit();
        self.rates.step += 1;
        Ok(self.read_contributors()? != Some(0))
    }
}
