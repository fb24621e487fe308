//! Sharded buckets of parameters: the trainer unshards one before it needs it, and reshards it afterwards.
//!
//! Both run on the gather stream, in the order of the calls. So no more buckets are full at a time than the trainer
//! asked for. On the host, addresses stay, and the pages of other ranks' shards are freed. (Zhao et al., VLDB 2023,
//! "PyTorch FSDP".)

use std::sync::Arc;

use super::emitter::Mark;
use super::{Schedule, unused};
use crate::op::{Action, CollectiveKind, Memory, Span, Stream};

impl Schedule {
    /// Returns whether this rank has all parameters of the bucket, and not only its shard of them.
    pub fn is_full(&self, bucket: u32) -> bool {
        !self.can_reshard(bucket) || self.unsharded[bucket as usize]
    }

    /// Returns the buckets that are unsharded.
    pub fn unsharded(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.unsharded).filter_map(|(bucket, is_unsharded)| is_unsharded.then_some(bucket))
    }

    /// Returns whether the trainer may be reading a bucket that is unsharded: it has come after the all-gather.
    pub(crate) fn may_be_read(&self, bucket: u32) -> bool {
        let gathered = self.gathered[bucket as usize].filter(|_| self.unsharded[bucket as usize]);
        gathered.is_some_and(|gathered| self.emitter.is_past(Stream::Compute, &gathered))
    }

    /// Returns whether the open pass has handed the bucket over. Ranks may differ in when they do, so none may unshard it again.
    /// A frozen bucket is never handed over, and backward may still go through it.
    pub fn is_launched(&self, bucket: u32) -> bool {
        self.open && !self.is_left_out(bucket) && self.readiness.is_launched(bucket)
    }

    /// Brings all ranks' shards of a bucket together, after their last steps; all ranks say it in the same order.
    /// Between passes they compare `agreement`. It does nothing if the bucket is full.
    pub fn unshard(&mut self, bucket: u32, agreement: u64) {
        if self.is_full(bucket) {
            return;
        }
        if !self.open {
            self.opening.agreement = agreement ^ unused::share(self.late_unused);
        }
        if self.plan.is_offloaded() {
            let uploaded = self.upload_shard(bucket);
            self.emitter.after(Stream::Gather, &[Some(uploaded)]);
        } else {
            let written = self.trainer_on(Stream::Gather, bucket, &[]);
            self.emitter.after(Stream::Gather, &[written, self.consumed[bucket as usize]]);
        }
        let gathered = self.all_gather(bucket);
        if !self.plan.is_offloaded() {
            // A step does not write what an all-gather reads.
            self.gathered[bucket as usize] = Some(gathered);
        }
        self.stepped[bucket as usize] = Some(gathered);
        self.unsharded[bucket as usize] = true;
    }

    /// Gives the other ranks' shards of a bucket up, after the trainer's last touch. Does nothing if the rank has only its own.
    pub fn reshard(&mut self, bucket: u32) {
        if !std::mem::take(&mut self.unsharded[bucket as usize]) {
            return;
        }
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        let read = self.trainer_on(Stream::Gather, bucket, &[]);
        self.emitter.after(Stream::Gather, &[read]);
        for memory in Memory::sent_of(described) {
            for freed in Span::resharded(memory, &plan, described).into_iter().filter(|span| span.bytes() > 0)
            {
                self.emitter.emit(Stream::Gather, Action::Release(freed));
            }
        }
        if plan.is_offloaded() {
            self.released[bucket as usize] = Some(self.emitter.record(Stream::Gather));
        }
    }

    /// Gives all buckets up.
    pub(super) fn reshard_all(&mut self) {
        for bucket in 0..self.unsharded.len() as u32 {
            self.reshard(bucket);
        }
    }

    /// Marks every bucket as resharded: gathers have failed, and nothing runs.
    pub(crate) fn forget_unsharded(&mut self) {
        self.unsharded.fill(false);
    }

    /// Sends the shards of a bucket's parameters, and of their copies, to all ranks.
    pub(super) fn all_gather(&mut self, bucket: u32) -> Mark {
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        let gather = |memory: Memory| {
            let spans = [Span::shard(memory, described), Span::shared(memory, described)];
            self.collective(Stream::Gather, CollectiveKind::AllGather, Some(bucket), spans)
        };
        let last = Memory::sent_of(described).map(gather).last();
        last.unwrap_or_else(|| self.emitter.end(Stream::Gather))
    }

    /// The trainer's position, if it has touched the bucket's parameters since the stream last came after it, by these marks too.
    pub(super) fn trainer_on(&mut self, stream: Stream, bucket: u32, marks: &[Option<Mark>]) -> Option<Mark> {
        let touches = [self.touched[bucket as usize], self.frozen_touched[bucket as usize]];
        let is_after = |touch: &_| {
            let by_marks = marks.iter().flatten().any(|mark| mark.is_after(*touch));
            by_marks || self.emitter.is_after(stream, *touch)
        };
        let is_known = !self.policy.trainer_is_a_stream && touches.iter().all(is_after);
        (!is_known).then(|| self.emitter.record(Stream::Compute))
    }

    pub(super) fn can_reshard(&self, bucket: u32) -> bool {
        let described = &self.plan.buckets()[bucket as usize];
        self.plan.shards_params() && !described.is_local && described.len > 0
    }
}
