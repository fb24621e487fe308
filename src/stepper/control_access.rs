//! The few numbers that stepper and device tell each other between launches: settings, counts, what a pass came to.
//!
//! Each call claims what it touches in the schedule, and notes it for the checker, before it goes to the device. Must
//! stay the only place beside the views that reaches into memory which ops touch.
#![allow(unsafe_code)]

use crate::abi::{INSTEP_NO_BUCKET, InstepHyper, InstepStatus};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::launch::{action_code, status_of};
use crate::layout::{Gradients, ParamId, Segment, SegmentAction};
use crate::op::{Access, Memory, Span};
use crate::stepper::{Status, Stepper};

impl<D: Device> Stepper<D> {
    /// Makes sure that the trainer may touch a tensor now, and notes that it does.
    pub(super) fn claim(&self, id: ParamId, memory: Memory, writes: bool) -> Result<Segment> {
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
        let releases = self.plan.gradients() == Gradients::Release && segment.action == SegmentAction::Step;
        if releases && memory == Memory::Grads && !writes {
            let name = &self.layout.parameters()[index].name;
            return Err(Error::Order(format!("the gradient of `{name}` is released behind its step")));
        }
        run.touch(index)?;
        let span = Span::segment(memory, &self.plan, &segment);
        run.note(Access { span, writes });
        Ok(segment)
    }

    /// Notes, in front of a hand-over, what a trainer that is a stream may have touched since it claimed it.
    pub(super) fn note_hand_over(&mut self, param: usize) {
        let run = self.run.get_mut();
        if D::TRAINER_IS_A_STREAM && self.written.get_mut()[param] && !run.schedule.is_handed_over(param) {
            let segment = self.plan.segment_of(param);
            for (memory, writes) in [(Memory::Params, false), (Memory::Grads, true)] {
                run.note(Access { span: Span::segment(memory, &self.plan, segment), writes });
            }
        }
    }

    /// Refuses to close a pass in which a gradient was not asked for, where somebody else sums what was.
    pub(super) fn refuse_unsummed(&mut self) -> Result<()> {
        if !self.comm.sums_outside() {
            return Ok(());
        }
        let (schedule, written) = (&self.run.get_mut().schedule, self.written.get_mut());
        let is_missing = |param: &usize| !written[*param] && !schedule.is_frozen(*param);
        let Some(param) = (0..written.len()).find(is_missing) else { return Ok(()) };
        let name = &self.layout.parameters()[param].name;
        Err(Error::Order(format!(
            "the gradient of `{name}` was not asked for, and its sum is made elsewhere"
        )))
    }

    /// Between passes, after `touch_settings`.
    pub(super) fn write_group(&mut self, group: usize, hyper: InstepHyper) {
        let run = self.run.get_mut();
        run.note(Access { span: Span::SETTINGS, writes: true });
        // SAFETY: `touch_settings` has waited for the last Begin, and the next is submitted by a later `begin`.
        unsafe { run.device.write_group(group, hyper) }
    }

    /// Between passes, after `touch_frozen`: from the next one on.
    pub(super) fn write_frozen(&mut self, param: usize, frozen: bool) {
        let index = self.plan.segment_index(param);
        let action = if frozen { SegmentAction::Leave } else { self.plan.segments()[index].action };
        let run = self.run.get_mut();
        run.set_frozen(param, index as u32, frozen);
        run.note(Access { span: Span::SETTINGS, writes: true });
        for round in 0..self.assignment.rounds() {
            let record = self.assignment.record(round, index);
            // SAFETY: as in `write_group`.
            unsafe { run.device.write_action(record, action_code(action)) }
        }
    }

    /// Between passes, after `touch_settings`.
    pub(super) fn write_lr_multiplier(&mut self, param: usize) {
        let (segment, multiplier) = (self.plan.segment_index(param), self.optimizers.lr_multiplier(param));
        let run = self.run.get_mut();
        run.note(Access { span: Span::SETTINGS, writes: true });
        for round in 0..self.assignment.rounds() {
            let record = self.assignment.record(round, segment);
            // SAFETY: as in `write_group`.
            unsafe { run.device.write_lr_multiplier(record, multiplier) }
        }
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
        let mut bytes = [0; 4];
        let count = &mut bytes[..span.bytes() as usize];
        // SAFETY: the last reduce has ended, no pass is open, and the next Begin, which resets the count, comes later.
        unsafe { run.device.read(span, count)? };
        let narrow = [bytes[0], bytes[1]];
        Ok(Some(match span.dtype(&self.plan) {
            DType::F32 => f32::from_ne_bytes(bytes),
            DType::BF16 => half::bf16::from_ne_bytes(narrow).to_f32(),
            DType::F16 => half::f16::from_ne_bytes(narrow).to_f32(),
        } as u32))
    }

    /// After `settle_control`.
    pub(super) fn read_step_count(&self, param: usize, round: usize) -> Result<u64> {
        let mut run = self.run.borrow_mut();
        run.note(Access { span: Span::CONTROL, writes: false });
        let record = self.assignment.record(round, self.plan.segment_index(param));
        // SAFETY: no pass is open and every op on control memory has ended.
        let segment = unsafe { run.device.read_segment(record)? };
        Ok(segment.steps + u64::from(segment.stepped))
    }

    /// After `settle_control`.
    pub(super) fn read_carried(&self, param: usize, round: usize) -> Result<f64> {
        let mut run = self.run.borrow_mut();
        run.note(Access { span: Span::CONTROL, writes: false });
        let record = self.assignment.record(round, self.plan.segment_index(param));
        // SAFETY: as in `read_step_count`.
        let segment = unsafe { run.device.read_segment(record)? };
        Ok(segment.carried[usize::from(segment.stepped != 0)])
    }

    /// After `settle_control`.
    pub(super) fn write_counts(
        &mut self,
        param: usize,
        round: usize,
        count: u64,
        carried: f64,
    ) -> Result<()> {
        let segment = self.plan.segment_index(param);
        let run = self.run.get_mut();
        run.note(Access { span: Span::CONTROL, writes: true });
        let record = self.assignment.record(round, segment);
        // SAFETY: no pass is open, every op on control memory has ended, and the next is submitted by a later `begin`.
        unsafe {
            run.device.write_step_count(record, count)?;
            run.device.write_carried(record, carried)
        }
    }

    /// After `settle_control`.
    pub(super) fn read_status(&self) -> Result<Status> {
        let mut run = self.run.borrow_mut();
        run.note(Access { span: Span::CONTROL, writes: false });
        // SAFETY: as in `read_step_count`.
        let control = unsafe { run.device.read_control()? };
        Ok(Status::new(&status_of(&control)))
    }
}

impl Status {
    pub(super) fn new(published: &InstepStatus) -> Status {
        let bucket = published.first_nonfinite_bucket;
        Status {
            pass: published.sequence,
            skipped: published.skipped != 0,
            norm: (published.decided != 0).then_some(published.norm),
            clip: published.clip,
            loss_scale: published.loss_scale,
            first_nonfinite_bucket: (bucket != INSTEP_NO_BUCKET).then_some(bucket),
        }
    }
}
