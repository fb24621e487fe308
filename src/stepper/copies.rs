//! Tensors copied to the host and back: the same calls on every device.
//!
//! For initialising, saving, checking and small trainers; a trainer on the host reads slices instead (`views.rs`), one
//! on a GPU addresses (`gpu.rs`). This file must refuse a wrong length before anything is touched.

use crate::device::Device;
use crate::error::Result;
use crate::layout::ParamId;
use crate::op::Memory;
use crate::stepper::pass::Pass;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Copies a parameter, or its [master weight](crate::Master), to the host, between passes. Values are f32 for every
    /// [precision](crate::Precision). Values that were read can be written back: bit for bit into the same precision,
    /// rounded into another one.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 2).build()?;
    /// # let w = layout.id("w")?;
    /// let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Solo::default())?;
    /// stepper.write_param(w, &[3.0, 4.0])?;
    /// let mut pass = stepper.begin()?;
    /// pass.write_grad(w, &[1.0, 1.0])?;
    /// pass.finish()?;
    /// let mut weights = [0.0; 2];
    /// stepper.read_param(w, &mut weights)?;
    /// assert_eq!(weights, [2.0, 3.0]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Shapes
    /// `into` is as long as the parameter.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout or the length differs, `Order` inside a pass, `Poisoned` after a failure.
    pub fn read_param(&self, id: ParamId, into: &mut [f32]) -> Result<()> {
        self.read_between(id, Memory::Params, into)
    }

    /// Copies a parameter from the host, and its master weight with it. The next pass gives every rank *all* of rank
    /// 0's, as after [`params_mut`](Stepper::params_mut): a collective over every parameter, however few were written.
    ///
    /// # Shapes
    /// Shape, ordering and errors as for [`read_param`](Self::read_param).
    pub fn write_param(&mut self, id: ParamId, from: &[f32]) -> Result<()> {
        self.write_between(id, Memory::Params, from)?;
        self.params_written = true;
        Ok(())
    }

    /// Copies a gradient to the host, as the last pass left it: the sum over ranks, see [`grad`](Stepper::grad).
    ///
    /// # Shapes
    /// Shape and ordering as for [`read_param`](Self::read_param).
    ///
    /// # Errors
    /// Errors as for [`read_param`](Self::read_param); `Order` if gradients are [released](crate::Gradients::Release)
    /// and it is stepped.
    pub fn read_grad(&self, id: ParamId, into: &mut [f32]) -> Result<()> {
        self.read_between(id, Memory::Grads, into)
    }

    /// Copies a parameter's optimizer state to the host, by its name in `torch.optim`.
    ///
    /// # Shapes
    /// Shape and ordering as for [`read_param`](Self::read_param).
    ///
    /// # Errors
    /// Errors as for [`read_param`](Self::read_param); `Unsupported` if the optimizer keeps no such state.
    pub fn read_state(&self, id: ParamId, name: impl AsRef<str>, into: &mut [f32]) -> Result<()> {
        self.read_between(id, self.state_called(id, name.as_ref())?, into)
    }

    /// Copies a parameter's optimizer state from the host; see [`state_mut`](Stepper::state_mut) for what belongs to
    /// it.
    ///
    /// # Shapes
    /// Shape and ordering as for [`read_param`](Self::read_param).
    ///
    /// # Errors
    /// Errors as for [`read_state`](Self::read_state).
    pub fn write_state(&mut self, id: ParamId, name: impl AsRef<str>, from: &[f32]) -> Result<()> {
        self.write_between(id, self.state_called(id, name.as_ref())?, from)?;
        self.note_written(id)
    }

    /// Copies a parameter's [moving average](crate::StepperBuilder::ema) to the host. Zeros before the parameter's
    /// first update, so those of a frozen one always: [`read_param`](Self::read_param) has its values.
    ///
    /// # Shapes
    /// Shape and ordering as for [`read_param`](Self::read_param).
    ///
    /// # Errors
    /// Errors as for [`read_param`](Self::read_param); `Unsupported` if none is kept.
    pub fn read_ema(&self, id: ParamId, into: &mut [f32]) -> Result<()> {
        self.require(self.keeps_ema(), "moving averages", "StepperBuilder::ema")?;
        self.read_between(id, Memory::Ema, into)
    }

    /// Copies a parameter's moving average from the host, to go on from. It counts once the parameter has been updated:
    /// load the [step count](Self::set_step_count) too.
    ///
    /// # Shapes
    /// Shape and ordering as for [`read_param`](Self::read_param).
    ///
    /// # Errors
    /// Errors as for [`read_ema`](Self::read_ema).
    pub fn write_ema(&mut self, id: ParamId, from: &[f32]) -> Result<()> {
        self.require(self.keeps_ema(), "moving averages", "StepperBuilder::ema")?;
        self.write_between(id, Memory::Ema, from)?;
        self.note_written(id)
    }

    /// Copies a parameter's [copy](crate::StepperBuilder::copy_params) to the host, as f32. Zeros before the
    /// parameter's first update, so those of a frozen one always: [`read_param`](Self::read_param) has its values.
    ///
    /// # Shapes
    /// Shape and ordering as for [`read_param`](Self::read_param).
    ///
    /// # Errors
    /// Errors as for [`read_param`](Self::read_param); `Unsupported` if none is kept.
    pub fn read_copy(&self, id: ParamId, into: &mut [f32]) -> Result<()> {
        self.require_copy()?;
        self.read_between(id, Memory::Copy, into)
    }

    pub(crate) fn keeps_ema(&self) -> bool {
        self.plan.storage().ema
    }

    fn read_between(&self, id: ParamId, memory: Memory, into: &mut [f32]) -> Result<()> {
        self.check_len(id, into.len())?;
        self.settle_between_passes()?;
        self.read_values(id, memory, into)
    }

    fn write_between(&mut self, id: ParamId, memory: Memory, from: &[f32]) -> Result<()> {
        self.check_len(id, from.len())?;
        self.settle_between_passes()?;
        self.write_values(id, memory, from)
    }
}

impl<D: Device> Pass<'_, D> {
    /// Copies a parameter to the host: what its [master weight](crate::Master) stands for, if it has one.
    ///
    /// # Shapes
    /// `into` is as long as the parameter.
    ///
    /// # Ordering
    /// Waits for the last step of its bucket.
    ///
    /// # Errors
    /// `Order` if it was handed over in this micro-batch, `Layout` if `id` is of another layout or the length differs,
    /// `Poisoned` after a failure.
    pub fn read_param(&self, id: ParamId, into: &mut [f32]) -> Result<()> {
        self.stepper.check_len(id, into.len())?;
        self.stepper.read_values(id, Memory::Params, into)
    }

    /// Copies a gradient from the host, replacing what was there.
    ///
    /// # Shapes
    /// Shape and ordering as for [`read_param`](Self::read_param).
    ///
    /// # Errors
    /// Errors as for [`read_param`](Self::read_param); `Order` if the parameter is frozen.
    pub fn write_grad(&mut self, id: ParamId, from: &[f32]) -> Result<()> {
        self.stepper.check_len(id, from.len())?;
        self.stepper.write_values(id, Memory::Grads, from)?;
        let index = self.stepper.layout.index(id)?;
        self.stepper.written.get_mut()[index] = true;
        Ok(())
    }
}
