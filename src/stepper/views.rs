//! Slices of parameters and gradients, each handed out only after the ops that it conflicts with.
//!
//! Sound because of three facts that are kept elsewhere: views borrow the pass (or the stepper) and launching needs it
//! mutably; a handed-over parameter is refused; and the schedule, whose waits are paid before the slice is made, is
//! proven free of races with these very accesses.
#![allow(unsafe_code)]

use crate::device::Executor;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::layout::{Master, Moments, ParamId, Segment};
use crate::op::{Memory, Span};
use crate::stepper::stepper::Stepper;

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

/// Write access to gradients, inside a pass. Until it is written, a gradient holds the last pass's values.
#[derive(Debug)]
pub struct Grads<'a> {
    stepper: &'a Stepper,
}

impl<'a> Params<'a> {
    pub(super) fn new(stepper: &'a Stepper) -> Self {
        Params { stepper }
    }

    /// Returns one parameter.
    ///
    /// # Shapes
    /// As many elements as registered, aligned to 64 bytes unless [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// Waits for the last step of its bucket; a frozen parameter for no step at all.
    ///
    /// # Errors
    /// `Order` if it was handed over in this micro-batch, `Layout` if `id` is of another layout, `Unsupported` if it is
    /// of another type, `Poisoned` after a failure.
    pub fn get(self, id: ParamId) -> Result<&'a [f32]> {
        self.get_as(id)
    }

    /// Returns one parameter, of the type that the stepper's [precision](crate::StepperBuilder::precision) says.
    ///
    /// # Shapes
    /// Shape and ordering as for [`get`](Self::get).
    ///
    /// # Errors
    /// Errors as for [`get`](Self::get); `Unsupported` if it is of another type.
    pub fn get_as<T: Element>(self, id: ParamId) -> Result<&'a [T]> {
        self.stepper.view(id, Memory::Params)
    }
}

impl<'a> ParamsMut<'a> {
    pub(super) fn new(stepper: &'a mut Stepper) -> Self {
        ParamsMut { stepper }
    }

    /// Returns one parameter.
    ///
    /// # Shapes
    /// As many elements as registered, aligned to 64 bytes unless [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// Does not wait, because [`Stepper::params_mut`] has waited for all steps.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout; `Unsupported` if it is of another type, or has a
    /// [master weight](crate::Master). [`write_param`](crate::Stepper::write_param) sets a parameter and its master.
    pub fn get_mut(&mut self, id: ParamId) -> Result<&mut [f32]> {
        self.get_mut_as(id)
    }

    /// Returns one parameter, of the type that the stepper's [precision](crate::StepperBuilder::precision) says.
    ///
    /// # Shapes
    /// Shape, ordering and errors as for [`get_mut`](Self::get_mut).
    pub fn get_mut_as<T: Element>(&mut self, id: ParamId) -> Result<&mut [T]> {
        self.stepper.view_mut(id, Memory::Params)
    }

    /// Calls `write` with each parameter's name and content, in registration order, as f32 for every precision.
    ///
    /// # Errors
    /// `Poisoned` after a failure.
    pub fn fill(&mut self, mut write: impl FnMut(&str, &mut [f32])) -> Result<()> {
        let layout = self.stepper.layout.clone();
        let mut values = Vec::new();
        for id in layout.ids() {
            let parameter = layout.parameter(id)?;
            values.resize(parameter.len as usize, 0.0);
            self.stepper.read_values(id, Memory::Params, &mut values)?;
            write(&parameter.name, &mut values);
            self.stepper.write_values(id, Memory::Params, &values)?;
        }
        Ok(())
    }
}

impl<'a> Grads<'a> {
    pub(super) fn new(stepper: &'a Stepper) -> Self {
        Grads { stepper }
    }

    /// Returns one gradient, to be written whole.
    ///
    /// # Shapes
    /// As many elements as the parameter, aligned to 64 bytes unless [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// Waits for the last step of its bucket.
    ///
    /// # Errors
    /// Errors as for [`Params::get`]; `Order` if the parameter is frozen.
    pub fn get_mut(&mut self, id: ParamId) -> Result<&mut [f32]> {
        self.get_mut_as(id)
    }

