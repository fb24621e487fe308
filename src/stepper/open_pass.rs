//! The calls of an open pass: hand-overs, micro-batches, and the end of the pass.
//!
//! A refused call has changed nothing, so it can be repeated. A call borrows the stepper only until it returns. `Pass`
//! in `pass.rs` instead borrows the stepper for as long as the pass is open, so that the compiler checks accesses.

use std::sync::Arc;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout::ParamId;
use crate::op::{Access, Span};
use crate::schedule::{Mode, Opening, Schedule};
use crate::stepper::claims::bucket_numbered;
use crate::stepper::stepper::{Abandoned, Stepper};

impl Stepper {
    /// Hands over a bucket that the caller sums on another thread. The closure `sum` must wait until the bucket's sum
    /// is complete, and then return. The stepper must have been built with [`Sums::by_caller`](crate::Sums::by_caller).
    ///
    /// ```
    /// use std::sync::mpsc;
    /// use instep::{Borrowed, ForeignBucket, Layout, Sgd, Stepper, Sums};
    ///
    /// let layout = Layout::builder().param("weight", 1).build()?;
    /// let weight = layout.id("weight")?;
    /// let (mut weights, mut bucket) = ([1.0f32], [0.0f32]);
    /// let described = ForeignBucket::new(1).gradient(weight, 0);
    /// let memory = Borrowed::new().param(weight, weights.as_mut_ptr()).bucket(described, bucket.as_mut_ptr());
    /// let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() });
    /// // SAFETY: the arrays outlive the stepper, and are touched as its rules say.
    /// let mut stepper = unsafe { builder.host_borrowing(Sums::by_caller(0, 1), memory)? };
    /// let (summed, sum) = mpsc::channel();
    /// let mut pass = stepper.begin()?;
    /// pass.grads().write(weight, &[2.0])?; // backward
    /// pass.bucket_ready_after(0, move || sum.recv().map_err(|error| error.into()))?; // returns at once
    /// summed.send(()).expect("the stepper waits"); // your engine, on any thread
    /// pass.finish()?;
    /// assert_eq!(stepper.view::<f32>(weight)?, [-1.0]);
    /// # stepper.close()?;
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Returns at once. On a stepper built [inline](crate::StepperBuilder::inline), this call runs `sum` before it
    /// returns. The steps of buckets that are handed over later also run after this sum. The stepper neither reads nor
    /// writes the bucket until `sum` has returned. Closing the stepper waits for `sum`, without a deadline. Dropping a
    /// stepper on borrowed memory also waits for `sum` without a deadline, even after a panic. `sum` must therefore
    /// return even if the trainer fails. For example, `sum` can wait on a channel if the channel's sender is dropped
    /// before the stepper. `sum` must not own the stepper.
    ///
    /// # Errors
    /// Errors as for [`bucket_ready`](Self::bucket_ready). `Order` if the stepper itself sums the bucket, or if this is
    /// not the last micro-batch. An error or a panic of `sum` poisons the stepper.
    pub fn bucket_ready_after(
        &mut self,
        bucket: u32,
        sum: impl FnOnce() -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
    ) -> Result<()> {
        let rank = self.rank();
        let sum = move || sum().map_err(|error| Error::Rank { rank, message: error.to_string() });
        self.hand_over_awaited(bucket, Box::new(sum))
    }
}

impl<D: Device> Stepper<D> {
    /// Opens a pass, emits the broadcast of parameters if one is needed, and sets the agreement's number, which ranks
    /// compare.
    pub(super) fn open(&mut self, opening: Opening<'_>) -> Result<()> {
        self.refuse_rescued()?;
        self.run.get_mut().schedule.require_closed()?;
        self.follow_schedules()?;
        self.flush_settings()?;
        let agreement = self.agreed_number();
        let run = self.run.get_mut();
        if self.loss_scale.external().is_some() {
            run.touch_scaler()?;
        }
        if self.params_written.is_compared() {
            let opening = Opening { agreement, ..opening };
            run.device.agree(run.schedule.agreement_of(&opening))?;
        }
        if self.params_written.is_any() {
            // This pass compares the writes before it, so the next pass's number must not include them.
            self.agreement.forget();
        }
        let broadcast = self.params_written.broadcast(&self.plan);
        run.schedule.begin(Opening { broadcast, agreement, ..opening })?;
        run.submit();
        self.params_written.clear();
        self.written.get_mut().fill(false);
        Ok(())
    }

