//! Builds a stepper on the caller's tensors, or with the caller's loss scaler. Between passes, the caller may move
//! tensors or rebuild buckets.
//!
//! Every call checks all its arguments before it changes anything. The stepper's own tensors stay in place unless
//! buckets are rebuilt. A rebuild copies the stepper's own tensors once (see `rebuild.rs`).
#![allow(unsafe_code)]

use std::ptr::NonNull;

use crate::collective::Sums;
use crate::device::{Claimed, Device};
use crate::error::{Error, Result};
use crate::handle::Address;
use crate::launch::BorrowedPieces;
use crate::layout::Plan;
use crate::op::{Access, Memory, Span};
use crate::optim::{ExternalScaler, LossScale};
use crate::schedule::Schedule;
use crate::stepper::builder::StepperBuilder;
use crate::stepper::state::borrowed::{Borrowed, Lent};
use crate::stepper::stepper::Stepper;

impl StepperBuilder<'_> {
    /// Builds the stepper on the CPU, with parameters and gradient buckets in the caller's memory. The stepper owns the
    /// optimizer states. Results have the same bits as with the stepper's own memory. Borrowed tensors need only the
    /// alignment of their type. This call rejects [`uneven_inputs`](Self::uneven_inputs),
    /// [`bucket_cap_bytes`](Self::bucket_cap_bytes) and [`Unused::Skip`](crate::Unused::Skip). `Unused::Skip` counts
    /// the ranks that used each parameter, and borrowed buckets have no room for these counts. Instead, call
    /// [`Stepper::set_unused`] for parameters that no rank used. The default of [`unused`](Self::unused) is
    /// [`Unused::Refuse`](crate::Unused::Refuse). With [`Unused::StepZero`](crate::Unused::StepZero), make one of the
    /// three calls listed below before you write a gradient through your own pointer. Without such a call, zeros
    /// overwrite the gradient, and the step uses the zeros. If the caller [sums the gradients](Sums::by_caller),
    /// [`finish`](Stepper::finish) returns an error instead.
    ///
    /// ```
    /// use instep::layout::ForeignBucket;
    /// use instep::{Borrowed, Layout, Sgd, Solo, Stepper};
    ///
    /// let layout = Layout::builder().param("weight", 3).param("bias", 1).build()?;
    /// let [weight, bias] = [layout.id("weight")?, layout.id("bias")?];
    /// let (mut weights, mut biases, mut bucket) = ([1.0f32; 3], [1.0f32; 1], [0.0f32; 4]);
    /// let memory = Borrowed::new()
    ///     .param(weight, weights.as_mut_ptr())
    ///     .param(bias, biases.as_mut_ptr())
    ///     .bucket(ForeignBucket::new(4).gradient(bias, 0).gradient(weight, 1), bucket.as_mut_ptr());
    /// let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() });
    /// // SAFETY: the arrays outlive the stepper, which alone touches them until it is closed.
    /// let mut stepper = unsafe { builder.host_borrowing(Solo::default(), memory)? };
    /// let mut pass = stepper.begin()?;
    /// pass.grads().write(weight, &[1.0, 2.0, 3.0])?;
    /// pass.grads().write(bias, &[4.0])?; // without it, finish would be an error that names the bias
    /// pass.finish()?;
    /// stepper.close()?;
    /// assert_eq!((weights, biases), ([0.0, -1.0, -2.0], [-3.0]));
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// The first pass broadcasts rank 0's parameters, which overwrites the parameters of all other ranks. After a
    /// [write](Stepper::write) of a parameter, the next pass broadcasts rank 0's values of that parameter's bucket. If
    /// the caller [sums the gradients](Sums::by_caller), passes broadcast nothing.
    ///
    /// In a pass, three calls mark a gradient as written and wait for the last step of its bucket:
    /// [`Stepper::view_mut`] of the gradient, [`Grads::get_mut`](crate::Grads::get_mut) and [`Stepper::bucket_mut`].
    /// After one of these calls, you may write the gradient through your own pointer until the hand-over.
    ///
    /// # Errors
    /// Errors as for [`host`](Self::host). `Layout` if a tensor has no address or two addresses, is misaligned for its
    /// type, or overlaps another tensor.
    ///
    /// # Safety
    /// Until the stepper is closed or dropped:
    /// 1. Every address is valid for reads and writes of its tensor, and all of the tensor is initialised. Only the
    ///    stepper, its views and your own pointers access the tensor. Your own pointers follow the rules below.
    /// 2. Write a gradient only after one of the three calls above and before its hand-over. From the hand-over until
    ///    the closure that you passed to [`bucket_ready_after`](Stepper::bucket_ready_after) has returned, only your
    ///    own sum of the bucket may write the gradient.
    /// 3. In a pass, read a parameter only after [`Stepper::view`] of the parameter and before its hand-over.
    /// 4. Between passes, call [`Stepper::view`] before you read a parameter, and [`Stepper::view_mut`] before you
    ///    write it.
    /// 5. If a parameter has a [master](crate::Master), never write the parameter directly. Call [`Stepper::write`],
    ///    which writes the parameter and its master.
    ///
    /// Closing or dropping the stepper waits for running steps and, without a deadline, for the caller's sums. Unless a
    /// pass is open or the thread is panicking, closing or dropping also waits for queued collectives, at most until
    /// the deadline.
    pub unsafe fn host_borrowing(self, sums: impl Into<Sums>, memory: Borrowed) -> Result<Stepper> {
        self.on_host(sums.into(), Some(memory))
    }

    /// Connects the stepper to the caller's scaler, such as `torch.amp.GradScaler`. The stepper reads the loss scale
    /// from one tensor of the scaler, and reports in another tensor whether a pass was skipped. This call sets the
    /// [`loss_scale`](Self::loss_scale) to [`LossScale::External`](crate::LossScale).
    ///
    /// `scale` and `found_inf` are two of the scaler's tensors, with one f32 each. `scale` is the scaler's `_scale`,
    /// and `found_inf` is the optimizer's tensor in `found_inf_per_device`. Both tensors must be in the memory where
    /// steps run: the device's memory or, with [`offload`](Self::offload), the host's memory. A pass reads the scale
    /// once when it begins, and its steps divide gradients by that scale. The scale must be finite and above 0. When
    /// the pass is finished, all ranks must have the same `found_inf`. The pass is skipped if `found_inf` is not 0 at
    /// that time. A pass with an infinite or NaN gradient is skipped too. After the device's decision, the stepper sets
    /// `found_inf` to 1 for a skipped pass and to 0 otherwise, as `GradScaler.update` expects.
    ///
    /// ```
    /// # use instep::{Layout, Mode, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 1).build()?;
    /// # let w = layout.id("w")?;
    /// let (scale, found_inf) = (Box::leak(Box::new(8.0f32)) as *mut f32, Box::leak(Box::new(0.0f32)) as *mut f32);
    /// let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() }).mode(Mode::Normed);
    /// // SAFETY: both outlive the stepper, and are touched between passes alone.
    /// let mut stepper = unsafe { builder.grad_scaler(scale, found_inf) }.host(Solo::default())?;
    /// for (gradient, expected) in [(16.0, (-2.0, 0.0)), (f32::INFINITY, (-2.0, 1.0)), (4.0, (-3.0, 0.0))] {
    ///     let mut pass = stepper.begin()?;
    ///     pass.grads().write(w, &[gradient])?;
    ///     pass.finish()?;
    ///     // SAFETY: no pass is open.
    ///     unsafe {
    ///         assert_eq!((stepper.view::<f32>(w)?[0], *found_inf), expected);
    ///         (*scale, *found_inf) = (if *found_inf > 0.0 { *scale / 2.0 } else { *scale }, 0.0);
    ///     }
    /// }
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// With a scaler, [`finish`](Stepper::finish) waits for the device's decision whether to skip the pass. This
    /// decision requires the last collective. `finish` does not wait for steps, except on a GPU in `Sequential` mode.
    /// On a GPU, the trainer's stream waits, and the thread waits only if steps are offloaded. Between `finish` and the
    /// next `begin`, work on the trainer's stream may read and write both tensors. During a pass, work on the trainer's
    /// stream may access only `found_inf`. With offload, these rules apply to the trainer's thread instead of its
    /// stream. A captured pass uses the same addresses in every replay. With offload on a GPU, capture is refused.
    ///
    /// # Errors
    /// This call itself returns no error. Building the stepper returns the following errors. `Config` if an address is
    /// null. `Config` in `Eager` mode. `Config` with [`Clip::PerBucket`](crate::Clip::PerBucket). On a GPU, `Layout` if
    /// an address is not in the memory where steps run.
    ///
    /// # Safety
    /// Both addresses stay aligned and valid for one f32, in the memory where steps run, until
    /// [`close`](Stepper::close) has returned `Ok`. Until then, you access the tensors only at the times that the
    /// section Ordering allows. If `close` fails, or the stepper is dropped instead, both rules hold until the device
    /// has run all its work.
    ///
    /// # Source
    /// `torch.amp.GradScaler`: `unscale_`, `step` and `update`.
    pub unsafe fn grad_scaler(mut self, scale: *const f32, found_inf: *mut f32) -> Self {
        let address = |at: *mut f32| NonNull::new(at.cast()).map(Address::of);
        match (address(scale.cast_mut()), address(found_inf)) {
            (Some(scale), Some(found_inf)) => {
                self.loss_scale = LossScale::External(ExternalScaler { scale, found_inf });
            }
            _ => {
                let wrong = "a scaler has a scale and a flag";
                let remedy = "give both addresses, or use loss_scale";
                self.refused.get_or_insert(Error::config("grad_scaler", "null", wrong, remedy));
            }
        }
        self
    }
}