    /// Returns one gradient, of the type that the stepper's [precision](crate::StepperBuilder::precision) says.
    ///
    /// # Shapes
    /// Shape, ordering and errors as for [`get_mut`](Self::get_mut).
    pub fn get_mut_as<T: Element>(&mut self, id: ParamId) -> Result<&mut [T]> {
        let [slice] = self.get_disjoint_mut_as([id])?;
        Ok(slice)
    }

    /// Returns several gradients at once, each as [`get_mut`](Self::get_mut) gives it.
    ///
    /// # Errors
    /// Errors as for [`get_mut`](Self::get_mut); `Layout` if two ids are the same.
    pub fn get_disjoint_mut<const N: usize>(&mut self, ids: [ParamId; N]) -> Result<[&mut [f32]; N]> {
        self.get_disjoint_mut_as(ids)
    }

    /// Returns several gradients at once, each as [`get_mut_as`](Self::get_mut_as) gives it.
    ///
    /// # Errors
    /// Errors as for [`get_disjoint_mut`](Self::get_disjoint_mut).
    pub fn get_disjoint_mut_as<T: Element, const N: usize>(
        &mut self,
        ids: [ParamId; N],
    ) -> Result<[&mut [T]; N]> {
        self.stepper.require_type::<T>(Memory::Grads)?;
        for (k, id) in ids.iter().enumerate() {
            if ids[..k].contains(id) {
                let thing = format_args!("gradient of `{}`", self.stepper.layout.parameter(*id)?.name);
                return Err(Error::layout(thing, "asked for twice", "name each parameter once"));
            }
        }
        // All claims before the first slice: a refusal must leave no gradient marked as written.
        let mut segments: [Option<Segment>; N] = [const { None }; N];
        for (segment, id) in segments.iter_mut().zip(ids) {
            *segment = Some(self.stepper.claim(id, Memory::Grads, true)?);
        }
        let mut slices: [&mut [T]; N] = std::array::from_fn(|_| Default::default());
        for (slice, segment) in slices.iter_mut().zip(segments.iter().flatten()) {
            self.stepper.written.borrow_mut()[segment.param as usize] = true;
            // SAFETY: `claim` has waited for the ops on this bucket and checked that the gradient is not handed over;
            // launching it takes the pass mutably, which the borrow in `self` excludes; the ids differ, and segments of
            // different parameters do not overlap; `require_type` has checked that the memory is of this type.
            *slice = unsafe {
                std::slice::from_raw_parts_mut(
                    self.stepper.address(segment, Memory::Grads).cast(),
                    length(segment),
                )
            };
        }
        Ok(slices)
    }

    /// Returns whether the gradient has not been written in this pass: the first write replaces, later ones add.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout.
    pub fn is_first(&self, id: ParamId) -> Result<bool> {
        Ok(!self.stepper.written.borrow()[self.stepper.layout.index(id)?])
    }

    /// Replaces the gradient, what earlier micro-batches wrote included: those [`add`](Self::add).
    ///
    /// # Shapes
    /// `values` is as long as the parameter; a gradient of 16 bits is rounded to the nearest.
    ///
    /// # Ordering
    /// Ordering as for [`get_mut`](Self::get_mut).
    ///
    /// # Errors
    /// Errors as for [`get_mut`](Self::get_mut); `Layout` if the lengths differ.
    pub fn write(&mut self, id: ParamId, values: &[f32]) -> Result<()> {
        self.store(id, values, |_, value| value)
    }

    /// Adds to the gradient, or replaces it if this is the first write of the pass.
    ///
    /// # Shapes
    /// Shape, ordering and errors as for [`write`](Self::write).
    pub fn add(&mut self, id: ParamId, values: &[f32]) -> Result<()> {
        if self.is_first(id)? {
            return self.write(id, values);
        }
        self.store(id, values, |sum, value| sum + value)
    }

