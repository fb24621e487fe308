//! Access between passes: parameters, gradients, state, counts and status, to read and to set.
//!
//! Each call waits for the ops that it conflicts with, and refuses an open pass, whose own views reach the rest.
//! `views.rs` touches the memory, after these calls have settled.

use crate::device::Device;
use crate::dtype::Element;
use crate::error::Result;
use crate::layout::ParamId;
use crate::op::Memory;
use crate::stepper::state::attached::OptimizerId;
use crate::stepper::state::status::Status;
use crate::stepper::stepper::Stepper;
use crate::stepper::views::{Params, ParamsMut};

impl Stepper {
    /// Returns the parameters, between passes.
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

    /// Returns the parameters, to initialise or load them. The next pass gives every rank those of rank 0, in a
    /// collective: once a pass has been made, call this on all ranks or on none.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// Errors as for [`params`](Self::params).
    pub fn params_mut(&mut self) -> Result<ParamsMut<'_>> {
        self.settle_between_passes()?;
        self.params_written = true;
        Ok(ParamsMut::new(self))
    }

    /// Returns a parameter's gradient as the last pass left it: **the sum over ranks, loss scale included**. It is
    /// neither divided nor clipped, since the step folds both into one factor. For the mean, divide it by
    /// [`world_size`](Stepper::world_size) and the loss scale. With the action [Average](crate::SegmentAction) it is
    /// the mean, of the scaled loss. [`StepperBuilder::gradients`](crate::StepperBuilder::gradients) asks for zeros
    /// after the step, or for no gradient.
    ///
    /// # Shapes
    /// As many elements as the parameter, aligned to 64 bytes unless [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// Errors as for [`params`](Self::params); `Layout` if `id` is of another layout; `Order` if gradients are
    /// [released](crate::Gradients::Release) and it is stepped; `Unsupported` if it is of another type.
    pub fn grad(&self, id: ParamId) -> Result<&[f32]> {
        self.grad_as(id)
    }

    /// Returns the same, of the type that the stepper's [precision](crate::StepperBuilder::precision) says.
    ///
    /// # Shapes
    /// Shape, ordering and errors as for [`grad`](Self::grad).
    pub fn grad_as<T: Element>(&self, id: ParamId) -> Result<&[T]> {
        self.settle_between_passes()?;
        self.view(id, Memory::Grads)
    }

    /// Returns a parameter's optimizer state by name, as `torch.optim` calls it
    /// ([`state_names_of`](Self::state_names_of) lists them). Groups with the same kind of optimizer keep the states of
    /// the one that keeps most; where one has no use for it (no momentum, no amsgrad) it stays zero.
    ///
    /// # Shapes
    /// As many elements as the parameter, aligned to 64 bytes unless [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// Errors as for [`grad`](Self::grad); `Unsupported` if the optimizer keeps no such state, or it is of another
    /// type.
    pub fn state(&self, id: ParamId, name: impl AsRef<str>) -> Result<&[f32]> {
        self.state_as(id, name)
    }

    /// Returns the same, of the type that the stepper's [precision](crate::StepperBuilder::precision) says; what is
    /// stored in 8 bits [`read_state`](Self::read_state) copies.
    ///
    /// # Shapes
    /// Shape, ordering and errors as for [`state`](Self::state).
    pub fn state_as<T: Element>(&self, id: ParamId, name: impl AsRef<str>) -> Result<&[T]> {
        self.settle_between_passes()?;
        self.view(id, self.state_called(id, name.as_ref())?)
    }

    /// Returns a parameter's [copy](crate::StepperBuilder::copy_params), of its own type: to be sent where it lies.
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

    /// Returns a parameter's optimizer state by name, to load it. States are never broadcast: every rank must load the
    /// same (if only some ask for it, the next collective is a `Mismatch`, if it [compares](Self::set_lr); contents are
    /// not compared), and the step count with it ([`set_step_count`](Self::set_step_count)).
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
    /// Shape as for [`state`](Self::state).
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// Errors as for [`state`](Self::state).
    pub fn state_mut(&mut self, id: ParamId, name: impl AsRef<str>) -> Result<&mut [f32]> {
        self.state_mut_as(id, name)
    }

    /// Returns the same, of the type that the stepper's [precision](crate::StepperBuilder::precision) says; what is
    /// stored in 8 bits [`write_state`](Self::write_state) takes.
    ///
    /// # Shapes
    /// Shape, ordering and errors as for [`state`](Self::state).
    pub fn state_mut_as<T: Element>(&mut self, id: ParamId, name: impl AsRef<str>) -> Result<&mut [T]> {
        self.settle_between_passes()?;
        self.note_written(id)?;
        self.view_mut(id, self.state_called(id, name.as_ref())?)
    }
}

impl<D: Device> Stepper<D> {
    /// Returns how many updates a parameter has had.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// `Order` inside a pass, `Layout` if `id` is of another layout, `Poisoned` after a failure.
    pub fn step_count(&self, id: ParamId) -> Result<u64> {
        self.settle_control()?;
        Ok(self.read_progress(self.layout.index(id)?, 0)?.count)
    }

    /// Returns how many updates one of a parameter's [optimizers](Self::optimizers_of) has made: as many as the first
    /// one, unless it was [added later](Self::add_optimizer_for).
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// Errors as for [`step_count`](Self::step_count); `Config` if that optimizer does not step the parameter.
    pub fn step_count_of(&self, id: ParamId, optimizer: OptimizerId) -> Result<u64> {
        let (param, round) = self.round_of(id, optimizer)?;
        self.settle_control()?;
        Ok(self.read_progress(param, round)?.count)
    }

    /// Says how many updates a parameter has had, by each of its optimizers: its next one is number `count + 1`, in
    /// bias correction too. A first update sets a momentum buffer instead of averaging into it. Ranks must set the
    /// same: if they differ, the next collective is a `Mismatch`, if it [compares](Self::set_lr).
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// Errors as for [`step_count`](Self::step_count); `Config` for a count of 2^63 or more, or one that is not 0 where
    /// an optimizer [carries](Self::carried_of) a number beside it.
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
    /// Errors as for [`step_count_of`](Self::step_count_of); `Config` as for [`set_step_count`](Self::set_step_count).
    pub fn set_step_count_of(&mut self, id: ParamId, optimizer: OptimizerId, count: u64) -> Result<()> {
        let (param, round) = self.round_of(id, optimizer)?;
        self.set_counts(param, round..round + 1, count, None)
    }

    /// The states that a parameter's own optimizers keep; any other one stays zero.
    pub(crate) fn states_kept_for(&self, id: ParamId) -> Result<Vec<String>> {
        Ok(self.optimizers.kept(self.layout.index(id)?).collect())
    }

    /// Returns the device's decisions about the last pass.
    ///
    /// # Ordering
    /// Waits for all steps; asked after every pass, it takes from Normed the overlap with the next forward.
    ///
    /// # Errors
    /// Errors as for [`params`](Self::params).
    pub fn status(&self) -> Result<Status> {
        self.settle_control()?;
        self.read_status()
    }

    /// Returns the status of the newest pass that is known to have ended, without waiting. It is as many passes old as
    /// the device is late. `None` before the first pass has ended. Abandoned passes are left out, and
    /// [counted](Status::abandoned).
    pub fn latest_status(&self) -> Option<Status> {
        self.run.borrow().device.latest().map(|published| Status::new(&published, self.abandoned))
    }
}
