//! Parameters and ranks that take no part in a pass: frozen parameters, parameters that no rank used, and ranks that
//! have run out of data.
//!
//! A freeze changes the schedule and the settings together. The gradient of a frozen or unused parameter cannot be
//! written. Such a parameter is not stepped, and no bucket waits for it. The trainer itself names unused parameters,
//! whereas PyTorch finds them by `find_unused_parameters`. The stepper's own buckets can count the ranks with a
//! gradient, but borrowed buckets have no room for counts. If no rank writes a gradient, declaring the parameter unused
//! gives the same bits as `Unused::Skip`.
//!
//! A rank without data contributes zeros to every sum and performs every step, except the steps of local parameters.
//! Its parameters and states therefore stay equal to those of the other ranks, and no broadcast is needed at the end.
//! Each bucket's all-reduce also counts the ranks with data. PyTorch's `Join`, in contrast, runs an extra collective
//! before each iteration and broadcasts parameters at the end.

use crate::device::Device;
use crate::error::{Result, refuse};
use crate::layout::ParamId;
use crate::schedule::Opening;
use crate::stepper::state::options::Unused;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Freezes or unfreezes a parameter from the next pass on. A frozen parameter can be read at any time in a pass,
    /// and its gradient cannot be written. Its value, state and step count do not change, and no bucket waits for it. A
    /// bucket in which every parameter is frozen is neither reduced nor stepped. In any other bucket, the gradient of a
    /// frozen parameter is reduced as zeros. All ranks must freeze the same parameters. If ranks differ, the next
    /// collective that [compares calls](Self::set_lr) returns `Mismatch`. If a rank froze all parameters, its pass may
    /// have no collective, and the other ranks then get a `Deadline` or `PeerLost`.
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
    /// `Layout` if `id` is of another layout. `Order` inside a pass. `Poisoned` after a failure.
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

    /// Declares that no rank has a gradient for these parameters in the open pass. Their values, states and step counts
    /// do not change, and norms exclude their gradients, as with [`Unused::Skip`](crate::Unused). The launch of a
    /// bucket does not wait for these parameters, and the trainer can still read those that were not handed over.
    ///
    /// If the gradient of an unused parameter was written in this pass but not handed over, the stepper replaces it by
    /// zeros before the reduce. If the gradient was handed over, or if the [caller sums it](crate::Sums::by_caller),
    /// the stepper does not write the gradient, so the gradient must already be zeros. With
    /// [`Accumulation::Summed`](crate::Accumulation), the gradient keeps the sums of earlier micro-batches.
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
    /// Does not wait. In `Eager` mode, make this call before the hand-over of each parameter in `params`. In `Normed`
    /// and `Sequential` mode, make this call before the pass is finished. In a captured pass, this call is part of the
    /// capture. If all parameters of a bucket are unused, this call does not launch the bucket. A later hand-over, or
    /// the end of the pass, launches and reduces the bucket. If buckets may be handed over in any order, the bucket is
    /// launched only by [`bucket_ready`](Self::bucket_ready) or `bucket_ready_after` for this bucket, or by the end of
    /// the pass.
    ///
    /// All ranks must declare the same parameters, before the same hand-overs. If ranks differ and their collective
    /// [compares calls](Self::set_lr), the bucket's all-reduce returns `Mismatch`. If a rank declares a parameter
    /// unused after the parameter's hand-over, a later collective returns `Mismatch` instead: the first one between the
    /// passes, or else the next pass's first collective. With sums by the caller, ranks do not compare the declared
    /// parameters.
    ///
    /// # Errors
    /// `Config` with [`Unused::Skip`](crate::Unused) or [`uneven_inputs`](crate::StepperBuilder::uneven_inputs),
    /// because buckets then count ranks. `Order` if no pass is open, or if this is not the pass's last micro-batch.
    /// `Order` in `Eager` mode if one of the parameters was handed over. `Layout` if an id is of another layout. A
    /// refused call has changed nothing.
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

    /// Takes part in one pass as a rank that has run out of data. Repeat the call until it returns `false`, which means
    /// that no rank had data and nothing was stepped. Between the calls, set learning rates and frozen parameters as on
    /// the other ranks. A call counts as one pass, whether the other ranks make one micro-batch or several. Ordinary
    /// passes may follow after a call has returned `false`.
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
    /// `Config` unless the stepper was built with [`uneven_inputs`](crate::StepperBuilder::uneven_inputs). `Order` if a
    /// pass is open. `Poisoned` after a failure.
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
