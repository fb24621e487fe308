//! Uneven inputs: the passes of a rank that has run out of data while other ranks still have data.
//!
//! A rank without data contributes zeros to every collective and makes every step. Its parameters and states therefore
//! stay equal to those of the other ranks, and no broadcast is needed at the end. Each bucket's all-reduce also counts
//! the ranks with data. PyTorch's `Join`, in contrast, makes an extra collective before each iteration and broadcasts
//! parameters at the end.

use crate::device::Device;
use crate::error::{Result, refuse};
use crate::schedule::Opening;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Takes part in one pass without data. A rank without data calls this until it returns false, which means that no
    /// rank had data and nothing was stepped. Between the calls, set learning rates and frozen parameters as on the
    /// other ranks. A call counts as one pass, whatever the number of micro-batches on the other ranks. Ordinary passes
    /// may follow once it has returned false.
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
        refuse! {
            "uneven_inputs" = "unset", if self.plan.carrier().is_none_or(|bucket| bucket.contributors.is_none())
                => "joining needs it", "build with StepperBuilder::uneven_inputs";
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
