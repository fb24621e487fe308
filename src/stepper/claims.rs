//! The trainer's claims on memory, and every refusal of one.
//!
//! A claim tells the schedule, waits, and notes the access for the checker, in this order. It refuses before anything
//! is written.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout::{Gradients, ParamId, Segment, SegmentAction};
use crate::op::{Access, Memory, Span};
use crate::stepper::state::attached::OptimizerId;
use crate::stepper::state::options::Unused;
use crate::stepper::stepper::Stepper;

impl<D: Device> Stepper<D> {
    /// Makes sure that the trainer may touch a tensor now, and notes that it does.
    pub(super) fn claim(&self, id: ParamId, memory: Memory, writes: bool) -> Result<Segment> {
        let index = self.layout.index(id)?;
        let segment = self.plan.segment_of(index).clone();
        let mut run = self.run.borrow_mut();
        run.schedule.refuse_handed_over(index)?;
        if writes && memory == Memory::Grads {
            run.schedule.refuse_frozen(index)?;
        }
        let releases = self.plan.gradients() == Gradients::Release && segment.action == SegmentAction::Step;
        if releases && memory == Memory::Grads && !writes {
            let name = &self.layout.parameters()[index].name;
            let wrong = "its gradient is released after its step";
            return Err(Error::order(format_args!("`{name}`"), wrong, "use Gradients::Keep to read it"));
        }
        run.touch(index)?;
        let span = Span::segment(memory, &self.plan, &segment);
        run.note(Access { span, writes });
        Ok(segment)
    }

    /// Notes, before a hand-over, the accesses of a trainer that is a stream since its claim.
    pub(super) fn note_hand_over(&mut self, param: usize) {
        let run = self.run.get_mut();
        if D::TRAINER_IS_A_STREAM && self.written.get_mut()[param] && !run.schedule.is_handed_over(param) {
            let segment = self.plan.segment_of(param);
            for (memory, writes) in [(Memory::Params, false), (Memory::Grads, true)] {
                run.note(Access { span: Span::segment(memory, &self.plan, segment), writes });
            }
        }
    }

    /// Refuses to hand over a gradient that was not written in this pass.
    pub(super) fn refuse_unwritten(&mut self, param: usize) -> Result<()> {
        if self.written.get_mut()[param] {
            return Ok(());
        }
        let name = &self.layout.parameters()[param].name;
        let wrong = "its gradient was not written in this pass";
        Err(Error::order(format_args!("`{name}`"), wrong, "write it, or do not hand it over"))
    }

    /// Refuses to close a pass in which a gradient was forgotten: where somebody else sums what is there, where the
    /// stepper was told to refuse that, or where all of the caller's own buckets would be overwritten with zeros.
    pub(super) fn refuse_forgotten(&mut self) -> Result<()> {
        let (schedule, written) = (&self.run.get_mut().schedule, self.written.get_mut());
        let is_missing = |param: &usize| !written[*param] && !schedule.is_frozen(*param);
        let (parameters, plan) = (self.layout.parameters(), &self.plan);
        let named = |param: usize| format!("`{}`", parameters[param].name);
        if self.comm.sums_outside()
            && let Some(param) = (0..written.len()).find(is_missing)
        {
            let wrong = "its gradient was not written, but is summed outside the stepper";
            return Err(Error::order(named(param), wrong, "write it, or freeze the parameter"));
        }
        let takes_part = |param: &usize| {
            let segment = plan.segment_of(*param);
            segment.len > 0 && segment.action != SegmentAction::Leave && !schedule.is_frozen(*param)
        };
        if self.unused == Unused::Refuse
            && let Some(param) = (0..written.len()).filter(takes_part).find(is_missing)
        {
            let wrong = "its gradient was not written in this pass";
            let remedy = "write it, freeze the parameter, or build with another Unused";
            return Err(Error::order(named(param), wrong, remedy));
        }
        let mut parts = (0..written.len()).filter(takes_part);
        if plan.is_foreign() && parts.clone().next().is_some() && parts.all(|param| is_missing(&param)) {
            let wrong =
                "no gradient of the borrowed buckets was asked for, so all would be overwritten with zeros";
            return Err(Error::order(
                "pass",
                wrong,
                "ask for each gradient before you write it, or abandon the pass",
            ));
        }
        Ok(())
    }

    pub(super) fn settle_between_passes(&self) -> Result<()> {
        self.refuse_open_pass()?;
        self.run.borrow_mut().touch_all()
    }

    pub(super) fn settle_control(&self) -> Result<()> {
        self.refuse_open_pass()?;
        self.run.borrow_mut().touch_control()
    }

    /// Refuses to go on after a failure, with what is left to be read.
    pub(super) fn refuse_rescued(&self) -> Result<()> {
        self.run.borrow().refuse_rescued()
    }

    pub(super) fn refuse_open_pass(&self) -> Result<()> {
        if self.run.borrow().schedule.is_open() {
            let remedy = "use the pass's own views, or finish it first";
            return Err(Error::order("stepper", "a pass is open", remedy));
        }
        Ok(())
    }

    pub(super) fn state_called(&self, id: ParamId, name: &str) -> Result<Memory> {
        let param = self.layout.index(id)?;
        let found = self.optimizers.states(param).find(|(known, _, _)| known == name);
        let Some((_, round, k)) = found else {
            let names: Vec<_> = self.optimizers.states(param).map(|(name, _, _)| name).collect();
            let thing = format_args!("state `{name}` of `{}`", self.layout.parameters()[param].name);
            let remedy = match names.is_empty() {
                true => "use an optimizer that keeps it".to_owned(),
                false => format!("use {}", names.join(" or ")),
            };
            return Err(Error::unsupported(thing, "its optimizer keeps no such state", remedy));
        };
        Ok(Memory::State((self.assignment.first_state(round) + k) as u8))
    }

    pub(super) fn round_of(&self, id: ParamId, optimizer: OptimizerId) -> Result<(usize, usize)> {
        let param = self.layout.index(id)?;
        let refused = || {
            let wrong = format_args!("does not step `{}`", self.layout.parameters()[param].name);
            Error::config("optimizer", optimizer.0, wrong, "use one of Stepper::optimizers_of")
        };
        Ok((param, self.optimizers.round(param, optimizer).ok_or_else(refused)?))
    }

    /// States of a parameter are written: on all ranks, or ranks are to notice.
    pub(super) fn note_written(&mut self, id: ParamId) -> Result<()> {
        let param = self.layout.index(id)?;
        self.note_loaded(param, [u64::MAX]);
        Ok(())
    }

    pub(super) fn require_copy(&self) -> Result<()> {
        let is_kept = self.plan.storage().copy.is_some();
        self.require(is_kept, "copies of parameters", "StepperBuilder::copy_params")
    }

    pub(super) fn require(&self, is_kept: bool, what: &str, option: &str) -> Result<()> {
        if is_kept {
            Ok(())
        } else {
            Err(Error::unsupported(what, "this stepper keeps none", format_args!("build it with {option}")))
        }
    }

    pub(super) fn check_len(&self, id: ParamId, given: usize) -> Result<()> {
        let parameter = self.layout.parameter(id)?;
        if parameter.len == given as u64 {
            return Ok(());
        }
        let thing = format_args!("`{}`", parameter.name);
        let wrong = format_args!("has {} elements, not {given}", parameter.len);
        Err(Error::layout(thing, wrong, "pass a slice of its length"))
    }
}
