//! Passes of several micro-batches. Either each rank accumulates its own gradients, or the gradients of each
//! micro-batch are summed over ranks.
//!
//! This file appends ops only if each micro-batch is summed. All sums run on the reduce stream, so they need no waits
//! between them. Only the trainer waits for the sums of a micro-batch that is not the last one, before it writes the
//! next gradients. The all-reduce among replicas runs only once per pass. (Zhao et al., VLDB 2023, "PyTorch FSDP",
//! 3.3.4.)

use std::num::NonZeroU32;
use std::sync::Arc;

use super::Schedule;
use crate::error::{Error, Result};
use crate::layout::{Bucket, Gradients, Plan};
use crate::op::{Action, Agreed, CollectiveKind, Memory, Span, Stream};

/// Returns what the number of micro-batches contributes to the agreement's number. The result is 0 if the pass has only
/// one micro-batch, or if micro-batches are not summed separately.
pub(super) fn share(plan: &Plan, micro_batches: NonZeroU32) -> u64 {
    let is_summed_apart = plan.sums_micro_batches() && micro_batches > NonZeroU32::MIN;
    if is_summed_apart { Agreed::Loaded.share(micro_batches.get().into()) } else { 0 }
}

impl Schedule {
    /// Begins the next micro-batch: the trainer may access every parameter again. If each micro-batch is summed, first
    /// launches the remaining buckets, with zeros for gradients that were not handed over.
    ///
    /// # Errors
    /// `Order` if no pass is open, or if the current micro-batch is the last one.
    pub fn next_micro_batch(&mut self) -> Result<()> {
        self.require_next_micro_batch()?;
        if self.plan.sums_micro_batches() {
            while let Some(bucket) = self.readiness.take_next(true) {
                self.launch(bucket, false);
            }
            self.readiness.keep_contributions();
        }
        self.micro_batches_left -= 1;
        self.readiness.go_on();
        Ok(())
    }

    /// Returns an error unless a pass is open and has a further micro-batch.
    pub(crate) fn require_next_micro_batch(&self) -> Result<()> {
        self.require_open()?;
        match self.micro_batches_left {
            0 => Err(Error::order("micro-batch", "this is the last one of the pass", "finish the pass")),
            _ => Ok(()),
        }
    }

    /// Returns an error unless a pass is open and is at its last micro-batch.
    pub(crate) fn require_last_micro_batch(&self) -> Result<()> {
        self.require_open()?;
        if self.micro_batches_left > 0 {
            let left = self.micro_batches_left;
            let wrong = format_args!("not at its last micro-batch, {left} to go");
            return Err(Error::order("pass", wrong, "call next_micro_batch, or abandon the pass"));
        }
        Ok(())
    }

    /// Returns whether this rank had a gradient of the parameter in an earlier micro-batch of the open pass. Returns
    /// false unless each micro-batch is summed.
    pub(crate) fn has_contributed(&self, param: usize) -> bool {
        self.open && self.readiness.has_contributed(param)
    }

    pub(crate) fn is_last_micro_batch(&self) -> bool {
        self.micro_batches_left == 0
    }

    /// Sums a sharded bucket over ranks in a micro-batch that is not the last one. Adds the sum of this rank's shard to
    /// the earlier sums, and zeroes or releases the gradients.
    pub(super) fn sum_micro_batch(&mut self, bucket: u32) {
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        if described.is_local || described.shared_len() == 0 || !self.is_stepped(bucket) {
            return;
        }
        self.collect(bucket, Stream::Reduce);
        let (whole, src) = (Span::shared(Memory::Grads, described), Span::summed(described));
        self.collective(Stream::Reduce, CollectiveKind::ReduceScatter, Some(bucket), [whole, src]);
        let dst = Span::summed_in(Memory::Sums, described);
        let is_first = self.micro_batches_left + 1 == self.opening.micro_batches.get();
        // The first sums are copied, because adding them to zeros would lose the sign of a negative zero.
        let action =
            if is_first { Action::Copy { bucket, src, dst } } else { Action::Add { bucket, src, dst } };
        self.emitter.emit(Stream::Reduce, action);
        match plan.gradients() {
            Gradients::Release => self.emitter.emit(Stream::Reduce, Action::Release(whole)),
            Gradients::Zero => self.emitter.emit(Stream::Reduce, Action::Zero(whole)),
            Gradients::Keep | Gradients::Average => {}
        }
        self.accesses[bucket as usize].summed = Some(self.emitter.record(Stream::Reduce));
        self.reshard(bucket);
    }

    /// Adds the sums of the earlier micro-batches to the sums of the last micro-batch.
    pub(super) fn add_sums(&mut self, bucket: u32, described: &Bucket) {
        let has_sums = self.plan.sums_micro_batches() && self.opening.micro_batches > NonZeroU32::MIN;
        if has_sums && described.shared_len() > 0 {
            let [src, dst] = [Memory::Sums, Memory::Grads].map(|memory| Span::summed_in(memory, described));
            self.emitter.emit(Stream::Reduce, Action::Add { bucket, src, dst });
        }
    }
}
