//! Slices of tensors. A slice is returned only after the ops that conflict with it have ended.
//!
//! The returned slices are sound because of three facts. First, a slice borrows the stepper, and every launch borrows
//! the stepper mutably. Second, no slice is made of a parameter that was handed over. Third, the checker proves that
//! the schedule has no race with these accesses, and a slice is made only after the schedule's waits.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::device::Executor;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::layout::{Master, Moments, ParamId, Precision, Segment};
use crate::op::{Access, Memory, Span};
use crate::stepper::claims::bucket_numbered;
use crate::stepper::stepper::Stepper;
use crate::stepper::tensor::{Elements, TensorId};

/// Read access to parameters, inside a pass and between passes.
#[derive(Clone, Copy, Debug)]
pub struct Params<'a> {
    stepper: &'a Stepper,
}

/// Write access to gradients, inside a pass. A gradient holds the last pass's values until it is written.
#[derive(Debug)]
pub struct Grads<'a> {
    stepper: &'a Stepper,
}

impl<'a> Params<'a> {
    pub(super) fn new(stepper: &'a Stepper) -> Self {
        Params { stepper }
    }

    /// Returns one parameter, as [`Stepper::view`] does.
    ///
    /// # Shapes
    /// Shape, ordering and errors as for [`Stepper::view`].
    pub fn get(self, id: ParamId) -> Result<&'a [f32]> {
        self.get_as(id)
    }

    /// Returns one parameter, in the type that the stepper's [precision](crate::StepperBuilder::precision) sets for
    /// parameters.
    ///
    /// # Shapes
    /// Shape, ordering and errors as for [`Stepper::view`].
    pub fn get_as<T: Element>(self, id: ParamId) -> Result<&'a [T]> {
        self.stepper.view(id)
    }
}

impl<'a> Grads<'a> {
    pub(super) fn new(stepper: &'a Stepper) -> Self {
        Grads { stepper }
    }

    /// Returns one f32 gradient. Write all of it. For a gradient of another type, use [`Stepper::view_mut`] with
    /// `id.grad()`, or [`write`](Self::write), which converts the values.
    ///
    /// # Shapes
    /// The slice has as many elements as the parameter, and is aligned to 64 bytes unless the memory is
    /// [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// Waits for the last step of the gradient's bucket.
    ///
    /// # Errors
    /// `Layout` if the parameter is of another layout. `Unsupported` if gradients are of another type. `Order` if the
    /// parameter is frozen or was handed over in this micro-batch. `Poisoned` after a failure.
    pub fn get_mut(&mut self, id: ParamId) -> Result<&mut [f32]> {
        let [slice] = self.get_disjoint_mut([id])?;
        Ok(slice)
    }

    /// Returns one or more gradients at once, in the type that the stepper's
    /// [precision](crate::StepperBuilder::precision) sets for gradients.
    ///
    /// # Errors
    /// Errors as for [`get_mut`](Self::get_mut). `Layout` if two ids are the same.
    pub fn get_disjoint_mut<T: Element, const N: usize>(
        &mut self,
        ids: [ParamId; N],
    ) -> Result<[&mut [T]; N]> {
        for (k, id) in ids.iter().enumerate() {
            self.stepper.require_type::<T>(&self.stepper.precision_of(*id)?, Memory::Grads)?;
            if ids[..k].contains(id) {
                let thing = format_args!("gradient of `{}`", self.stepper.layout.parameter(*id)?.name);
                return Err(Error::layout(thing, "asked for twice", "name each parameter once"));
            }
        }
        // All claims come before the first slice, because a refusal must leave no gradient marked as written.
        let mut segments: [Option<Segment>; N] = [const { None }; N];
        for (segment, id) in segments.iter_mut().zip(ids) {
            *segment = Some(self.stepper.claim(id, Memory::Grads, true)?);
        }
        let mut slices: [&mut [T]; N] = std::array::from_fn(|_| Default::default());
        for (slice, segment) in slices.iter_mut().zip(segments.iter().flatten()) {
            self.stepper.written.borrow_mut()[segment.param as usize] = true;
            let (address, count) = self.stepper.place(segment, Memory::Grads);
            // SAFETY: `claim` has waited for the ops on this bucket and checked that the gradient is not handed over.
            // Launching the bucket needs the stepper mutably, and `self` keeps the stepper borrowed. Every other access
            // to this memory also needs a borrow that `self` excludes. A `Params` can exist beside this view, but it
            // reads only parameters. The ids differ, and segments of different parameters do not overlap.
            // `require_type` has checked that the memory is of this type.
            *slice = unsafe { std::slice::from_raw_parts_mut(address.cast(), count) };
        }
        Ok(slices)
    }