impl<D: Device> Stepper<D> {
    /// Replaces the addresses of tensors that the stepper [borrows](crate::StepperBuilder::host_borrowing). Parameters
    /// that `memory` does not name keep their addresses. If `memory` names no bucket, all buckets keep their addresses.
    /// Otherwise, `memory` must name all buckets: either the present buckets in their present order, or new buckets.
    /// Returns whether the buckets are new.
    ///
    /// If the buckets stay the same, this call takes a few nanoseconds per parameter, so you can make it before every
    /// pass. Buckets are new, for example, after PyTorch's reducer has rebuilt them. If buckets are new, this call
    /// copies the stepper's own tensors, parameter by parameter. Step counts, learning rates, frozen parameters and the
    /// status stay the same. The documentation of [`rebuild_buckets`](Self::rebuild_buckets) describes the cost of the
    /// copy, and the effect on recordings and captured passes. Training continues with the same bits as without the
    /// call.
    ///
    /// ```
    /// use instep::{Borrowed, ForeignBucket, Layout, Sgd, Solo, Stepper};
    ///
    /// let layout = Layout::builder().param("weight", 3).build()?;
    /// let weight = layout.id("weight")?;
    /// let (mut weights, mut first, mut second) = ([1.0f32; 3], [0.0f32; 3], [0.0f32; 3]);
    /// let bucket = || ForeignBucket::new(3).gradient(weight, 0);
    /// let memory = Borrowed::new().param(weight, weights.as_mut_ptr()).bucket(bucket(), first.as_mut_ptr());
    /// let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() });
    /// // SAFETY: the arrays outlive the stepper, which alone touches them until it is closed.
    /// let mut stepper = unsafe { builder.host_borrowing(Solo::default(), memory)? };
    /// for gradients in [&mut second, &mut first] {
    ///     // SAFETY: the arrays outlive the stepper, which alone touches them; the weights stay where they are.
    ///     unsafe { stepper.rebind(Borrowed::new().bucket(bucket(), gradients.as_mut_ptr()))? };
    ///     let mut pass = stepper.begin()?;
    ///     pass.grads().write(weight, &[1.0, 2.0, 3.0])?;
    ///     pass.finish()?;
    /// }
    /// stepper.close()?;
    /// assert_eq!((weights, second), ([-1.0, -3.0, -5.0], [1.0, 2.0, 3.0]));
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// On the host, this call waits for all steps, and no op uses the old memory after the call returns. On a GPU, the
    /// trainer's stream waits for the steps instead. Later work on that stream, such as freeing the old memory, runs
    /// after all work that uses the old memory. The GPU copies the new addresses of parameters from one of two buffers,
    /// and the host waits only if both buffers are in use. If the buckets are new, the host waits for all steps, even
    /// on a GPU, and ranks compare layouts, buckets and options.
    ///
    /// Addresses may differ between ranks. All ranks must change their buckets at the same point. If ranks have
    /// different buckets, the next collective that [compares calls](Self::set_lr) returns `Mismatch`.
    ///
    /// # Errors
    /// `Unsupported` if the stepper owns its memory. `Layout` if a tensor has no address or two addresses, is
    /// misaligned for its type, overlaps another tensor, or is in memory that the device cannot reach. `Order` inside a
    /// pass. `Poisoned` after a failure. After any of these errors, the stepper is unchanged and uses the old memory.
    /// `Device` if a GPU's driver refuses to copy the new addresses. The stepper is then poisoned, and may use both the
    /// old and the new memory until it is closed.
    ///
    /// # Safety
    /// From this call on, the new memory meets the safety contract of the constructor that borrowed the old memory.
    /// Until this call returns `Ok`, the old memory meets that contract too. Before this call, copy the values of every
    /// moved parameter to its new address, on every rank. This call does not copy or broadcast these values, and does
    /// not update the [master](crate::Master). On a GPU, enqueue the work that fills the new memory on the trainer's
    /// stream before this call. Gradients may be filled later, as in any pass.
    pub unsafe fn rebind(&mut self, memory: Borrowed) -> Result<bool> {
        self.refuse_open_pass()?;
        self.refuse_rescued()?;
        if !self.plan.is_foreign() {
            let wrong = "the stepper owns them, so they have no other address";
            return Err(Error::unsupported("tensors", wrong, "build with host_borrowing or cuda_borrowing"));
        }
        let new_plan = if memory.keeps_buckets(&self.layout, &self.plan)? {
            None
        } else {
            let plan = memory.plan(&self.layout, self.plan.asked().clone())?;
            Some(plan.with_gradients(self.plan.gradients()).with_actions_of(&self.plan))
        };
        let pieces = self.pieces_for(&memory, new_plan.as_ref().unwrap_or(&self.plan))?;
        let run = self.run.get_mut();
        run.touch(Schedule::touch_all)?;
        // A bucket without elements is reduced but never stepped, so `touch_all` does not wait for it.
        run.touch(Schedule::touch_contributors)?;
        run.touch(Schedule::touch_control)?;
        let Some(plan) = new_plan else {
            for memory in [Memory::Params, Memory::Grads] {
                run.note(Access { span: Span::whole(memory, &self.plan), writes: true });
            }
            // SAFETY: no pass is open, and every op has been waited for.
            run.device.rebind(pieces, unsafe { Claimed::promise() })?;
            return Ok(false);
        };
        self.move_to(plan, self.optimizers.clone(), Some(pieces))?;
        Ok(true)
    }

    /// Returns the pieces (ranges and their addresses) of the caller's tensors in `plan`. A tensor in `memory` gets its
    /// new address. Any other tensor keeps its present address.
    pub(super) fn pieces_for(&self, memory: &Borrowed, plan: &Plan) -> Result<BorrowedPieces> {
        let run = self.run.borrow();
        let address = |lent| {
            let span = match lent {
                Lent::Param(param) => {
                    Span::segment(Memory::Params, &self.plan, self.plan.segment_of(param as usize))
                }
                Lent::Bucket(bucket) => Span::bucket(&self.plan.buckets()[bucket as usize]),
            };
            run.device.resolve(span)
        };
        memory.pieces(&self.layout, plan, Some(&address))
    }
}
