//! Tensors copied to the host and back: the same calls on every device.
//!
//! For initialising, saving, checking and small trainers; a trainer on the host reads slices instead (`views.rs`), one on a
//! GPU addresses (`gpu.rs`). Must refuse a wrong length before anything is touched.
#![allow(unsafe_code)]

use crate::error::{Error, Result};
use crate::layout::ParamId;
use crate::op::{Device, Memory, Span};
use crate::stepper::{Pass, Stepper};

impl<D: Device> Stepper<D> {
    /// Copies a parameter to the host, between passes.
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

    /// Copies a parameter from the host. The next pass gives every rank *all* of rank 0's, as after
    /// [`params_mut`](Stepper::params_mut): a collective over every parameter, however few were written.
    ///
    /// # Shapes
    /// As [`read_param`](Self::read_param), and so are `# Ordering` and `# Errors`.
    pub fn write_param(&mut self, id: ParamId, from: &[f32]) -> Result<()> {
        self.write_between(id, Memory::Params, from)?;
        self.params_written = true;
        Ok(())
    }

    /// Copies a gradient to the host, as the last pass left it: the sum over ranks, see [`grad`](Stepper::grad).
    ///
    /// # Shapes
    /// As [`read_param`](Self::read_param), and so is `# Ordering`.
    ///
    /// # Errors
    /// As [`read_param`](Self::read_param); `Order` if gradients are [released](crate::Gradients::Release) and it is
    /// stepped.
    pub fn read_grad(&self, id: ParamId, into: &mut [f32]) -> Result<()> {
        self.read_between(id, Memory::Grads, into)
    }

    /// Copies a parameter's optimizer state to the host, by its name in `torch.optim`.
    ///
    /// # Shapes
    /// As [`read_param`](Self::read_param), and so is `# Ordering`.
    ///
    /// # Errors
    /// As [`read_param`](Self::read_param); `Unsupported` if the optimizer keeps no such state.
    pub fn read_state(&self, id: ParamId, name: impl AsRef<str>, into: &mut [f32]) -> Result<()> {
        self.read_between(id, self.state_called(id, name.as_ref())?, into)
    }

    /// Copies a parameter's optimizer state from the host; see [`state_mut`](Stepper::state_mut) for what belongs to it.
    ///
    /// # Shapes
    /// As [`read_param`](Self::read_param), and so is `# Ordering`.
    ///
    /// # Errors
    /// As [`read_state`](Self::read_state).
    pub fn write_state(&mut self, id: ParamId, name: impl AsRef<str>, from: &[f32]) -> Result<()> {
        self.write_between(id, self.state_called(id, name.as_ref())?, from)?;
        self.note_written(id)
    }

    fn read_between(&self, id: ParamId, memory: Memory, into: &mut [f32]) -> Result<()> {
        self.check_len(id, into.len())?;
        self.settle_between_passes()?;
        self.copy_out(id, memory, into)
    }

    fn write_between(&mut self, id: ParamId, memory: Memory, from: &[f32]) -> Result<()> {
        self.check_len(id, from.len())?;
        self.settle_between_passes()?;
        self.copy_in(id, memory, from)
    }

    fn copy_out(&self, id: ParamId, memory: Memory, into: &mut [f32]) -> Result<()> {
        let segment = self.claim(id, memory, false)?;
        let span = Span::segment(memory, &self.plan, &segment);
        if span.bytes() == 0 {
            return Ok(());
        }
        // SAFETY: a slice of f32 is as many bytes, each of which may take any value; `claim` has told the schedule and
        // has been waited for.
        unsafe {
            let bytes = std::slice::from_raw_parts_mut(into.as_mut_ptr().cast(), size_of_val(into));
            self.run.borrow_mut().device.read(span, bytes)
        }
    }

    fn copy_in(&self, id: ParamId, memory: Memory, from: &[f32]) -> Result<()> {
        let segment = self.claim(id, memory, true)?;
        let span = Span::segment(memory, &self.plan, &segment);
        if span.bytes() == 0 {
            return Ok(());
        }
        // SAFETY: as in `copy_out`; no view of this memory is alive, since those borrow the stepper or the pass that the
        // caller holds mutably.
        unsafe {
            let bytes = std::slice::from_raw_parts(from.as_ptr().cast(), size_of_val(from));
            self.run.borrow_mut().device.write(span, bytes)
        }
    }

    pub(super) fn check_len(&self, id: ParamId, given: usize) -> Result<()> {
        let parameter = self.layout.parameter(id)?;
        if parameter.len == given as u64 {
            return Ok(());
        }
        Err(Error::Layout(format!("`{}` has {} elements, not {given}", parameter.name, parameter.len)))
    }
}

impl<D: Device> Pass<'_, D> {
    /// Copies a parameter to the host.
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
        self.stepper.copy_out(id, Memory::Params, into)
    }

    /// Copies a gradient from the host, replacing what was there.
    ///
    /// # Shapes
    /// As [`read_param`](Self::read_param), and so is `# Ordering`.
    ///
    /// # Errors
    /// As [`read_param`](Self::read_param); `Order` if the parameter is frozen.
    pub fn write_grad(&mut self, id: ParamId, from: &[f32]) -> Result<()> {
        self.stepper.check_len(id, from.len())?;
        self.stepper.copy_in(id, Memory::Grads, from)?;
        let index = self.stepper.layout.index(id)?;
        self.stepper.written.get_mut()[index] = true;
        Ok(())
    }
}
