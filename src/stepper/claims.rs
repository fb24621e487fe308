//! The trainer's claims on memory, and all reasons to refuse a claim.
//!
//! The trainer claims memory before it accesses the memory. A claim first informs the schedule of the access, then
//! waits, and then records the access for the checker. A refused claim has written nothing.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout::{Bucket, Gradients, ParamId, Plan, Segment, SegmentAction};
use crate::op::{Access, Memory, Span};
use crate::schedule::Schedule;
use crate::stepper::state::optimizers::OptimizerId;
use crate::stepper::state::options::Unused;
use crate::stepper::stepper::Stepper;
use crate::stepper::tensor::{Elements, TensorId};

impl<D: Device> Stepper<D> {
    /// Returns the parameter that a tensor belongs to, and the `Memory` that stores the tensor.
    pub(super) fn find(&self, tensor: TensorId<'_>) -> Result<(ParamId, Memory)> {
        let found = match tensor {
            TensorId::Param(id) => (id, Memory::Params),
            TensorId::Grad(id) => (id, Memory::Grads),
            TensorId::State(id, name) => (id, self.state_called(id, name)?),
            TensorId::Copy(id) => {
                require(self.plan.copy().is_some(), "copies of parameters", "StepperBuilder::copy_params")?;
                (id, Memory::Copy)
            }
            TensorId::Ema(id) => {
                require(self.plan.keeps_ema(), "moving averages", "StepperBuilder::ema")?;
                (id, Memory::Ema)
            }
        };
        self.layout.index(found.0)?;
        Ok(found)
    }

    /// Refuses a tensor that the trainer may not read now. Between passes, also waits for all steps, unless the tensor
    /// is a parameter or a copy. For parameters and copies, `claim` waits only for the tensor's bucket. Other buckets
    /// can be stepped and gathered during that wait.
    pub(super) fn admit_read(&self, id: ParamId, memory: Memory) -> Result<()> {
        if !self.run.borrow().schedule.is_open() {
            self.refuse_shard(id, memory)?;
            self.refuse_resharded(id, memory)?;
            return match memory {
                Memory::Params | Memory::Copy => self.refuse_open_pass(),
                _ => self.settle_between_passes(),
            };
        }
        match memory {
            Memory::Params => self.refuse_resharded(id, memory),
            // Before its first write in a pass, a gradient holds the last pass's sum, or zeros.
            Memory::Grads => self.refuse_unwritten(self.layout.index(id)?, "write it before you read it"),
            _ => self.refuse_open_pass(),
        }
    }

    /// Refuses a tensor that the trainer may not write now. Between passes, waits for all steps.
    pub(super) fn admit_write(&self, id: ParamId, memory: Memory) -> Result<()> {
        match memory {
            Memory::Grads => self.refuse_closed_pass(),
            Memory::Copy => {
                let thing = format_args!("copy of `{}`", self.layout.parameter(id)?.name);
                Err(Error::unsupported(thing, "only steps write it", "write the parameter"))
            }
            _ => self.settle_between_passes(),
        }
    }

    /// Records that the trainer wrote a tensor. The next pass broadcasts the bucket of a written parameter. A gradient
    /// can be handed over in the open pass once its write is recorded. For any other tensor, ranks check that all of
    /// them wrote it.
    pub(super) fn note_written(&mut self, id: ParamId, memory: Memory) -> Result<()> {
        let param = self.layout.index(id)?;
        match memory {
            Memory::Params => {
                self.params_written.note(param, &self.plan);
                self.agreement.forget();
            }
            Memory::Grads => self.written.get_mut()[param] = true,
            _ => self.note_loaded(param, [u64::MAX]),
        }
        Ok(())
    }

    /// Adds loaded numbers to the agreement, so that ranks detect a difference. Ignores local parameters, because their
    /// counts and states may differ between ranks.
    pub(super) fn note_loaded(&mut self, param: usize, numbers: impl IntoIterator<Item = u64>) {
        if self.layout.parameters()[param].local {
            return;
        }
        numbers.into_iter().for_each(|number| self.loaded.note(param, number));
        self.agreement.forget();
    }