    /// Replaces the gradient, including the values of earlier micro-batches. [`add`](Self::add) adds to the gradient
    /// instead. With [`Accumulation::Summed`](crate::Accumulation), earlier micro-batches are already reduced, so only
    /// this micro-batch's gradient is replaced.
    ///
    /// Values of any type are converted to the gradient's type, so a backward in bf16 can write f32 gradients.
    ///
    /// # Shapes
    /// `values` has as many elements as the parameter. Values for a 16-bit gradient are rounded to nearest.
    ///
    /// # Ordering
    /// Ordering as for [`get_mut`](Self::get_mut).
    ///
    /// # Errors
    /// Errors as for [`get_mut`](Self::get_mut). `Layout` if the lengths differ.
    pub fn write<T: Element>(&mut self, id: ParamId, values: &[T]) -> Result<()> {
        self.store(id, values, |_, value| value)
    }

    /// Adds `values` to the gradient, in f32 arithmetic. If this is the first write of the gradient in the pass,
    /// `values` replaces the gradient instead. With [`Accumulation::Summed`](crate::Accumulation), the first write in
    /// each micro-batch replaces the gradient.
    ///
    /// # Shapes
    /// Shape, ordering and errors as for [`write`](Self::write).
    pub fn add<T: Element>(&mut self, id: ParamId, values: &[T]) -> Result<()> {
        if self.stepper.is_first(id)? {
            return self.write(id, values);
        }
        self.store(id, values, |sum, value| sum + value)
    }

    fn store<T: Element>(
        &mut self,
        id: ParamId,
        values: &[T],
        combine: impl Fn(f32, f32) -> f32,
    ) -> Result<()> {
        match self.stepper.precision_of(id)?.grad {
            DType::F32 => self.store_as::<f32, T>(id, values, combine),
            DType::BF16 => self.store_as::<half::bf16, T>(id, values, combine),
            DType::F16 => self.store_as::<half::f16, T>(id, values, combine),
        }
    }

    fn store_as<S: Element, T: Element>(
        &mut self,
        id: ParamId,
        values: &[T],
        combine: impl Fn(f32, f32) -> f32,
    ) -> Result<()> {
        self.stepper.check_len(id, values.len())?;
        let [stored] = self.get_disjoint_mut::<S, 1>([id])?;
        let stored = stored.iter_mut();
        stored.zip(values).for_each(|(old, value)| *old = S::from_f32(combine(old.to_f32(), value.to_f32())));
        Ok(())
    }
}

impl Stepper {
    /// Returns the address of a tensor, and the number of its elements at that address.
    fn place(&self, segment: &Segment, memory: Memory) -> (*mut u8, usize) {
        let run = self.run.borrow();
        let present = Elements::present(memory, segment, &self.plan, &run.schedule);
        let address = run.device.resolve(present.span(&self.plan, &run.schedule));
        // The arena that holds the elements has been allocated, so their number fits a `usize`.
        (address, (present.range.end - present.range.start) as usize)
    }

