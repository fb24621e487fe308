//! One open pass: what the trainer may touch, and the moment at which it gives it away.
//!
//! The rules of safe access are lifetimes, and each has an example that must not compile beside one that does. State,
//! not `Drop`, is the truth: a leaked pass leaves the stepper open, and the next `begin` says so.

use crate::schedule::{Mode, Opening};
use crate::stepper::stepper::{Abandoned, Stepper};
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::host::HostDevice;
use crate::layout::{Layout, ParamId};
use crate::op::{Access, Span};
use crate::stepper::views::{Grads, Params};

/// An open pass of a stepper.
///
/// A slice cannot outlive the hand-over of anything:
/// ```
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let w = layout.id("w")?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let mut pass = stepper.begin()?;
/// let (_, mut grads) = pass.split();
/// let slice = grads.get_mut(w)?;
/// slice[0] = 1.0;
/// pass.grad_ready(w)?;
/// # pass.finish()?;
/// # Ok::<(), instep::Error>(())
/// ```
/// ```compile_fail,E0499
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let w = layout.id("w")?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let mut pass = stepper.begin()?;
/// let (_, mut grads) = pass.split();
/// let slice = grads.get_mut(w)?;
/// pass.grad_ready(w)?;
/// slice[0] = 1.0; // the bucket may be on its way
/// # pass.finish()?;
/// # Ok::<(), instep::Error>(())
/// ```
/// nor the end of the pass:
/// ```
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let w = layout.id("w")?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let mut pass = stepper.begin()?;
/// let weight = pass.split().0.get(w)?;
/// assert_eq!(weight[0], 0.0);
/// pass.finish()?;
/// # Ok::<(), instep::Error>(())
/// ```
/// ```compile_fail,E0505
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let w = layout.id("w")?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let mut pass = stepper.begin()?;
/// let weight = pass.split().0.get(w)?;
/// pass.finish()?;
/// assert_eq!(weight[0], 0.0); // the step may be writing it
/// # Ok::<(), instep::Error>(())
/// ```
/// nor the micro-batch:
/// ```compile_fail,E0499
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let w = layout.id("w")?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let mut pass = stepper.begin_accumulating(2.try_into().unwrap())?;
/// let mut grads = pass.grads();
/// let slice = grads.get_mut(w)?;
/// pass.next_micro_batch()?;
/// slice[0] = 1.0;
/// # pass.finish()?;
/// # Ok::<(), instep::Error>(())
/// ```
/// Views of two passes may change places, since each keeps both passes borrowed:
/// ```
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let w = layout.id("w")?;
/// # let mut one = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// # let mut two = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let (mut first, mut second) = (one.begin()?, two.begin()?);
/// let (mut a, mut b) = (first.split().1, second.split().1);
/// std::mem::swap(&mut a, &mut b);
/// a.get_mut(w)?[0] = 1.0;
/// b.get_mut(w)?[0] = 2.0;
/// first.grad_ready(w)?;
/// # Ok::<(), instep::Error>(())
/// ```
/// ```compile_fail,E0499
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let w = layout.id("w")?;
/// # let mut one = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// # let mut two = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let (mut first, mut second) = (one.begin()?, two.begin()?);
/// let (mut a, mut b) = (first.split().1, second.split().1);
/// std::mem::swap(&mut a, &mut b);
/// first.grad_ready(w)?;
/// b.get_mut(w)?[0] = 2.0; // this is the first pass's gradient now
/// # Ok::<(), instep::Error>(())
/// ```
/// and one stepper has one pass:
/// ```
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let first = stepper.begin()?;
/// first.finish()?;
/// let second = stepper.begin()?;
/// second.finish()?;
/// # Ok::<(), instep::Error>(())
/// ```
/// ```compile_fail,E0499
/// # use instep::{Layout, Sgd, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 4).build()?;
/// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
/// let first = stepper.begin()?;
/// let second = stepper.begin()?;
/// first.finish()?;
/// second.finish()?;
/// # Ok::<(), instep::Error>(())
/// ```
#[must_use = "dropping a pass abandons it"]
#[derive(Debug)]
pub struct Pass<'a, D: Device = HostDevice> {
    pub(super) stepper: &'a mut Stepper<D>,
    open: bool,
}

