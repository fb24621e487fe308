//! Parameters that no rank used in the open pass, as a trainer says that knows it, PyTorch's `find_unused_parameters` for one.
//!
//! Buckets of the stepper's own count for themselves; borrowed ones have no room for counts. The bits are those of
//! `Unused::Skip` where no rank writes the gradient.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout::ParamId;
use crate::stepper::state::options::Unused;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Leaves parameters alone in the open pass, because no rank has a gradient for them: value, states and step count stay,
    /// and norms leave them out, as with [`Unused::Skip`](crate::Unused), which counts for itself in buckets of the stepper's
    /// own. Their buckets no longer wait for them, and they can still be read.
    ///
    /// A gradient that was written in this pass, and was not handed over, is discarded: zeros are summed in its place. Where
    /// the sums are [the caller's](crate::Sums::by_caller), the stepper writes nothing; there, and after a
    /// hand-over, it is up to you that the gradients are zeros. Where [each micro-batch is summed](crate::Accumulation), the sums
    /// of earlier ones stay, so that the gradient still reads as them.
    ///
    /// ```
    /// use instep::{AdamW, Borrowed, ForeignBucket, Layout, Solo, Stepper};
    ///
    /// let layout = Layout::builder().param("used", 1).param("unused", 1).build()?;
    /// let [used, unused] = [layout.id("used")?, layout.id("unused")?];
    /// let (mut params, mut grads) = ([1.0f32; 2], [0.0f32; 2]);
    /// let memory = Borrowed::new()
    ///     .param(used, params.as_mut_ptr())
    ///     .param(unused, params.as_mut_ptr().wrapping_add(1))
    ///     .bucket(ForeignBucket::new(2).gradient(used, 0).gradient(unused, 1), grads.as_mut_ptr());
    /// let builder = Stepper::builder(&layout, AdamW::default());
    /// // SAFETY: the arrays outlive the stepper, which alone touches them until it is closed.
    /// let mut stepper = unsafe { builder.host_borrowing(Solo::default(), memory)? };
    /// let mut pass = stepper.begin()?;
    /// pass.write(used.grad(), &[1.0])?;
    /// pass.set_unused(&[unused])?;
    /// pass.finish()?;
    /// assert_eq!((stepper.step_count(used)?, stepper.step_count(unused)?), (1, 0));
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Does not wait. In Eager it comes before the hand-over of each parameter that it names; in Normed and Sequential, before
    /// the pass is finished. In a captured pass it is part of the capture. A bucket of which all parameters are unused is
    /// summed and launches where another one's hand-over reaches it; where buckets keep no order, with
    /// [`bucket_ready`](Self::bucket_ready) or when the pass is finished.
    ///
    /// All ranks name the same parameters, each before the same hand-overs; a difference is a `Mismatch` in the sum of the
    /// bucket, or in the next pass if that sum is on its way, if ranks [compare](Self::set_lr). With sums that are made
    /// elsewhere, nobody compares.
    ///
    /// # Errors
    /// `Config` with [`Unused::Skip`](crate::Unused) or [`uneven_inputs`](crate::StepperBuilder::uneven_inputs), where ranks
    /// count; `Order` if no pass is open, it is not at its last micro-batch, or in Eager a parameter was handed over; `Layout` if
    /// an id is of another layout. Nothing has changed then.
    pub fn set_unused(&mut self, params: &[ParamId]) -> Result<()> {
        if self.unused == Unused::Skip {
            let wrong = "ranks count for themselves what they use";
            let remedy = "leave the gradient unwritten, or build with another Unused";
            return Err(Error::config("unused", "Skip", wrong, remedy));
        }
        if self.plan.buckets().iter().any(|bucket| bucket.contributors.is_some()) {
            let wrong = "a rank without data cannot know what the others did not use";
            return Err(Error::config("uneven_inputs", "set", wrong, "build with Unused::Skip instead"));
        }
        let places = params.iter().map(|id| self.layout.index(*id)).collect::<Result<Vec<_>>>()?;
        for param in &places {
            self.note_hand_over(*param);
        }
        let run = self.run.get_mut();
        run.schedule.leave_unused(&places)?;
        run.submit();
        Ok(())
    }
}