    /// Refuses slices of `T` if the tensors of this `Memory` have another element type.
    fn require_type<T: Element>(&self, precision: &Precision, memory: Memory) -> Result<()> {
        let dtype = match memory {
            Memory::Params => Some(precision.param),
            Memory::Grads => Some(precision.grad),
            Memory::State(_) => match precision.moments {
                Moments::F32 => Some(DType::F32),
                Moments::BF16 => Some(DType::BF16),
                Moments::EightBit => None,
            },
            Memory::Copy => self.plan.copy(),
            Memory::Ema => Some(DType::F32),
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
                format!("use view or view_mut of {held}, or read and write, which convert"),
            ),
            None => {
                ("they are held in 8-bit codes".to_owned(), "use read and write, which convert".to_owned())
            }
        };
        Err(Error::unsupported(thing, wrong, remedy))
    }

    /// Returns a view of only the parameters.
    pub fn params(&self) -> Params<'_> {
        Params::new(self)
    }

    /// Returns a tensor in place, in the type in which the stepper stores it. Between passes, any tensor can be viewed.
    /// In a pass, only parameters and the gradients that were written in that pass can be viewed. [`read`](Self::read)
    /// copies a tensor of any type as f32.
    ///
    /// The slice cannot be used after any gradient is handed over:
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 4).build()?;
    /// # let w = layout.id("w")?;
    /// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
    /// stepper.begin()?.detach();
    /// stepper.write(w.grad(), &[1.0; 4])?;
    /// let (weight, grad) = (stepper.view::<f32>(w)?, stepper.view::<f32>(w.grad())?);
    /// assert_eq!((weight[0], grad[0]), (0.0, 1.0));
    /// stepper.grad_ready(w)?;
    /// # stepper.finish()?;
    /// # Ok::<(), instep::Error>(())
    /// ```
    /// ```compile_fail,E0502
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 4).build()?;
    /// # let w = layout.id("w")?;
    /// # let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default())?;
    /// stepper.begin()?.detach();
    /// stepper.write(w.grad(), &[1.0; 4])?;
    /// let (weight, grad) = (stepper.view::<f32>(w)?, stepper.view::<f32>(w.grad())?);
    /// stepper.grad_ready(w)?;
    /// assert_eq!((weight[0], grad[0]), (0.0, 1.0)); // the step may be writing them
    /// # stepper.finish()?;
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Shapes
    /// The slice has as many elements as the parameter, and is aligned to 64 bytes unless the memory is
    /// [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// Ordering as for [`read`](Self::read). Inside a pass, this call does not wait for the bucket's step if the
    /// parameter is frozen.
    ///
    /// # Errors
    /// Errors as for [`read`](Self::read). `Unsupported` if the tensor is of another type.
    pub fn view<'n, T: Element>(&self, tensor: impl Into<TensorId<'n>>) -> Result<&[T]> {
        let (id, memory) = self.find(tensor.into())?;
        self.require_type::<T>(&self.precision_of(id)?, memory)?;
        self.admit_read(id, memory)?;
        self.slice(id, memory)
    }

    /// Returns the memory of a tensor, for writing. Between passes, `tensor` can be any tensor. In a pass, it can only
    /// be a gradient. The tensor then counts as written, as after [`write`](Self::write).
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 2).build()?;
    /// # let w = layout.id("w")?;
    /// # let sgd = Sgd { lr: 1.0, momentum: 0.5, ..Default::default() };
    /// # let mut stepper = Stepper::host(&layout, sgd, Solo::default())?;
    /// stepper.view_mut(w.state("momentum_buffer"))?.copy_from_slice(&[4.0f32, 8.0]);
    /// stepper.set_step_count(w, 1)?; // not the first step, which would replace the buffer
    /// let mut pass = stepper.begin()?;
    /// pass.view_mut::<f32>(w.grad())?.fill(1.0);
    /// pass.finish()?;
    /// assert_eq!(stepper.view::<f32>(w)?, [-3.0, -5.0]);
    /// assert_eq!(stepper.step_count(w)?, 2);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Shapes
    /// Shape as for [`view`](Self::view). In a pass, a gradient holds the last pass's values until it is written.
    ///
    /// # Ordering
    /// Ordering as for [`write`](Self::write).
    ///
    /// # Errors
    /// Errors as for [`write`](Self::write). `Sharded` for a state, master or average that is sharded over ranks.
    /// `Unsupported` if the tensor is of another type. `Unsupported` for a parameter that is sharded, is offloaded or
    /// has a [master weight](crate::Master). Use [`write`](Self::write) for such a parameter, because its values are
    /// stored in several places.
    pub fn view_mut<'n, T: Element>(&mut self, tensor: impl Into<TensorId<'n>>) -> Result<&mut [T]> {
        let (id, memory) = self.find(tensor.into())?;
        self.require_type::<T>(&self.precision_of(id)?, memory)?;
        if memory == Memory::Params && self.precision_of(id)?.master != Master::None {
            let wrong = "they have master weights, which must be written too";
            return Err(Error::unsupported("mutable slice of parameters", wrong, "use Stepper::write"));
        }
        if memory != Memory::Grads {
            self.refuse_shard(id, memory)?;
            self.refuse_sharded_slice(id, memory)?;
        }
        self.admit_write(id, memory)?;
        let segment = self.claim(id, memory, true)?;
        self.note_written(id, memory)?;
        let (address, count) = self.place(&segment, memory);
        // SAFETY: `admit_write` and `claim` have waited for the ops on this tensor, and refuse a tensor that was handed
        // over. `self` is borrowed mutably for as long as the slice lives, so neither another slice nor a launch can
        // exist. The memory is of this type, and every bit pattern is a value of it.
        Ok(unsafe { std::slice::from_raw_parts_mut(address.cast(), count) })
    }

    /// Returns a bucket's gradients in the open pass as one slice. Write all of the slice. The [plan](Self::plan) gives
    /// the gradients' offsets in the slice. The slice includes the padding, and you may leave any values in the
    /// padding. The slice excludes the elements that count ranks. All gradients of the bucket count as written after
    /// this call.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("a", 2).param("b", 3).build()?;
    /// # let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Solo::default())?;
    /// stepper.begin()?.detach();
    /// stepper.bucket_mut(0)?.fill(1.0f32);
    /// stepper.bucket_ready(0)?;
    /// stepper.finish()?;
    /// assert_eq!(stepper.view::<f32>(layout.id("b")?)?, [-1.0; 3]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Waits for the last step of the bucket.
    ///
    /// # Errors
    /// `Order` between passes, or if one of the bucket's parameters is frozen or was handed over in this micro-batch.
    /// `Layout` if there is no such bucket. `Unsupported` if gradients are of another type. `Poisoned` after a failure.
    pub fn bucket_mut<T: Element>(&mut self, bucket: u32) -> Result<&mut [T]> {
        let plan = Arc::clone(&self.plan);
        let described = bucket_numbered(&plan, bucket)?;
        self.require_type::<T>(&described.storage.precision, Memory::Grads)?;
        let run = self.run.get_mut();
        run.schedule.require_open()?;
        for segment in plan.segments_of(described) {
            run.schedule.refuse_handed_over(segment.param as usize)?;
            run.schedule.refuse_frozen(segment.param as usize)?;
        }
        run.touch(|schedule| schedule.touch_bucket(bucket))?;
        let tail =
            if described.tail.is_empty() { described.start + described.len } else { described.tail.start };
        let span = Span::within(Memory::Grads, described, described.start, tail);
        run.note(Access { span, writes: true });
        for segment in plan.segments_of(described) {
            self.written.get_mut()[segment.param as usize] = true;
        }
        let count = (tail - described.start) as usize;
        // SAFETY: `touch_bucket` has waited for the ops on these bytes. Begin writes only tails, which the slice
        // excludes. Nothing of the bucket is handed over. A bucket lies in one piece of memory, of this type and
        // initialised. The stepper's own memory starts as zeros, and all of a borrowed bucket is summed. `self` is
        // borrowed mutably for as long as the slice lives.
        Ok(unsafe { std::slice::from_raw_parts_mut(run.device.resolve(span).cast(), count) })
    }

    /// Returns a slice that borrows the stepper. The caller has performed every check except those of `claim`.
    fn slice<T: Element>(&self, id: ParamId, memory: Memory) -> Result<&[T]> {
        let segment = self.claim(id, memory, false)?;
        let (address, count) = self.place(&segment, memory);
        // SAFETY: `claim` has waited for the ops on this bucket. Every launch, and every mutable slice of this memory,
        // needs the stepper mutably. The shared borrow in the result excludes that. (Only `Grads` makes mutable slices
        // through a shared reference, and only of gradients. It keeps the stepper borrowed mutably, so only a `Params`
        // can exist beside it.) The memory is of this type, and every bit pattern is a value of it.
        Ok(unsafe { std::slice::from_raw_parts(address.cast(), count) })
    }
}

/// Returns the name of a `Memory`'s tensors for error messages.
fn named(memory: Memory) -> &'static str {
    match memory {
        Memory::Params | Memory::HostParams => "parameters",
        Memory::Grads | Memory::HostGrads | Memory::Sums => "gradients",
        Memory::State(_) => "optimizer states",
        Memory::Copy => "copies",
        Memory::Ema => "moving averages",
        Memory::Master => "masters",
        Memory::Control | Memory::Settings | Memory::Scales(_) => "the stepper's own memory",
    }
}
