//! Slices of parameters and gradients, each handed out only after the ops that it conflicts with.
//!
//! Sound because of three facts that are kept elsewhere: views borrow the pass (or the stepper) and launching needs it
//! mutably; a handed-over parameter is refused; and the schedule, whose waits are paid before the slice is made, is
//! proven free of races with these very accesses.
#![allow(unsafe_code)]

use crate::error::{Error, Result};
use crate::layout::{ParamId, Segment};
use crate::op::{Memory, Sealed, Span};
use crate::stepper::Stepper;

/// Read access to parameters.
#[derive(Clone, Copy, Debug)]
pub struct Params<'a> {
    stepper: &'a Stepper,
}

/// Write access to parameters, between passes.
#[derive(Debug)]
pub struct ParamsMut<'a> {
    stepper: &'a mut Stepper,
}

/// Write access to gradients, inside a pass. A gradient holds whatever the last pass left until it is written.
#[derive(Debug)]
pub struct Grads<'a> {
    stepper: &'a Stepper,
}

impl<'a> Params<'a> {
    pub(super) fn new(stepper: &'a Stepper) -> Self {
        Params { stepper }
    }

    /// One parameter.
    ///
    /// # Shapes
    /// As many f32 as registered, aligned to 64 bytes unless [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// Waits for the last step of its bucket; a frozen parameter for no step at all.
    ///
    /// # Errors
    /// `Order` if it was handed over in this micro-batch, `Layout` if `id` is of another layout, `Poisoned` after a failure.
    pub fn get(self, id: ParamId) -> Result<&'a [f32]> {
        self.stepper.view(id, Memory::Params)
    }
}

impl<'a> ParamsMut<'a> {
    pub(super) fn new(stepper: &'a mut Stepper) -> Self {
        ParamsMut { stepper }
    }

    /// One parameter.
    ///
    /// # Shapes
    /// As many f32 as registered, aligned to 64 bytes unless [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// Nothing is left to wait for: [`Stepper::params_mut`] has.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout.
    pub fn get_mut(&mut self, id: ParamId) -> Result<&mut [f32]> {
        self.stepper.view_mut(id, Memory::Params)
    }

    /// Calls `write` with each parameter's name and content, in registration order.
    ///
    /// # Errors
    /// As [`get_mut`](Self::get_mut).
    pub fn fill(&mut self, mut write: impl FnMut(&str, &mut [f32])) -> Result<()> {
        let layout = self.stepper.layout.clone();
        for id in layout.ids() {
            write(&layout.parameter(id)?.name, self.get_mut(id)?);
        }
        Ok(())
    }
}

impl<'a> Grads<'a> {
    pub(super) fn new(stepper: &'a Stepper) -> Self {
        Grads { stepper }
    }

    /// One gradient, to be written whole.
    ///
    /// # Shapes
    /// As many f32 as the parameter, aligned to 64 bytes unless [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// Waits for the last step of its bucket.
    ///
    /// # Errors
    /// As [`Params::get`]; `Order` if the parameter is frozen.
    pub fn get_mut(&mut self, id: ParamId) -> Result<&mut [f32]> {
        let [slice] = self.get_disjoint_mut([id])?;
        Ok(slice)
    }

    /// Several gradients at once, each as [`get_mut`](Self::get_mut) gives it.
    ///
    /// # Errors
    /// As [`get_mut`](Self::get_mut); `Layout` if two ids are the same.
    pub fn get_disjoint_mut<const N: usize>(&mut self, ids: [ParamId; N]) -> Result<[&mut [f32]; N]> {
        for (k, id) in ids.iter().enumerate() {
            if ids[..k].contains(id) {
                return Err(Error::Layout(format!(
                    "the gradient of `{}` twice",
                    self.stepper.layout.parameter(*id)?.name
                )));
            }
        }
        // All claims before the first slice: a refusal must leave no gradient marked as written.
        let mut segments: [Option<Segment>; N] = [const { None }; N];
        for (segment, id) in segments.iter_mut().zip(ids) {
            *segment = Some(self.stepper.claim(id, Memory::Grads, true)?);
        }
        let mut slices: [&mut [f32]; N] = std::array::from_fn(|_| Default::default());
        for (slice, segment) in slices.iter_mut().zip(segments.iter().flatten()) {
            self.stepper.written.borrow_mut()[segment.param as usize] = true;
            // SAFETY: `claim` has waited for the ops on this bucket and checked that the gradient is not handed
            // over; launching it takes the pass mutably, which the borrow behind `self` excludes; the ids differ, and
            // segments of different parameters do not overlap.
            *slice = unsafe {
                std::slice::from_raw_parts_mut(self.stepper.address(segment, Memory::Grads), length(segment))
            };
        }
        Ok(slices)
    }

    /// Whether the gradient has not been written in this pass: the first write replaces, later ones add.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout.
    pub fn is_first(&self, id: ParamId) -> Result<bool> {
        Ok(!self.stepper.written.borrow()[self.stepper.layout.index(id)?])
    }

    /// Replaces the gradient, what earlier micro-batches wrote included: those [`add`](Self::add).
    ///
    /// # Shapes
    /// `values` is as long as the parameter.
    ///
    /// # Ordering
    /// As [`get_mut`](Self::get_mut).
    ///
    /// # Errors
    /// As [`get_mut`](Self::get_mut); `Layout` if the lengths differ.
    pub fn write(&mut self, id: ParamId, values: &[f32]) -> Result<()> {
        self.stepper.check_len(id, values.len())?;
        self.get_mut(id)?.copy_from_slice(values);
        Ok(())
    }

    /// Adds to the gradient, or replaces it if this is the first write of the pass.
    ///
    /// # Shapes
    /// As [`write`](Self::write), and so are `# Ordering` and `# Errors`.
    pub fn add(&mut self, id: ParamId, values: &[f32]) -> Result<()> {
        if self.is_first(id)? {
            return self.write(id, values);
        }
        self.stepper.check_len(id, values.len())?;
        self.get_mut(id)?.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        Ok(())
    }
}

impl Stepper {
    fn address(&self, segment: &Segment, memory: Memory) -> *mut f32 {
        let span = Span::segment(memory, &self.plan, segment);
        self.run.borrow().device.resolve(span).cast()
    }

    pub(super) fn view(&self, id: ParamId, memory: Memory) -> Result<&[f32]> {
        let segment = self.claim(id, memory, false)?;
        // SAFETY: `claim` has waited for the ops on this bucket; launching anything, and every mutable slice of this
        // memory, takes the stepper or the pass mutably, which the shared borrow behind the result excludes.
        // (Gradient slices borrow through `Grads`, parameters and states are never in its memory.)
        Ok(unsafe { std::slice::from_raw_parts(self.address(&segment, memory), length(&segment)) })
    }

    /// Between passes.
    pub(super) fn view_mut(&mut self, id: ParamId, memory: Memory) -> Result<&mut [f32]> {
        let segment = self.claim(id, memory, true)?;
        // SAFETY: no pass is open, `claim` has waited for the ops on this bucket, and `self` is borrowed mutably: neither
        // another slice nor a launch can exist while this one does.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.address(&segment, memory), length(&segment)) })
    }
}

fn length(segment: &Segment) -> usize {
    // The arena that holds it has been allocated, so its length fits.
    segment.len as usize
}
