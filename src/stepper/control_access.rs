//! Reads and writes the device's memory between launches: settings, counts, the status of a pass, and tensors.
//!
//! A function claims its bytes in the schedule and records the access for the checker, before it calls the device. If a
//! function leaves the claim and the record to its caller, its comment says so. Only this file and `views.rs` access
//! memory that ops touch.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use crate::device::{Claimed, Device};
use crate::dtype::DType;
use crate::error::Result;
use crate::launch::{Assignment, BorrowedPieces, Progress, status_of};
use crate::layout::{Plan, SegmentAction};
use crate::op::{Access, Memory, Span, Words};
use crate::schedule::Schedule;
use crate::stepper::state::options::Status;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Freezes or unfreezes a parameter from the next pass on. Call this function between passes, after `touch_frozen`.
    pub(super) fn write_frozen(&mut self, param: usize, frozen: bool) {
        let index = self.plan.segment_index(param);
        let action = if frozen { SegmentAction::Leave } else { self.plan.segments()[index].action };
        self.run.get_mut().set_frozen(param, index as u32, frozen);
        for round in 0..self.assignment.rounds() {
            self.settings.set_action(self.assignment.record(round, index), action);
        }
        self.settings_changed = true;
    }

    /// Sets the learning-rate multipliers of these parameters. Call this function between passes, after
    /// `touch_settings`.
    pub(super) fn write_lr_multipliers(&mut self, params: Range<usize>) {
        for param in params {
            let (segment, multiplier) =
                (self.plan.segment_index(param), self.optimizers.lr_multiplier(param));
            for round in 0..self.assignment.rounds() {
                self.settings.set_lr_multiplier(self.assignment.record(round, segment), multiplier);
            }
        }
        self.settings_changed = true;
    }

    /// Writes changed settings to the device before a pass begins, in one write.
    ///
    /// # Errors
    /// Returns an error if the wait for the last `Begin` fails. The settings then stay marked as changed, so the next
    /// call writes them.
    pub(super) fn flush_settings(&mut self) -> Result<()> {
        if !self.settings_changed {
            return Ok(());
        }
        let run = self.run.get_mut();
        run.touch(Schedule::touch_settings)?;
        run.note(Access { span: Span::SETTINGS, writes: true });
        // SAFETY: `touch_settings` has waited for the last Begin, and a later `begin` submits the next Begin.
        run.device.write_settings(&self.settings, unsafe { Claimed::promise() });
        self.settings_changed = false;
        Ok(())
    }

    /// Returns the number of ranks with data in the last pass, if the plan counts them.
    pub(super) fn read_contributors(&mut self) -> Result<Option<u32>> {
        let Some(at) = self.plan.carrier().and_then(|bucket| bucket.contributors) else {
            return Ok(None);
        };
        let span = Span::elements(Memory::Grads.of_step(&self.plan), &self.plan, at, at + 1);
        let run = self.run.get_mut();
        run.touch(Schedule::touch_contributors)?;
        run.note(Access { span, writes: false });
        let mut bytes = [0; 4];
        let count = &mut bytes[..span.bytes() as usize];
        // SAFETY: the last reduce has ended, no pass is open, and the next Begin, which resets the count, comes later.
        run.device.read(span, count, unsafe { Claimed::promise() })?;
        let narrow = [bytes[0], bytes[1]];
        Ok(Some(match span.dtype(&self.plan) {
            DType::F32 => f32::from_ne_bytes(bytes),
            DType::BF16 => half::bf16::from_ne_bytes(narrow).to_f32(),
            DType::F16 => half::f16::from_ne_bytes(narrow).to_f32(),
        } as u32))
    }

    /// Copies a span to the host. The caller has claimed the span and recorded the access.
    pub(super) fn read_span(&self, span: Span, into: &mut [u8]) -> Result<()> {
        // SAFETY: the claim was announced to the schedule and has been waited for.
        self.run.borrow_mut().device.read(span, into, unsafe { Claimed::promise() })
    }

    /// Copies bytes from the host to a span. The caller has claimed the span and recorded the access.
    pub(super) fn write_span(&self, span: Span, from: &[u8]) -> Result<()> {
        // SAFETY: the claim was announced to the schedule and has been waited for. A claim to write excludes views.
        self.run.borrow_mut().device.write(span, from, unsafe { Claimed::promise() })
    }

    /// Builds a device for another plan or other optimizers. The caller has claimed all memory.
    pub(super) fn rebuilt_device(
        &mut self,
        plan: &Arc<Plan>,
        assignment: &Arc<Assignment>,
        borrowed: Option<BorrowedPieces>,
        words: &Arc<Words>,
    ) -> Result<D> {
        // SAFETY: the caller has claimed everything, and no pass is open. The pieces are of this plan.
        let claimed = unsafe { Claimed::promise() };
        self.run.get_mut().device.rebuilt(plan, assignment, borrowed, words, claimed)
    }

    /// Copies a span to another device, through the host's buffer `bytes`. The caller has claimed all memory.
    pub(super) fn copy_span(
        &mut self,
        from: Span,
        device: &mut D,
        to: Span,
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        bytes.resize(from.bytes() as usize, 0);
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: nothing is in flight on our device, and nothing has been submitted to the other.
        let [ours, theirs] = unsafe { [Claimed::promise(), Claimed::promise()] };
        self.run.get_mut().device.read(from, bytes, ours)?;
        device.write(to, bytes, theirs)
    }

    /// Copies the progress of one optimizer of one parameter to another device. `from` is the index of the progress on
    /// this device, and `to` is its index on the other device. The caller has claimed all memory.
    pub(super) fn copy_progress(&mut self, from: usize, device: &mut D, to: usize) -> Result<()> {
        // SAFETY: nothing is in flight on our device, and nothing has been submitted to the other.
        let [ours, theirs] = unsafe { [Claimed::promise(), Claimed::promise()] };
        let progress = self.run.get_mut().device.read_progress(from, ours)?;
        device.write_progress(to, progress, theirs)
    }

    /// Reads the progress of one optimizer of a parameter. Call `settle_control` first.
    pub(super) fn read_progress(&self, param: usize, round: usize) -> Result<Progress> {
        let mut run = self.run.borrow_mut();
        run.note(Access { span: Span::CONTROL, writes: false });
        let record = self.assignment.record(round, self.plan.segment_index(param));
        // SAFETY: no pass is open and every op on control memory has ended.
        run.device.read_progress(record, unsafe { Claimed::promise() })
    }

    /// Sets the progress of one optimizer of a parameter. Call `settle_control` first.
    pub(super) fn write_progress(&mut self, param: usize, round: usize, progress: Progress) -> Result<()> {
        let record = self.assignment.record(round, self.plan.segment_index(param));
        let run = self.run.get_mut();
        run.note(Access { span: Span::CONTROL, writes: true });
        // SAFETY: no pass is open, every op on control memory has ended, and the next is submitted by a later `begin`.
        run.device.write_progress(record, progress, unsafe { Claimed::promise() })
    }

    /// Waits for all steps, and copies a part of control memory to the host. Call it between passes.
    pub(super) fn read_control_part<const BYTES: usize>(&self, span: Span) -> Result<[u8; BYTES]> {
        self.settle_control()?;
        self.copy_control_part(span)
    }

    /// Waits for the decision that wrote the loss scale, and copies the loss scale to the host. A pass may be open.
    pub(super) fn read_loss_scale(&self) -> Result<[u8; 8]> {
        self.run.borrow_mut().touch(Schedule::touch_loss_scale)?;
        self.copy_control_part(Span::LOSS_SCALE)
    }

    /// Copies a part of control memory to the host. The caller has waited for all ops that write this part.
    pub(super) fn copy_control_part<const BYTES: usize>(&self, span: Span) -> Result<[u8; BYTES]> {
        assert!(span.memory == Memory::Control && span.bytes() == BYTES as u64, "{span:?}");
        let (mut run, mut bytes) = (self.run.borrow_mut(), [0; BYTES]);
        run.note(Access { span, writes: false });
        // SAFETY: the last op that wrote this part has ended, and the next one comes after this read.
        run.device.read(span, &mut bytes, unsafe { Claimed::promise() })?;
        Ok(bytes)
    }

    /// Waits for all steps, and replaces a part of control memory. Call it between passes.
    pub(super) fn write_control_part(&mut self, span: Span, bytes: &[u8]) -> Result<()> {
        assert!(span.memory == Memory::Control && span.bytes() == bytes.len() as u64, "{span:?}");
        self.settle_control()?;
        let run = self.run.get_mut();
        run.note(Access { span, writes: true });
        // SAFETY: no pass is open, every op on control memory has ended, and the next is submitted by a later `begin`.
        run.device.write(span, bytes, unsafe { Claimed::promise() })
    }

    /// Reads the last pass's status. Call `settle_control` first.
    pub(super) fn read_status(&self) -> Result<Status> {
        let mut run = self.run.borrow_mut();
        run.note(Access { span: Span::CONTROL, writes: false });
        // SAFETY: no pass is open and every op on control memory has ended.
        let control = run.device.read_control(unsafe { Claimed::promise() })?;
        Ok(Status::new(&status_of(&control), self.abandoned))
    }
}
