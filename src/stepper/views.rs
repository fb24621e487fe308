//! Slices of parameters and gradients, each handed out only after the ops that it conflicts with.
//!
//! Sound because of three facts that are kept elsewhere: views borrow the pass (or the stepper) and launching needs it
//! mutably; a handed-over parameter is refused; and the schedule, whose waits are paid before the slice is made, is
//! proven free of races with these very accesses.
#![allow(unsafe_code)]

use crate::abi::InstepHyper;
use crate::error::{Error, Result};
use crate::launch::action_code;
use crate::layout::{ParamId, Segment, SegmentAction};
use crate::op::{Access, Memory, Span};
use crate::stepper::{Status, Stepper};

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

    /// Replaces the gradient.
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
        self.check_len(id, values.len())?;
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
        self.check_len(id, values.len())?;
        self.get_mut(id)?.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        Ok(())
    }

    fn check_len(&self, id: ParamId, given: usize) -> Result<()> {
        let parameter = self.stepper.layout.parameter(id)?;
        if parameter.len == given as u64 {
            return Ok(());
        }
        Err(Error::Layout(format!("`{}` has {} elements, not {given}", parameter.name, parameter.len)))
    }
}

impl Stepper {
    /// Makes sure that the trainer may touch a tensor now, and notes that it does.
    fn claim(&self, id: ParamId, memory: Memory, writes: bool) -> Result<Segment> {
        let index = self.layout.index(id)?;
        let segment = self.plan.segment_of(index).clone();
        let mut run = self.run.borrow_mut();
        if run.schedule.is_handed_over(index) {
            let name = &self.layout.parameters()[index].name;
            return Err(Error::Order(format!(
                "`{name}` was handed over and is out of reach until the pass or micro-batch ends"
            )));
        }
        if writes && memory == Memory::Grads && run.schedule.is_frozen(index) {
            let name = &self.layout.parameters()[index].name;
            return Err(Error::Order(format!("`{name}` is frozen and takes no gradient")));
        }
        run.touch(index)?;
        let span = Span::segment(memory, &self.plan, &segment);
        run.note(Access { span, writes });
        Ok(segment)
    }

    fn address(&self, segment: &Segment, memory: Memory) -> *mut f32 {
        let span = Span::segment(memory, &self.plan, segment);
        self.run.borrow().device.memories().resolve(span).cast()
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

    /// Between passes, after `touch_settings`.
    pub(super) fn write_group(&mut self, group: usize, hyper: InstepHyper) {
        let run = self.run.get_mut();
        run.note(Access { span: Span::SETTINGS, writes: true });
        // SAFETY: `touch_settings` has waited for the last Begin, and the next is submitted by a later `begin`.
        unsafe { run.device.memories().write_group(group, hyper) }
    }

    /// Between passes, after `touch_frozen`: from the next one on.
    pub(super) fn write_frozen(&mut self, param: usize, frozen: bool) {
        let index = self.plan.segment_index(param);
        let action = if frozen { SegmentAction::Leave } else { self.plan.segments()[index].action };
        let run = self.run.get_mut();
        run.set_frozen(param, index as u32, frozen);
        run.note(Access { span: Span::SETTINGS, writes: true });
        // SAFETY: as in `write_group`.
        unsafe { run.device.memories().write_action(index, action_code(action)) }
    }

    /// How many ranks had data in the last pass, if the plan counts them.
    pub(super) fn read_contributors(&mut self) -> Result<Option<u32>> {
        let Some(at) = self.plan.carrier().and_then(|bucket| bucket.contributors) else {
            return Ok(None);
        };
        let span = Span::elements(Memory::Grads, &self.plan, at, at + 1);
        let run = self.run.get_mut();
        run.touch_contributors()?;
        run.note(Access { span, writes: false });
        // SAFETY: the last reduce has ended, no pass is open, and the next Begin, which resets the count, comes later.
        let count = unsafe { run.device.memories().resolve(span).cast::<f32>().read() };
        Ok(Some(count as u32))
    }

    /// After `settle_control`.
    pub(super) fn read_step_count(&self, param: usize) -> Result<u64> {
        let mut run = self.run.borrow_mut();
        run.note(Access { span: Span::CONTROL, writes: false });
        // SAFETY: no pass is open and every op on control memory has ended.
        let segment = unsafe { run.device.memories().read_segment(self.plan.segment_index(param)) };
        Ok(segment.steps + u64::from(segment.stepped))
    }

    /// After `settle_control`.
    pub(super) fn write_step_count(&mut self, param: usize, count: u64) {
        let segment = self.plan.segment_index(param);
        let run = self.run.get_mut();
        run.note(Access { span: Span::CONTROL, writes: true });
        // SAFETY: no pass is open, every op on control memory has ended, and the next is submitted by a later `begin`.
        unsafe { run.device.memories().write_step_count(segment, count) }
    }

    /// After `settle_control`.
    pub(super) fn read_status(&self) -> Result<Status> {
        let mut run = self.run.borrow_mut();
        run.note(Access { span: Span::CONTROL, writes: false });
        // SAFETY: as in `read_step_count`.
        let control = unsafe { run.device.memories().read_control() };
        Ok(Status {
            pass: run.schedule.pass(),
            skipped: control.skip != 0,
            norm: (control.decided != 0).then_some(control.norm),
            clip: control.clip,
            first_nonfinite_bucket: (control.first_nonfinite_bucket != crate::abi::INSTEP_NO_BUCKET)
                .then_some(control.first_nonfinite_bucket),
        })
    }
}

fn length(segment: &Segment) -> usize {
    // The arena that holds it has been allocated, so its length fits.
    segment.len as usize
}
