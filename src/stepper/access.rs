//! What a stepper offers between passes: parameters, gradients, state, counts and rates, to read and to set.
//!
//! Everything here waits for what it conflicts with and refuses an open pass, whose own views reach the rest. Must not
//! touch memory itself: `views.rs` does, after these calls have settled.

use crate::device::Device;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::layout::ParamId;
use crate::op::Memory;
use crate::stepper::views::{Params, ParamsMut};
use crate::stepper::{OptimizerId, Stepper};

/// What the device decided about the last pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Status {
    /// Passes begun so far, this one included.
    pub pass: u64,
    /// Whether it changed nothing because of a non-finite gradient.
    pub skipped: bool,
    /// Norm of all averaged gradients, infinite or NaN if one of them is; `None` if neither mode nor option asked for
    /// it, or the pass was given up, or buckets are clipped one by one. Clipping [by the previous
    /// norm](crate::StepperBuilder::clip_by_previous_norm) asks.
    pub norm: Option<f64>,
    /// Factor that clipping multiplied them by; 1 without clipping, in a skipped pass, and with
    /// [`clip_per_bucket`](crate::StepperBuilder::clip_per_bucket), where each bucket has its own.
    pub clip: f64,
    /// The factor in the loss that was divided out of them.
    pub loss_scale: f64,
    /// The first bucket with an infinite or NaN gradient among those stepped; its parameters are
    /// [`segments_of`](crate::layout::Plan::segments_of) it in the plan. Eager steps it all the same, and so does every
    /// mode that skips nothing.
    pub first_nonfinite_bucket: Option<u32>,
}

impl Stepper {
    /// The parameters, between passes.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// `Order` inside a pass, `Poisoned` after a failure.
    pub fn params(&self) -> Result<Params<'_>> {
        self.settle_between_passes()?;
        Ok(Params::new(self))
    }

    /// The parameters, to initialise or load them. The next pass gives every rank those of rank 0, in a collective:
    /// once a pass has been made, call this on all ranks or on none.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// As [`params`](Self::params).
    pub fn params_mut(&mut self) -> Result<ParamsMut<'_>> {
        self.settle_between_passes()?;
        self.params_written = true;
        Ok(ParamsMut::new(self))
    }

    /// A parameter's gradient as the last pass left it, which is **the sum over ranks, loss scale included**: divided
    /// by nothing and clipped by nothing, since the step folds that into its one multiplier and leaves the gradient as
    /// it was (divide it by [`world_size`](Stepper::world_size), and by what else was set, for the mean). Where the
    /// action is [Average](crate::SegmentAction) it is the mean, of the scaled loss still.
    /// [`StepperBuilder::gradients`](crate::StepperBuilder::gradients) asks for zeros behind the step, or for none.
    ///
    /// # Shapes
    /// As many elements as the parameter, aligned to 64 bytes unless [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// As [`params`](Self::params); `Layout` if `id` is of another layout; `Order` if gradients are
    /// [released](crate::Gradients::Release) and it is stepped; `Unsupported` if it is of another type.
    pub fn grad(&self, id: ParamId) -> Result<&[f32]> {
        self.grad_as(id)
    }

    /// The same, of the type that the stepper's [precision](crate::StepperBuilder::precision) says.
    ///
    /// # Shapes
    /// As [`grad`](Self::grad), and so are `# Ordering` and `# Errors`.
    pub fn grad_as<T: Element>(&self, id: ParamId) -> Result<&[T]> {
        self.settle_between_passes()?;
        self.view(id, Memory::Grads)
    }

    /// A parameter's optimizer state by name, as `torch.optim` calls it ([`state_names_of`](Self::state_names_of) lists
    /// them). Groups with the same kind of optimizer keep the states of the one that keeps most; where one has no use
    /// for it (no momentum, no amsgrad) it stays zero.
    ///
    /// # Shapes
    /// As many elements as the parameter, aligned to 64 bytes unless [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// As [`grad`](Self::grad); `Unsupported` if the optimizer keeps no such state, or it is of another type.
    pub fn state(&self, id: ParamId, name: impl AsRef<str>) -> Result<&[f32]> {
        self.state_as(id, name)
    }

    /// The same, of the type that the stepper's [precision](crate::StepperBuilder::precision) says; what is stored in 8
    /// bits [`read_state`](Self::read_state) copies.
    ///
    /// # Shapes
    /// As [`state`](Self::state), and so are `# Ordering` and `# Errors`.
    pub fn state_as<T: Element>(&self, id: ParamId, name: impl AsRef<str>) -> Result<&[T]> {
        self.settle_between_passes()?;
        self.view(id, self.state_called(id, name.as_ref())?)
    }

    /// A parameter's [copy](crate::StepperBuilder::copy_params), of its own type: to be sent where it lies.
    ///
    /// # Shapes
    /// As many elements as the parameter, aligned to 64 bytes.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// `Unsupported` if none is kept, or it is of another type; `Order` inside a pass, `Layout` if `id` is of another
    /// layout, `Poisoned` after a failure.
    pub fn copy_as<T: Element>(&self, id: ParamId) -> Result<&[T]> {
        self.require_copy()?;
        self.settle_between_passes()?;
        self.view(id, Memory::Copy)
    }

    /// A parameter's optimizer state by name, to load it. States are never broadcast: every rank must load the same (if
    /// only some ask for it, the next collective is a `Mismatch`, if it [compares](Self::set_lr); contents are not
    /// compared), and the step count with it ([`set_step_count`](Self::set_step_count)).
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 2).build()?;
    /// # let w = layout.id("w")?;
    /// # let sgd = Sgd { lr: 1.0, momentum: 0.5, ..Default::default() };
    /// # let mut stepper = Stepper::host(&layout, sgd, Solo::default())?;
    /// stepper.state_mut(w, "momentum_buffer")?.copy_from_slice(&[4.0, 8.0]);
    /// stepper.set_step_count(w, 1)?; // not the first step, which would replace the buffer
    /// let mut pass = stepper.begin()?;
    /// pass.grads().write(w, &[1.0, 1.0])?;
    /// pass.finish()?;
    /// assert_eq!(stepper.params()?.get(w)?, [-3.0, -5.0]);
    /// assert_eq!(stepper.step_count(w)?, 2);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Shapes
    /// As [`state`](Self::state).
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// As [`state`](Self::state).
    pub fn state_mut(&mut self, id: ParamId, name: impl AsRef<str>) -> Result<&mut [f32]> {
        self.state_mut_as(id, name)
    }

    /// The same, of the type that the stepper's [precision](crate::StepperBuilder::precision) says; what is stored in 8
    /// bits [`write_state`](Self::write_state) takes.
    ///
    /// # Shapes
    /// As [`state`](Self::state), and so are `# Ordering` and `# Errors`.
    pub fn state_mut_as<T: Element>(&mut self, id: ParamId, name: impl AsRef<str>) -> Result<&mut [T]> {
        self.settle_between_passes()?;
        self.note_written(id)?;
        self.view_mut(id, self.state_called(id, name.as_ref())?)
    }
}