    /// Hands over a parameter. This call declares that you have written the parameter's gradient, and that you have
    /// finished one use of the parameter. A bucket is reduced once all its parameters are handed over. With several
    /// ranks, the reduce also requires that all earlier buckets are handed over. The mode decides when the bucket is
    /// stepped. With sums [by the caller](crate::Sums::by_caller), this call also declares that the sum of the gradient
    /// is complete. On a GPU, such a sum needs an event, so call `bucket_ready_after` instead of `grad_ready`.
    ///
    /// # Ordering
    /// Returns at once. Once all uses of the parameter are handed over, the parameter and its gradient cannot be
    /// accessed until the pass or micro-batch ends. On a GPU, the all-reduce and the step run after all work that is
    /// already enqueued on the trainer's stream.
    ///
    /// # Errors
    /// `Order` if no pass is open, if the parameter is frozen, or if it was already handed over as often as it is used.
    /// `Order` if the gradient was not written in this pass or, with [`Accumulation::Summed`](crate::Accumulation), in
    /// this micro-batch. `Layout` if `id` is of another layout. A refused call launches nothing.
    pub fn grad_ready(&mut self, id: ParamId) -> Result<()> {
        let index = self.layout.index(id)?;
        let schedule = &self.run.get_mut().schedule;
        schedule.require_open()?;
        schedule.refuse_frozen(index)?;
        schedule.refuse_handed_over(index)?;
        self.refuse_without_event(self.plan.segment_of(index).bucket)?;
        self.refuse_unwritten_hand_over(index)?;
        self.note_hand_over(index);
        let run = self.run.get_mut();
        run.schedule.hand_over(index)?;
        run.submit();
        Ok(())
    }

    /// Begins the next micro-batch of the pass. The trainer may access every parameter again, and gradients keep their
    /// values. With [`Accumulation::Summed`](crate::Accumulation), this call first hands over the gradients that were
    /// written but not yet handed over. In the next micro-batch, the first write of each gradient then replaces the
    /// gradient.
    ///
    /// # Errors
    /// `Order` if this is the last micro-batch (see [`begin_accumulating`](Self::begin_accumulating)), or if no pass is
    /// open.
    pub fn next_micro_batch(&mut self) -> Result<()> {
        self.run.get_mut().schedule.require_next_micro_batch()?;
        if !self.plan.sums_micro_batches() {
            return self.run.get_mut().schedule.next_micro_batch();
        }
        self.hand_over_written()?;
        let run = self.run.get_mut();
        run.schedule.next_micro_batch()?;
        run.submit();
        for segment in self.plan.segments().iter().filter(|segment| !self.plan.bucket_of(segment).is_local) {
            self.written.get_mut()[segment.param as usize] = false;
        }
        Ok(())
    }

    /// Hands over the gradients that were written but not yet handed over, from the last parameter to the first.
    /// Backward usually writes gradients in this order.
    fn hand_over_written(&mut self) -> Result<()> {
        for param in 0..self.layout.parameters().len() {
            self.note_hand_over(param);
        }
        let schedule = &mut self.run.get_mut().schedule;
        let written = self.written.get_mut().iter().enumerate().rev();
        for (index, _) in written.filter(|(_, written)| **written) {
            if !schedule.is_handed_over(index) {
                schedule.complete(index)?;
            }
        }
        Ok(())
    }

    /// Hands over a bucket: all uses of all its parameters, except frozen and [unused](Self::set_unused) parameters.
    /// The gradients of all these parameters must have been written, even with [`Unused::Skip`](crate::Unused) or
    /// `StepZero`. If a gradient was not written, call [`grad_ready`](Self::grad_ready) for each of the bucket's other
    /// parameters instead. With sums [by the caller](crate::Sums::by_caller), this call also declares that the bucket's
    /// sum is complete. On a GPU, such a sum needs an event, so call `bucket_ready_after` instead of `bucket_ready`.
    ///
    /// # Ordering
    /// Ordering as for [`grad_ready`](Self::grad_ready).
    ///
    /// # Errors
    /// `Order` if no pass is open. `Order` if one of these parameters was already handed over, or if its gradient was
    /// not written. `Order` on a GPU if the caller sums the bucket, because this call names no event. `Layout` if there
    /// is no such bucket. A refused call launches nothing.
    pub fn bucket_ready(&mut self, bucket: u32) -> Result<()> {
        bucket_numbered(&self.plan, bucket)?;
        self.run.get_mut().schedule.require_open()?;
        self.refuse_without_event(bucket)?;
        self.hand_over_bucket(bucket, None)
    }

    /// Hands over a bucket that the caller sums. The bucket's step waits for `sum`.
    pub(super) fn hand_over_awaited(&mut self, bucket: u32, sum: D::Sum) -> Result<()> {
        let described = bucket_numbered(&self.plan, bucket)?;
        let schedule = &self.run.get_mut().schedule;
        schedule.require_open()?;
        let thing = format_args!("bucket {bucket}");
        if !self.policy.sums_by_caller || described.is_local {
            let wrong = if described.is_local {
                "its parameters are each rank's own, so it has no sum to wait for"
            } else {
                "the stepper makes its sum, so there is none of yours to wait for"
            };
            return Err(Error::order(thing, wrong, "call bucket_ready, or build with Sums::by_caller"));
        }
        if !schedule.is_last_micro_batch() {
            let remedy = "sum the last micro-batch, and call it then";
            return Err(Error::order(
                thing,
                "summed once in a pass, and micro-batches are still to come",
                remedy,
            ));
        }
        self.hand_over_bucket(bucket, Some(sum))
    }