    fn store(&mut self, id: ParamId, values: &[f32], combine: impl Fn(f32, f32) -> f32) -> Result<()> {
        match self.stepper.plan.storage().precision.grad {
            DType::F32 => self.store_as::<f32>(id, values, combine),
            DType::BF16 => self.store_as::<half::bf16>(id, values, combine),
            DType::F16 => self.store_as::<half::f16>(id, values, combine),
        }
    }

    fn store_as<T: Element>(
        &mut self,
        id: ParamId,
        values: &[f32],
        combine: impl Fn(f32, f32) -> f32,
    ) -> Result<()> {
        self.stepper.check_len(id, values.len())?;
        let stored = self.get_mut_as::<T>(id)?.iter_mut();
        stored.zip(values).for_each(|(old, value)| *old = T::from_f32(combine(old.to_f32(), *value)));
        Ok(())
    }
}

impl Stepper {
    fn address(&self, segment: &Segment, memory: Memory) -> *mut u8 {
        let span = Span::segment(memory, &self.plan, segment);
        self.run.borrow().device.resolve(span)
    }

    /// Refuses slices of a type that the memory does not hold.
    fn require_type<T: Element>(&self, memory: Memory) -> Result<()> {
        let precision = self.plan.storage().precision;
        let dtype = match memory {
            Memory::Params => Some(precision.param),
            Memory::Grads => Some(precision.grad),
            Memory::State(_) => match precision.moments {
                Moments::F32 => Some(DType::F32),
                Moments::BF16 => Some(DType::BF16),
                Moments::EightBit => None,
            },
            Memory::Copy => self.plan.storage().copy,
            _ => None,
        };
        if dtype == Some(T::DTYPE) {
            return Ok(());
        }
        let thing = format_args!("{} slice of {}", T::DTYPE, named(memory));
        let (wrong, remedy) = match dtype {
            Some(DType::F32) => ("they are held in f32".to_owned(), "ask for f32 slices".to_owned()),
            Some(held) => (
                format!("they are held in {held}"),
                format!("ask for {held} slices, or copy them out as f32"),
            ),
            None => ("they are held in 8-bit codes".to_owned(), "copy them out as f32".to_owned()),
        };
        Err(Error::unsupported(thing, wrong, remedy))
    }

    pub(super) fn view<T: Element>(&self, id: ParamId, memory: Memory) -> Result<&[T]> {
        self.require_type::<T>(memory)?;
        let segment = self.claim(id, memory, false)?;
        // SAFETY: `claim` has waited for the ops on this bucket; launching anything, and every mutable slice of this
        // memory, takes the stepper or the pass mutably, which the shared borrow in the result excludes. (Gradient
        // slices borrow through `Grads`, parameters and states are never in its memory.) The memory is of this type,
        // and every bit pattern is a value of it.
        Ok(unsafe { std::slice::from_raw_parts(self.address(&segment, memory).cast(), length(&segment)) })
    }

    /// Between passes.
    pub(super) fn view_mut<T: Element>(&mut self, id: ParamId, memory: Memory) -> Result<&mut [T]> {
        self.require_type::<T>(memory)?;
        if memory == Memory::Params && self.plan.storage().precision.master != Master::None {
            let wrong = "they have master weights, which must be written too";
            return Err(Error::unsupported("mutable slice of parameters", wrong, "use Stepper::write_param"));
        }
        let segment = self.claim(id, memory, true)?;
        // SAFETY: no pass is open, `claim` has waited for the ops on this bucket, and `self` is borrowed mutably:
        // neither another slice nor a launch can exist while this one does. The type as in `view`.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.address(&segment, memory).cast(), length(&segment)) })
    }
}

fn length(segment: &Segment) -> usize {
    // The arena that holds it has been allocated, so its length fits.
    segment.len as usize
}

/// Returns the users' name for the tensors of a memory.
fn named(memory: Memory) -> &'static str {
    match memory {
        Memory::Params => "parameters",
        Memory::Grads => "gradients",
        Memory::State(_) => "optimizer states",
        Memory::Copy => "copies",
        Memory::Ema => "moving averages",
        Memory::Master => "masters",
        Memory::Control | Memory::Settings | Memory::Scales(_) => "the stepper's own memory",
    }
}