impl<D: Device> Stepper<D> {
    /// How many updates a parameter has had.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// As [`grad`](Self::grad).
    pub fn step_count(&self, id: ParamId) -> Result<u64> {
        self.settle_control()?;
        self.read_step_count(self.layout.index(id)?, 0)
    }

    /// How many updates one of a parameter's [optimizers](Self::optimizers_of) has made: as many as the first one,
    /// unless it was [added later](Self::add_optimizer_for).
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// As [`step_count`](Self::step_count); `Config` if that optimizer does not step the parameter.
    pub fn step_count_of(&self, id: ParamId, optimizer: OptimizerId) -> Result<u64> {
        let (param, round) = self.round_of(id, optimizer)?;
        self.settle_control()?;
        self.read_step_count(param, round)
    }

    /// Says how many updates a parameter has had, by each of its optimizers: its next one is number `count + 1`, in
    /// bias correction too. A first update sets a momentum buffer instead of averaging into it. Ranks must set the
    /// same: if they differ, the next collective is a `Mismatch`, if it [compares](Self::set_lr).
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// As [`grad`](Self::grad); `Config` for a count of 2^63 or more, or one that is not 0 where an optimizer
    /// [carries](Self::carried_of) a number beside it.
    pub fn set_step_count(&mut self, id: ParamId, count: u64) -> Result<()> {
        let param = self.layout.index(id)?;
        // One record at least, which what has no optimizer keeps for the day on which it gets one.
        self.set_counts(param, 0..self.optimizers.rounds(param).max(1), count, None)
    }

    /// Says how many updates one of a parameter's optimizers has made, as [`set_step_count`](Self::set_step_count) does
    /// for all of them.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// As [`step_count_of`](Self::step_count_of); `Config` as for [`set_step_count`](Self::set_step_count).
    pub fn set_step_count_of(&mut self, id: ParamId, optimizer: OptimizerId, count: u64) -> Result<()> {
        let (param, round) = self.round_of(id, optimizer)?;
        self.set_counts(param, round..round + 1, count, None)
    }

    /// States of a parameter are written: on all ranks, or ranks are to notice.
    pub(super) fn note_written(&mut self, id: ParamId) -> Result<()> {
        self.loaded.note(self.layout.index(id)?, u64::MAX);
        self.agreement.forget();
        Ok(())
    }

    pub(super) fn round_of(&self, id: ParamId, optimizer: OptimizerId) -> Result<(usize, usize)> {
        let param = self.layout.index(id)?;
        let refused = || Error::config("optimizer", optimizer.0, "does not step this parameter");
        Ok((param, self.optimizers.round(param, optimizer).ok_or_else(refused)?))
    }