    fn hand_over_bucket(&mut self, bucket: u32, sum: Option<D::Sum>) -> Result<()> {
        let plan = Arc::clone(&self.plan);
        let segments = plan.segments_of(&plan.buckets()[bucket as usize]);
        let schedule = &self.run.get_mut().schedule;
        // If the last parameter was declared unused after all others were handed over, no parameter is left to check.
        if !schedule.waits_for_release(bucket) {
            for param in segments.iter().map(|segment| segment.param as usize) {
                let schedule = &self.run.get_mut().schedule;
                if schedule.takes_part(param) {
                    schedule.refuse_handed_over(param)?;
                    self.refuse_unwritten_hand_over(param)?;
                }
            }
            segments.iter().for_each(|segment| self.note_hand_over(segment.param as usize));
        }
        let run = self.run.get_mut();
        run.schedule.hand_over_bucket(bucket, sum.is_some())?;
        run.submit_awaiting(sum);
        Ok(())
    }

    /// Refuses a hand-over without an event on a GPU, because the caller's sum of the bucket may not be complete.
    fn refuse_without_event(&mut self, bucket: u32) -> Result<()> {
        let is_awaited = D::TRAINER_IS_A_STREAM && self.policy.sums_by_caller;
        if !is_awaited || self.plan.buckets()[bucket as usize].is_local {
            return Ok(());
        }
        if !self.run.get_mut().schedule.is_last_micro_batch() {
            return Ok(());
        }
        let wrong = "no event says when your sum of its gradients is there";
        let remedy = format_args!("call bucket_ready_after({bucket}, event)");
        Err(Error::order(format_args!("bucket {bucket}"), wrong, remedy))
    }

    /// Closes the pass. First hands over the gradients that were written but not yet handed over. Gradients that the
    /// caller sums are excluded, because only the caller's own hand-over shows that a sum is complete.
    /// [`Unused`](crate::Unused) decides what happens to parameters without a gradient.
    ///
    /// # Ordering
    /// Returns at once. The next access waits for the steps that conflict with this access. On a GPU in `Sequential`
    /// and `Eager` mode, the trainer's stream waits for all steps, so raw addresses are safe to use afterwards.
    ///
    /// # Errors
    /// `Order` in five cases. An open pass stays open after the error: complete or abandon it.
    /// - No pass is open.
    /// - This is not the last micro-batch.
    /// - A gradient was not written, although the option is [`Unused::Refuse`](crate::Unused) or the caller sums the
    ///   gradient.
    /// - The memory is borrowed, and no gradient was written.
    /// - With sums [by the caller](crate::Sums::by_caller), a written bucket was not handed over.
    ///
    /// The next access returns failures of queued ops.
    pub fn finish(&mut self) -> Result<()> {
        self.run.get_mut().schedule.require_last_micro_batch()?;
        self.refuse_forgotten()?;
        self.hand_over_written()?;
        let run = self.run.get_mut();
        if D::TRAINER_IS_A_STREAM && run.schedule.is_loss_scale_touched() {
            run.note(Access { span: Span::LOSS_SCALE, writes: false });
        }
        let is_external = self.loss_scale.external().is_some();
        if is_external {
            run.touch_scaler()?;
        }
        run.schedule.finish()?;
        self.rates.step += 1;
        if is_external {
            run.touch_scaler()?;
        }
        if D::TRAINER_IS_A_STREAM && self.policy.mode != Mode::Normed {
            return run.touch(Schedule::touch_all);
        }
        run.submit();
        Ok(())
    }

    /// Abandons the open pass. The gradients of buckets that have not been launched are discarded.
    ///
    /// # Ordering
    /// If the pass broadcasts parameters, this call waits for the broadcast. Otherwise it returns at once. In
    /// `Sequential` and `Normed` mode, no parameter has changed. In `Eager` mode, the result lists buckets that were
    /// already stepped, and these steps are not undone. [`Status::abandoned`](crate::Status) counts the pass.
    /// Learning-rate schedules do not advance. Training can continue only if all ranks abandon the pass after they have
    /// launched the same buckets. Otherwise the ranks' next collective returns `LeftPass` or `Mismatch`.
    ///
    /// # Errors
    /// `Order` if no pass is open.
    pub fn abandon(&mut self) -> Result<Abandoned> {
        let run = self.run.get_mut();
        let stepped_buckets = run.schedule.abandon()?;
        run.submit();
        self.abandoned += 1;
        if self.loss_scale.external().is_some() {
            run.touch_scaler()?;
        }
        Ok(Abandoned { stepped_buckets })
    }
}