impl<D: Device> Stepper<D> {
    /// Opens a pass: one forward and backward.
    ///
    /// # Ordering
    /// Does not wait; the steps of the last pass may still run. In the first pass, and after
    /// [`params_mut`](Stepper::params_mut), all ranks take rank 0's parameters.
    ///
    /// # Errors
    /// `Order` if a pass is open, because one was leaked: see [`abandon_open_pass`](Self::abandon_open_pass); `Config`
    /// if the optimizer refuses a rate of a [schedule](crate::StepperBuilder::lr_schedule).
    pub fn begin(&mut self) -> Result<Pass<'_, D>> {
        self.begin_accumulating(NonZeroU32::MIN)
    }

    /// Opens a pass of several micro-batches, whose gradients add up: the first write of the pass replaces, later ones
    /// are the trainer's to add ([`Grads::add`]). Buckets launch in the last micro-batch only. A mean over
    /// micro-batches is the trainer's too: it divides its loss by their number.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 2).build()?;
    /// # let w = layout.id("w")?;
    /// # let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Solo::default())?;
    /// let mut pass = stepper.begin_accumulating(2.try_into().unwrap())?;
    /// pass.grads().add(w, &[1.0, 2.0])?;
    /// pass.grad_ready(w)?; // nothing is launched yet
    /// pass.next_micro_batch()?;
    /// pass.grads().add(w, &[0.5, 0.5])?;
    /// pass.grad_ready(w)?; // now the bucket is on its way
    /// pass.finish()?;
    /// assert_eq!(stepper.params()?.get(w)?, [-1.5, -2.5]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Ordering as for [`begin`](Self::begin).
    ///
    /// # Errors
    /// Errors as for [`begin`](Self::begin).
    pub fn begin_accumulating(&mut self, micro_batches: NonZeroU32) -> Result<Pass<'_, D>> {
        self.open(Opening { micro_batches, ..Opening::default() })?;
        Ok(Pass::new(self))
    }

    /// Opens a pass with what this stepper knows of it.
    pub(super) fn open(&mut self, opening: Opening) -> Result<()> {
        self.refuse_rescued()?;
        self.follow_schedules()?;
        self.flush_settings()?;
        let agreement = self.agreed_number();
        let run = self.run.get_mut();
        run.schedule.begin(Opening { broadcast: self.params_written, agreement, ..opening })?;
        run.submit();
        self.params_written = false;
        self.written.get_mut().fill(false);
        Ok(())
    }
}

impl Pass<'_> {
    /// Returns views of parameters and gradients. Both borrow the whole pass, so they end where a gradient is handed
    /// over: take them anew for each layer.
    pub fn split(&mut self) -> (Params<'_>, Grads<'_>) {
        (Params::new(self.stepper), Grads::new(self.stepper))
    }

    /// Returns the parameters alone.
    pub fn params(&self) -> Params<'_> {
        Params::new(self.stepper)
    }

    /// Returns the gradients alone.
    pub fn grads(&mut self) -> Grads<'_> {
        Grads::new(self.stepper)
    }
}

impl<'a, D: Device> Pass<'a, D> {
    pub(super) fn new(stepper: &'a mut Stepper<D>) -> Self {
        Pass { stepper, open: true }
    }

    /// Returns the layout of its stepper.
    pub fn layout(&self) -> &Layout {
        self.stepper.layout()
    }

    /// Hands over a parameter: you have written its gradient and finished one use. Once all parameters of this bucket
    /// are handed over, and of earlier buckets where the collective [keeps order](crate::Collective::keeps_order), the
    /// bucket is reduced. The mode decides when it is stepped.
    ///
    /// # Ordering
    /// Returns at once. After the last use, the parameter and gradient cannot be accessed until the pass or micro-batch
    /// ends. On a GPU, the hand-over covers all work already enqueued on the trainer's stream.
    ///
    /// # Errors
    /// `Order` if the parameter is frozen, its gradient was not written in this pass, or it was handed over as often as
    /// the parameter is used; `Layout` if `id` is of another layout. Nothing is launched then.
    pub fn grad_ready(&mut self, id: ParamId) -> Result<()> {
        let stepper = &mut *self.stepper;
        let index = stepper.layout.index(id)?;
        let schedule = &stepper.run.get_mut().schedule;
        schedule.refuse_frozen(index)?;
        schedule.refuse_handed_over(index)?;
        stepper.refuse_unwritten(index)?;
        stepper.note_hand_over(index);
        let run = stepper.run.get_mut();
        run.schedule.hand_over(index)?;
        run.submit();
        Ok(())
    }

    /// Goes on to the next micro-batch of the pass: every parameter, handed over or not, is the trainer's again, and
    /// the gradients written so far stay.
    ///
    /// # Errors
    /// `Order` if this is the last one; see [`Stepper::begin_accumulating`].
    pub fn next_micro_batch(&mut self) -> Result<()> {
        self.stepper.run.get_mut().schedule.next_micro_batch()
    }

