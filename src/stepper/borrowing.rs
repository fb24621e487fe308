//! A stepper on the caller's tensors, or with the caller's loss scaler, and the same tensors elsewhere, or cut anew, between
//! passes.
//!
//! Everything is checked before anything changes. What the stepper owns stays where it is, unless buckets are cut anew; then
//! it is copied once, as in `rebuild.rs`.
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
use crate::stepper::builder::StepperBuilder;
use crate::stepper::state::borrowed::{Borrowed, Lent};
use crate::stepper::stepper::Stepper;

impl StepperBuilder<'_> {
    /// Builds the stepper on the CPU, on parameters and gradient buckets of the caller's; states are the stepper's own.
    /// Results have the same bits as on the stepper's own memory, at any alignment. It rejects
    /// [`uneven_inputs`](Self::uneven_inputs) and [`bucket_cap_bytes`](Self::bucket_cap_bytes). Foreign buckets have no
    /// room for counts, so [`Unused::Skip`](crate::Unused::Skip) is rejected too; [`Stepper::set_unused`] names what no
    /// rank used. Unset, it is [`Unused::Refuse`](crate::Unused::Refuse): with
    /// [`Unused::StepZero`](crate::Unused::StepZero), a gradient that you wrote without asking for it is overwritten
    /// with zeros and stepped.
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
    /// The first pass writes rank 0's parameters over the other ranks', and so does the next one after a parameter was
    /// [written](Stepper::write) for those of its bucket.
    ///
    /// In a pass, [`Stepper::view_mut`] of a gradient, [`Grads::get_mut`](crate::Grads::get_mut) and
    /// [`Stepper::bucket_mut`] mark it as written and wait for the last step. After it you may write through your own
    /// pointer until the hand-over.
    ///
    /// # Errors
    /// Errors as for [`host`](Self::host); `Layout` if a tensor lies nowhere, twice, misaligned for its type, or over
    /// another one.
    ///
    /// # Safety
    /// Until the stepper is closed or dropped:
    /// 1. Every address is valid for reads and writes of its tensor, and all of the tensor is initialised. Only the
    ///    stepper, its views, and your own pointers under these rules touch it.
    /// 2. Write a gradient only between one of these calls and its hand-over. The sum that
    ///    [`bucket_ready_after`](Stepper::bucket_ready_after) waits for may write it until that closure has returned.
    /// 3. In a pass, read a parameter only between [`Stepper::view`] of it and its hand-over.
    /// 4. Between passes, call [`Stepper::view`], or to write [`Stepper::view_mut`], of each parameter first.
    /// 5. Never write a parameter with a [master](crate::Master); use [`Stepper::write`], which writes both.
    ///
    /// Closing and dropping wait for steps that still run, and without a deadline for sums of the caller's. Unless the thread
    /// panics, they also wait for peers that a queued sum of the stepper's needs, up to the deadline.
    pub unsafe fn host_borrowing(self, sums: impl Into<Sums>, memory: Borrowed) -> Result<Stepper> {
        self.on_host(sums.into(), Some(memory))
    }

    /// Takes the loss scale from a scaler of the caller's, such as `torch.amp.GradScaler`, and tells that scaler whether the
    /// pass was skipped: [`LossScale::External`](crate::LossScale), in the place of [`loss_scale`](Self::loss_scale).
    ///
    /// `scale` and `found_inf` are its tensors of one f32 each (`_scale`, and the optimizer's of `found_inf_per_device`), in
    /// the memory where steps run: that of the stepper's device, or with [`offload`](Self::offload) the host's. A pass
    /// reads the scale once, when it begins, and divides it out: a finite number above 0. When the pass is finished, a flag other than 0 has it skipped; your code sets it equally on all ranks, or
    /// leaves it 0. A pass with an infinite or NaN gradient is skipped too. Then the flag is 1 if the pass was skipped, else
    /// 0, which is what `GradScaler.update` asks for.
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
    /// [`finish`](Stepper::finish) then waits for the decision, and so for the last sum, but for no step: on a GPU the
    /// trainer's stream waits, and no thread unless steps are offloaded. From there to the next `begin`, work on
    /// the trainer's stream may read and write both, or with offload the trainer's thread; in a pass, the flag alone. A
    /// captured pass keeps the addresses; with offload on a GPU, capture is refused.
    ///
    /// # Errors
    /// `Config` if an address is null, in Eager, or beside [`Clip::PerBucket`](crate::Clip::PerBucket) when the stepper is
    /// built; `Layout` on a GPU if an address is not in that memory.
    ///
    /// # Safety
    /// Until [`close`](Stepper::close) has returned `Ok` (if it fails, or the stepper is dropped instead: until its device has
    /// run all that it was given), both addresses are aligned and valid for one f32 in that memory, and
    /// nothing touches them but as under Ordering.
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
    /// Takes the caller's tensors at other addresses, of a stepper that [borrows](crate::StepperBuilder::host_borrowing)
    /// them. Parameters that `memory` does not name stay where they are; so do the buckets if it names none. Otherwise it
    /// names all buckets: those that the stepper has, in the same order, or others. Returns whether the buckets are others.
    ///
    /// The same buckets cost some nanoseconds per parameter, so a call before every pass is cheap. Other buckets are
    /// recognised by their parameters, as after PyTorch's reducer has rebuilt its own. States, masters, averages, step
    /// counts, rates, frozen parameters and the status go along bit for bit, by one copy of what the stepper owns:
    /// [`rebuild_buckets`](Self::rebuild_buckets) says what that costs, and what it means for recordings and captured passes.
    /// Later training has the same bits as without.
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
    /// On the host it waits for all steps, and the old memory is the caller's when it returns. On a GPU the trainer's stream
    /// waits: work on it from here on comes after everything that touches the old memory, also that which frees it. The host
    /// does not wait, unless parameters move a third time before the GPU has taken note of the first. Other buckets make it
    /// wait for all steps on a GPU too, and compare the agreement there.
    ///
    /// Each rank may have addresses of its own. All ranks change their buckets at the same point: a rank that goes on with
    /// others than its peers is a `Mismatch` at the next collective, if ranks [compare](Self::set_lr).
    ///
    /// # Errors
    /// `Unsupported` if the stepper owns its memory; `Layout` if a tensor lies nowhere, twice, misaligned for its type, over
    /// another one, or out of the device's reach; `Order` inside a pass, `Poisoned` after a failure. The stepper is as it was
    /// then, and uses the old memory. `Device` if a GPU's driver refuses a copy of the new addresses: the stepper is poisoned
    /// then, and may use both memories until it is closed.
    ///
    /// # Safety
    /// The new memory meets the contract of the constructor that borrowed, from now on. Until this returns `Ok`, the
    /// old memory meets it too. A parameter at a new address holds the values that it had, on every rank, because
    /// nothing copies or broadcasts them, or updates its [master](crate::Master). On a GPU, the work that fills the new
    /// memory comes before this call on the trainer's stream; gradients may also be filled later, as ever.
    pub unsafe fn rebind(&mut self, memory: Borrowed) -> Result<bool> {
        self.refuse_open_pass()?;
        self.refuse_rescued()?;
        if !self.plan.is_foreign() {
            let wrong = "the stepper owns them, so they have no other address";
            return Err(Error::unsupported("tensors", wrong, "build with host_borrowing or cuda_borrowing"));
        }
        let recut = if memory.keeps_buckets(&self.layout, &self.plan)? {
            None
        } else {
            let plan = memory.plan(&self.layout, self.plan.asked().clone())?;
            Some(plan.with_gradients(self.plan.gradients()).with_actions_of(&self.plan))
        };
        let pieces = self.pieces_for(&memory, recut.as_ref().unwrap_or(&self.plan))?;
        let run = self.run.get_mut();
        run.touch_all()?;
        // A bucket without elements is summed and never stepped.
        run.touch_contributors()?;
        run.touch_control()?;
        let Some(plan) = recut else {
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

    /// Returns the caller's tensors for a plan: those in `memory` at their new addresses, and the others at their
    /// present ones.
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