    /// Waits until the trainer may touch a tensor, and records the access.
    pub(super) fn claim(&self, id: ParamId, memory: Memory, writes: bool) -> Result<Segment> {
        let index = self.layout.index(id)?;
        let segment = self.plan.segment_of(index).clone();
        let mut run = self.run.borrow_mut();
        run.schedule.refuse_handed_over(index)?;
        // The schedule zeroes and reduces the gradient of an unused parameter, so the trainer may not touch it.
        if memory == Memory::Grads && (writes || run.schedule.is_open()) {
            run.schedule.refuse_frozen(index)?;
        }
        let releases = self.plan.gradients() == Gradients::Release && segment.action == SegmentAction::Step;
        if releases && memory == Memory::Grads && !writes && !run.schedule.is_open() {
            let name = &self.layout.parameters()[index].name;
            let wrong = "its gradient is released after its step";
            return Err(Error::order(format_args!("`{name}`"), wrong, "use Gradients::Keep to read it"));
        }
        let is_rescued = run.refuse_rescued().is_err();
        if is_rescued && memory.is_sent() && !writes && run.device.is_partly_gathered(segment.bucket) {
            let name = &self.layout.parameters()[index].name;
            let wrong = "the other ranks' parts of its last step were lost with them";
            return Err(Error::order(format_args!("`{name}`"), wrong, "go on from a checkpoint"));
        }
        run.touch(|schedule| match memory {
            Memory::Grads => schedule.touch_gradient(index),
            _ => schedule.touch(index),
        })?;
        let present = Elements::present(memory, &segment, &self.plan, &run.schedule);
        let span = present.span(&self.plan, &run.schedule);
        run.note(Access { span, writes });
        Ok(segment)
    }

    /// If the trainer is a stream, records the accesses that the stream may have made since the parameter or its
    /// gradient was claimed. Call this before a hand-over.
    pub(super) fn note_hand_over(&mut self, param: usize) {
        let run = self.run.get_mut();
        if D::TRAINER_IS_A_STREAM && self.written.get_mut()[param] && !run.schedule.is_handed_over(param) {
            let segment = self.plan.segment_of(param);
            // `note_reshard` has noted the reads of a resharded bucket.
            let is_full = run.schedule.is_full(segment.bucket);
            let memories = [(Memory::Params, false), (Memory::Grads, true)].into_iter();
            for (memory, writes) in memories.filter(|(memory, _)| *memory == Memory::Grads || is_full) {
                run.note(Access { span: Span::segment(memory, &self.plan, segment), writes });
            }
        }
    }

    /// If the trainer is a stream, records that this stream may have read a bucket. Call this before the bucket is
    /// resharded.
    pub(super) fn note_reshard(&mut self, bucket: u32) {
        let run = self.run.get_mut();
        if D::TRAINER_IS_A_STREAM && run.schedule.may_be_read(bucket) {
            let described = &self.plan.buckets()[bucket as usize];
            Memory::sent_of(described).for_each(|memory| {
                run.note(Access { span: Span::shared(memory, described), writes: false });
            });
        }
    }

    /// Refuses to hand over a gradient that was not written in this pass.
    pub(super) fn refuse_unwritten_hand_over(&self, param: usize) -> Result<()> {
        let remedy = match self.unused {
            // With `Unused::Skip`, buckets count the ranks with a gradient, and `set_unused` is refused.
            Unused::Skip => "write it first, or leave it out and hand the others over by grad_ready",
            _ => "ask for it (get_mut, ptr) and write it, or call set_unused if no rank used it",
        };
        self.refuse_unwritten(param, remedy)
    }

    /// Refuses a gradient that was not written in this pass.
    fn refuse_unwritten(&self, param: usize, remedy: &str) -> Result<()> {
        if self.written.borrow()[param] {
            return Ok(());
        }
        let name = &self.layout.parameters()[param].name;
        let wrong = if self.plan.sums_micro_batches() {
            "its gradient was not written in this micro-batch"
        } else {
            "its gradient was not written in this pass"
        };
        Err(Error::order(format_args!("`{name}`"), wrong, remedy))
    }