    /// Hands over every parameter of a bucket that is not frozen, each with all its uses.
    ///
    /// # Ordering
    /// Ordering as for [`grad_ready`](Self::grad_ready).
    ///
    /// # Errors
    /// `Order` if one of them was handed over already or not written, `Layout` if there is no such bucket. Nothing
    /// is launched then.
    pub fn bucket_ready(&mut self, bucket: u32) -> Result<()> {
        let stepper = &mut *self.stepper;
        let plan = Arc::clone(&stepper.plan);
        let Some(described) = plan.buckets().get(bucket as usize) else {
            let thing = format_args!("bucket {bucket}");
            let (wrong, remedy) = match plan.buckets().len() {
                0 => ("this plan has no buckets", "add parameters with elements".to_owned()),
                1 => ("out of range", "use 0, the only bucket".to_owned()),
                count => ("out of range", format!("use 0 to {}", count - 1)),
            };
            return Err(Error::layout(thing, wrong, remedy));
        };
        for segment in plan.segments_of(described) {
            let param = segment.param as usize;
            let schedule = &stepper.run.get_mut().schedule;
            if !schedule.is_frozen(param) {
                schedule.refuse_handed_over(param)?;
                stepper.refuse_unwritten(param)?;
            }
        }
        for segment in plan.segments_of(described) {
            let param = segment.param as usize;
            stepper.note_hand_over(param);
            let schedule = &mut stepper.run.get_mut().schedule;
            if !schedule.is_frozen(param) {
                schedule.complete(param)?;
            }
        }
        stepper.run.get_mut().submit();
        Ok(())
    }

    /// Closes the pass. A gradient that was written is handed over now if it was not before. A parameter without one
    /// is treated as [`Unused`](crate::Unused) says.
    ///
    /// # Ordering
    /// Returns at once; the next access waits as far as it must. On a GPU, in Sequential and Eager, the trainer's
    /// stream waits for all steps, so that raw addresses are safe to use afterwards.
    ///
    /// # Errors
    /// `Order` if micro-batches are still to come; or if a gradient was not written that
    /// [`Unused::Refuse`](crate::Unused) asks for or that is summed outside the stepper, or on borrowed memory none at
    /// all. The pass is abandoned then. Failures of queued ops come with the next access.
    pub fn finish(mut self) -> Result<()> {
        self.stepper.refuse_forgotten()?;
        for param in 0..self.stepper.layout.parameters().len() {
            self.stepper.note_hand_over(param);
        }
        let run = self.stepper.run.get_mut();
        // From the last one back, as if backward had handed them over.
        let written = self.stepper.written.get_mut().iter().enumerate().rev();
        for (index, _) in written.filter(|(_, written)| **written) {
            if !run.schedule.is_handed_over(index) {
                run.schedule.complete(index)?;
            }
        }
        if D::TRAINER_IS_A_STREAM && run.schedule.is_loss_scale_touched() {
            run.note(Access { span: Span::LOSS_SCALE, writes: false });
        }
        run.schedule.finish()?;
        self.open = false;
        self.stepper.rates.step += 1;
        let run = self.stepper.run.get_mut();
        if D::TRAINER_IS_A_STREAM && self.stepper.policy.mode != Mode::Normed {
            return run.touch_all();
        }
        run.submit();
        Ok(())
    }

    /// Gives the pass up: what has not been launched is discarded.
    ///
    /// # Ordering
    /// Returns at once, but for a pass that broadcasts parameters: there it waits for them. Sequential and Normed have
    /// changed no parameter; in Eager the buckets named in the result stay stepped. Dropping a pass does the same.
    /// [`Status::abandoned`](crate::Status) counts both. Schedules do not advance. Ranks go on together only if all of
    /// them abandon after the same bucket; if not, their next collective is a `LeftPass` or a `Mismatch`.
    ///
    /// # Errors
    /// Always `Ok` today.
    pub fn abandon(mut self) -> Result<Abandoned> {
        self.open = false;
        self.stepper.abandon_open_pass()
    }
}

impl<D: Device> Drop for Pass<'_, D> {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        if std::thread::panicking() {
            let rank = self.stepper.comm.rank();
            self.stepper.comm.abort(&Error::PeerLost { rank, why: "it panicked inside a pass".into() });
        }
        // The pass is open, so this cannot be refused.
        let _ = self.stepper.abandon_open_pass();
    }
}
