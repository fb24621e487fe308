//! Parameters that no rank used in the open pass, as declared by the trainer. PyTorch's `find_unused_parameters` finds
//! the same parameters.
//!
//! The stepper's own buckets can count the ranks with a gradient; borrowed ones have no room for counts. The results
//! have the bits of `Unused::Skip` when no rank writes the gradient.

use crate::device::Device;
use crate::error::{Result, refuse};
use crate::layout::ParamId;
use crate::stepper::state::options::Unused;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Declares parameters for which no rank has a gradient in the open pass. Their values, states and step counts do
    /// not change, and norms leave them out, as with [`Unused::Skip`](crate::Unused). Their buckets no longer wait for
    /// them, and they can still be read.
    ///
    /// If such a gradient was written in this pass and not handed over, it is replaced by zeros before it is reduced.
    /// With sums [by the caller](crate::Sums::by_caller), and after a hand-over, the stepper does not write the
    /// gradients, so they must be zeros. With [`Accumulation::Summed`](crate::Accumulation), the gradient keeps the
    /// sums of earlier micro-batches.
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
    /// Does not wait. In Eager, call it before the hand-over of each parameter that it names; in Normed and Sequential,
    /// before the pass is finished. In a captured pass it is part of the capture. If all parameters of a bucket are
    /// unused, the bucket is reduced and launched when a later bucket's hand-over needs it. If the order of buckets is
    /// free, this happens in [`bucket_ready`](Self::bucket_ready) or when the pass is finished.
    ///
    /// All ranks must declare the same parameters, each before the same hand-overs. If ranks differ and their
    /// collective [compares](Self::set_lr), the bucket's all-reduce returns `Mismatch`. If a rank
    /// declares a parameter after that all-reduce has started, the next pass's first collective returns `Mismatch`
    /// instead. With sums by the caller, ranks do not compare.
    ///
    /// # Errors
    /// `Config` with [`Unused::Skip`](crate::Unused) or [`uneven_inputs`](crate::StepperBuilder::uneven_inputs), where
    /// buckets count ranks; `Order` if no pass is open, if this is not its last micro-batch, or if in Eager one of the
    /// parameters was handed over; `Layout` if an id is of another layout. Nothing has changed then.
    pub fn set_unused(&mut self, params: &[ParamId]) -> Result<()> {
        refuse! {
            "unused" = "Skip", if self.unused == Unused::Skip
                => "ranks count for themselves what they use",
                "leave the gradient unwritten, or build with another Unused";
            "uneven_inputs" = "set", if self.plan.buckets().iter().any(|bucket| bucket.contributors.is_some())
                => "a rank without data cannot know what the others did not use", "build with Unused::Skip instead";
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