    /// Refuses to close a pass in which the trainer forgot a gradient. With sums by the caller, every gradient must be
    /// written and handed over. With `Unused::Refuse`, every gradient must be written. On borrowed memory, at least one
    /// gradient must be written, because zeros would otherwise overwrite all gradients.
    pub(super) fn refuse_forgotten(&mut self) -> Result<()> {
        let (schedule, written) = (&self.run.get_mut().schedule, self.written.get_mut());
        let is_written = |param: usize| written[param] || schedule.has_contributed(param);
        let is_missing = |param: &usize| !is_written(*param) && schedule.takes_part(*param);
        let (parameters, plan) = (self.layout.parameters(), &self.plan);
        let named = |param: usize| format!("`{}`", parameters[param].name);
        if self.policy.sums_by_caller
            && let Some(param) = (0..written.len()).find(is_missing)
        {
            let wrong = "its gradient was not written, but is part of your sum";
            let remedy = "write it, or call Stepper::set_unused if no rank used it";
            return Err(Error::order(named(param), wrong, remedy));
        }
        // Only a hand-over says that the caller's sum is complete. The end of a pass says nothing about the sum.
        let is_unclaimed = |param: &usize| {
            let segment = plan.segment_of(*param);
            let is_summed = segment.len > 0 && !plan.bucket_of(segment).is_local;
            is_summed && written[*param] && schedule.takes_part(*param) && !schedule.is_handed_over(*param)
        };
        if self.policy.sums_by_caller
            && let Some(param) = (0..written.len()).find(is_unclaimed)
        {
            let bucket = plan.segment_of(param).bucket;
            let wrong = "not handed over, so nothing says that your sum of its gradients is there";
            let remedy = if D::TRAINER_IS_A_STREAM {
                format!("call bucket_ready_after({bucket}, event) with the event after it")
            } else {
                format!("call bucket_ready({bucket}) after it")
            };
            return Err(Error::order(format_args!("bucket {bucket}"), wrong, remedy));
        }
        let takes_part = |param: &usize| {
            let segment = plan.segment_of(*param);
            segment.len > 0 && segment.action != SegmentAction::Leave && schedule.takes_part(*param)
        };
        if self.unused == Unused::Refuse
            && let Some(param) = (0..written.len()).filter(takes_part).find(is_missing)
        {
            let wrong = "its gradient was not written in this pass";
            let remedy =
                "ask for it (get_mut, ptr) and write it, freeze it, or call set_unused if no rank used it";
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
        self.run.borrow_mut().touch(Schedule::touch_all)
    }

    pub(super) fn settle_control(&self) -> Result<()> {
        self.refuse_open_pass()?;
        self.run.borrow_mut().touch(Schedule::touch_control)
    }

    /// Refuses further calls after a rescue, because the stepper can then only be read.
    pub(super) fn refuse_rescued(&self) -> Result<()> {
        self.run.borrow().refuse_rescued()
    }

    pub(super) fn refuse_capture(&self) -> Result<()> {
        if self.is_capturing {
            let remedy = "make one pass inside, and everything else after it";
            return Err(Error::order("stepper", "a capture is under way", remedy));
        }
        Ok(())
    }

    pub(super) fn refuse_open_pass(&self) -> Result<()> {
        self.refuse_capture()?;
        if self.run.borrow().schedule.is_open() {
            let remedy = "finish or abandon the pass first";
            return Err(Error::order("stepper", "a pass is open", remedy));
        }
        Ok(())
    }

    pub(super) fn refuse_closed_pass(&self) -> Result<()> {
        self.run.borrow().schedule.require_open()
    }

    pub(super) fn state_called(&self, id: ParamId, name: &str) -> Result<Memory> {
        let param = self.layout.index(id)?;
        let found = self.optimizers.states(param).find(|(known, _, _)| known == name);
        let Some((_, round, k)) = found else {
            let names: Vec<_> = self.optimizers.states(param).map(|(name, _, _)| name).collect();
            let thing = format_args!("state `{name}` of `{}`", self.layout.parameters()[param].name);
            let remedy = if names.is_empty() {
                "use an optimizer that keeps it".to_owned()
            } else {
                format!("use {}", names.join(" or "))
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

fn require(is_kept: bool, what: &str, option: &str) -> Result<()> {
    if is_kept {
        Ok(())
    } else {
        Err(Error::unsupported(what, "this stepper keeps none", format_args!("build it with {option}")))
    }
}

pub(super) fn bucket_numbered(plan: &Plan, bucket: u32) -> Result<&Bucket> {
    plan.buckets().get(bucket as usize).ok_or_else(|| {
        let (wrong, remedy) = match plan.buckets().len() {
            0 => ("this plan has no buckets", "add parameters with elements".to_owned()),
            1 => ("out of range", "use 0, the only bucket".to_owned()),
            count => ("out of range", format!("use 0 to {}", count - 1)),
        };
        Error::layout(format_args!("bucket {bucket}"), wrong, remedy)
    })
}