    /// Sets the learning rate of a group ([`DEFAULT_GROUP`](crate::layout::DEFAULT_GROUP) if the layout names none)
    /// from the next pass on. Ranks must set the same: if they differ, the next pass's first collective is a
    /// `Mismatch`, if the [collective](crate::Collective) compares every call, as in-process ranks do and
    /// [`Nccl`](crate::cuda::Nccl) with its ledger; where none does, parameters drift apart.
    ///
    /// # Ordering
    /// Waits for the last pass to have begun on the optim stream, not for its steps; behind an abandoned pass, for all
    /// that it left in flight.
    ///
    /// # Errors
    /// `Config` if there is no such group, it [follows a schedule](crate::StepperBuilder::lr_schedule), or the
    /// optimizer refuses the rate, which changes nothing; `Order` inside a pass, `Poisoned` after a failure.
    pub fn set_lr(&mut self, group: &str, lr: f64) -> Result<()> {
        self.refuse_open_pass()?;
        self.rates.refuse_scheduled(group)?;
        self.run.get_mut().touch_settings()?;
        let (index, hyper) = self.optimizers.set_lr(group, lr)?;
        self.agreement.forget();
        self.write_group(index, hyper);
        Ok(())
    }

    /// Sets the learning rate of one of the [`optimizers`](Self::optimizers), as [`set_lr`](Self::set_lr) does a
    /// group's.
    ///
    /// # Ordering
    /// As [`set_lr`](Self::set_lr).
    ///
    /// # Errors
    /// As [`set_lr`](Self::set_lr).
    pub fn set_lr_of(&mut self, id: OptimizerId, lr: f64) -> Result<()> {
        self.refuse_open_pass()?;
        self.run.get_mut().touch_settings()?;
        let (index, hyper) = self.optimizers.set_lr_of(id, lr)?;
        self.agreement.forget();
        self.write_group(index, hyper);
        Ok(())
    }

    /// Freezes a parameter from the next pass on, or unfreezes it. Frozen, it can be read at any moment of a pass and
    /// takes no gradient; value, state and step count stay, and no bucket waits for it. A bucket of frozen parameters
    /// alone is neither reduced nor stepped; in any other it still takes its share of the all-reduce, as zeros. Ranks
    /// must freeze the same: if they differ, the next collective is a `Mismatch`, if it [compares](Self::set_lr); a
    /// rank that has none left, because it froze everything, is a `Deadline` or `PeerLost` to the others.
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
    /// Waits for the last pass to have begun on the optim stream; to freeze, for the last step of the parameter's
    /// bucket.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout, `Order` inside a pass, `Poisoned` after a failure.
    pub fn set_frozen(&mut self, id: ParamId, frozen: bool) -> Result<()> {
        let param = self.layout.index(id)?;
        self.refuse_open_pass()?;
        self.run.get_mut().touch_frozen(param, frozen)?;
        self.agreement.forget();
        self.write_frozen(param, frozen);
        Ok(())
    }

    /// Whether a parameter is frozen.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout.
    pub fn is_frozen(&self, id: ParamId) -> Result<bool> {
        let param = self.layout.index(id)?;
        Ok(self.run.borrow().schedule.is_frozen(param))
    }

    /// The states that a parameter's own optimizers keep; any other one stays zero.
    pub(crate) fn states_kept_for(&self, id: ParamId) -> Result<Vec<String>> {
        Ok(self.optimizers.kept(self.layout.index(id)?).collect())
    }

    /// What was decided about the last pass.
    ///
    /// # Ordering
    /// Waits for all steps; asked after every pass, it takes from Normed the overlap with the next forward.
    ///
    /// # Errors
    /// As [`params`](Self::params).
    pub fn status(&self) -> Result<Status> {
        self.settle_control()?;
        self.read_status()
    }

    /// The newest pass that is known to have ended, without waiting for anything: it is as many passes behind as the
    /// device is behind the trainer. `None` before the first one has ended; an abandoned pass is never among them. May
    /// be asked at any time, inside a pass too.
    pub fn latest_status(&self) -> Option<Status> {
        self.run.borrow().device.latest().as_ref().map(Status::new)
    }

    pub(super) fn state_called(&self, id: ParamId, name: &str) -> Result<Memory> {
        let param = self.layout.index(id)?;
        let found = self.optimizers.states(param).find(|(known, _, _)| known == name);
        let Some((_, round, k)) = found else {
            let names: Vec<_> = self.optimizers.states(param).map(|(name, _, _)| name).collect();
            let have = if names.is_empty() { "none".into() } else { names.join(", ") };
            let what = format!("the state `{name}` of `{}`", self.layout.parameters()[param].name);
            return Err(Error::Unsupported { what, have });
        };
        Ok(Memory::State((self.assignment.first_state(round) + k) as u8))
    }

    pub(super) fn settle_between_passes(&self) -> Result<()> {
        self.refuse_open_pass()?;
        self.run.borrow_mut().touch_all()
    }

    pub(super) fn settle_control(&self) -> Result<()> {
        self.refuse_open_pass()?;
        self.run.borrow_mut().touch_control()
    }

    pub(super) fn refuse_open_pass(&self) -> Result<()> {
        if self.run.borrow().schedule.is_open() {
            return Err(Error::Order("a pass is open; its own views reach parameters and gradients".into()));
        }
        Ok(())
    }
}
