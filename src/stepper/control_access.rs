//! The few numbers that stepper and device tell each other between launches: settings, counts, what a pass came to.
//!
//! Each call claims what it touches in the schedule, and notes it for the checker, before it goes to the device. Must
//! stay the only place beside the views that reaches into memory which ops touch.
#![allow(unsafe_code)]

use crate::abi::InstepHyper;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::launch::{action_code, status_of};
use crate::layout::SegmentAction;
use crate::op::{Access, Memory, Span};
use crate::stepper::state::status::Status;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
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
