//! Collectives of a sharded plan: reduce-scatters of gradients, all-gathers of stepped parameters, and reductions of
//! integers in control memory (`Sum64`, `Max32`, `Min32`), such as those of the global norm. This file also appends the
//! all-gathers that the trainer requests.
//!
//! If a plan has no shards, this file appends only the all-reduce of each bucket. The trainer unshards a bucket before
//! use and reshards the bucket afterwards. Unshards and reshards run on the gather stream in the order of the trainer's
//! calls, so only the buckets that the trainer has unsharded are full. On the host, a reshard frees the memory pages of
//! the other ranks' shards, and the addresses stay the same. (Zhao et al., VLDB 2023, "PyTorch FSDP".)

use std::sync::Arc;

use crate::layout::Gradients;
use crate::op::{Action, CollectiveKind, Group, Memory, Span, Stream};
use crate::schedule::emitter::Mark;
use crate::schedule::{LastAccess, Schedule, unused};

impl Schedule {
    /// Sums a bucket over ranks by an all-reduce. In a sharded plan, reduce-scatters the gradients and all-reduces the
    /// tail block instead.
    pub(super) fn reduce(&mut self, bucket: u32) -> Mark {
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        if !plan.is_sharded() {
            let span = Span::bucket(described);
            self.collective(Stream::Reduce, CollectiveKind::AllReduce, Some(bucket), [span; 2]);
            return self.emitter.end(Stream::Reduce);
        }
        let (whole, shard) = (Span::shared(Memory::Grads, described), Span::summed(described));
        let tail = Span::tail(Memory::Grads, described);
        // A frozen bucket is reduced only for its counts.
        let steps = self.is_stepped(bucket) || tail.bytes() == 0;
        // If true, the counts directly follow the reduce-scatter, so both are one launch.
        let is_joined = steps && plan.replicas() == 1;
        if steps {
            let kind = CollectiveKind::ReduceScatter;
            self.collective(Stream::Reduce, kind, Some(bucket), [whole, shard]);
            if is_joined {
                self.share_counts(bucket, &[Group::World], tail);
            }
            self.add_sums(bucket, described);
            if plan.replicas() > 1 {
                let (group, kind) = (Group::Replicas, CollectiveKind::AllReduce);
                self.collective_among(group, Stream::Reduce, kind, Some(bucket), [shard; 2]);
            }
            self.end_others(Span::others(Memory::Grads, described));
        }
        if !is_joined {
            // Other ranks may not have frozen the bucket. If this rank sums only the counts, it does so in the groups
            // of the other ranks' sums, so that the ranks meet in a call and detect the difference.
            let is_world = steps || plan.replicas() == 1;
            let groups: &[Group] = if is_world { &[Group::World] } else { &[Group::Shards, Group::Replicas] };
            self.share_counts(bucket, groups, tail);
        }
        self.emitter.end(Stream::Reduce)
    }

    /// All-reduces a bucket's tail block. The tail block counts the ranks that have each gradient, the ranks that have
    /// data, or both.
    fn share_counts(&mut self, bucket: u32, groups: &[Group], tail: Span) {
        for group in groups.iter().filter(|_| tail.bytes() > 0) {
            let kind = CollectiveKind::AllReduce;
            self.collective_among(*group, Stream::Reduce, kind, Some(bucket), [tail; 2]);
        }
    }

    /// Zeroes or releases the gradients that other ranks step.
    fn end_others(&mut self, others: [Span; 2]) {
        let end: fn(Span) -> Action = match self.plan.gradients() {
            Gradients::Release => Action::Release,
            Gradients::Zero => Action::Zero,
            Gradients::Keep | Gradients::Average => return,
        };
        let others = others.into_iter().filter(|other| other.bytes() > 0);
        others.for_each(|other| self.emitter.emit(Stream::Reduce, end(other)));
    }

    /// All-gathers the stepped shards of a bucket, after this rank's step. Returns the mark for which the next access
    /// waits.
    pub(super) fn gather(&mut self, bucket: u32, stepped: Mark) -> Mark {
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        if !plan.is_sharded() || described.is_local || plan.shards_params() {
            return stepped;
        }
        self.emitter.after(Stream::Gather, &[Some(stepped)]);
        if !plan.is_offloaded() {
            // With offload, the upload has already waited for the readers.
            self.after_readers(Stream::Gather, bucket);
        }
        self.all_gather(bucket)
    }

    /// Makes a stream wait for the trainer's reads of parameters that this pass does not step. This wait is needed
    /// because the stream's next op writes these parameters again, with the same values.
    pub(super) fn after_readers(&mut self, stream: Stream, bucket: u32) {
        let plan = Arc::clone(&self.plan);
        let is_readable = plan.segments_of(&plan.buckets()[bucket as usize]).iter().any(|segment| {
            self.is_frozen(segment.param as usize) || self.readiness.is_left_out(segment.param as usize)
        });
        if is_readable {
            let read = self.trainer_on(stream, bucket, &[]);
            self.emitter.after(stream, &[read]);
        }
    }

    /// Adds up the sums of squares over ranks, and finds the largest magnitude over ranks. If `bucket` is `None`,
    /// combines these numbers for each clip set of the pass.
    pub(super) fn share_norm(&mut self, stream: Stream, bucket: Option<u32>) {
        let sets = if bucket.is_some() { 0 } else { self.plan.max_norms().len() as u32 };
        let parts = [(CollectiveKind::Sum64, Span::SQUARES), (CollectiveKind::Max32, Span::LARGEST)];
        let of_block = |block: Option<u32>| {
            parts.map(|(kind, span)| (kind, block.map_or(span, |block| span.of_control_block(block))))
        };
        self.share(stream, bucket, std::iter::once(bucket).chain((0..sets).map(Some)).flat_map(of_block));
    }

    /// Returns the stream on which ranks combine numbers in the middle of a bucket's step. The result is the gather
    /// stream if possible, so that the next sum is not delayed. With `Fsdp`, the result is the reduce stream, because
    /// the gather stream also carries unshards. One rank may launch a bucket before an unshard, and another rank may
    /// launch the same bucket after the unshard. The order of collectives on the gather stream would then differ
    /// between ranks.
    pub(super) fn stream_beside_steps(&self) -> Stream {
        if self.plan.shards_params() { Stream::Reduce } else { Stream::Gather }
    }

    /// Appends the `Measure` ops of a bucket's step. In each `Measure` op, a rank computes norms of its shards. The
    /// ranks then add up these norms, and the sums are the norms of full parameters.
    pub(super) fn measure(&mut self, bucket: u32) {
        for stage in 0..self.shared_norms[bucket as usize].len() {
            let span = self.shared_norms[bucket as usize][stage];
            self.emitter.emit(Stream::Optim, Action::Measure { bucket, stage: stage as u32 });
            self.share(self.stream_beside_steps(), Some(bucket), [(CollectiveKind::Sum64, span)]);
        }
    }

    /// Finds the first bucket with a non-finite gradient on any rank. This op runs after all steps.
    pub(super) fn share_nonfinite(&mut self) {
        self.share(Stream::Gather, None, [(CollectiveKind::Min32, Span::NONFINITE)]);
    }

    /// Combines numbers of the control block over ranks, between two ops of the optim stream.
    fn share(
        &mut self,
        stream: Stream,
        bucket: Option<u32>,
        parts: impl IntoIterator<Item = (CollectiveKind, Span)>,
    ) {
        if !self.plan.is_sharded() {
            return;
        }
        let ready = self.emitter.end(Stream::Optim);
        self.emitter.after(stream, &[Some(ready)]);
        parts.into_iter().for_each(|(kind, span)| self.collective(stream, kind, bucket, [span; 2]));
        let shared = self.emitter.end(stream);
        self.emitter.after(Stream::Optim, &[Some(shared)]);
    }
}

impl Schedule {
    /// Returns whether this rank has all parameters of the bucket, and not only its shard.
    pub fn is_full(&self, bucket: u32) -> bool {
        !self.can_reshard(bucket) || self.accesses[bucket as usize].is_unsharded
    }

    /// Returns the buckets that are unsharded.
    pub fn unsharded(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.accesses).filter_map(|(bucket, access)| access.is_unsharded.then_some(bucket))
    }

    /// Returns whether the bucket is unsharded and the trainer has waited for its all-gather. The trainer may then be
    /// reading the bucket.
    pub(crate) fn may_be_read(&self, bucket: u32) -> bool {
        let gathered = self.gathered[bucket as usize].filter(|_| self.accesses[bucket as usize].is_unsharded);
        gathered.is_some_and(|gathered| self.emitter.is_after(Stream::Compute, gathered.ticket))
    }

    /// Returns whether the bucket was handed over in the open pass. No rank may unshard such a bucket again, because
    /// ranks hand a bucket over at different times. A frozen bucket is never handed over, so backward may still unshard
    /// it.
    pub fn is_bucket_handed_over(&self, bucket: u32) -> bool {
        self.open && !self.is_left_out(bucket) && self.readiness.is_launched(bucket)
    }

    /// All-gathers the shards of a bucket, after the bucket's last step. All ranks must unshard buckets in the same
    /// order. Between passes, the ranks compare `agreement` in the all-gather. Does nothing if the bucket is full.
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
            self.emitter.after(Stream::Gather, &[written, self.accesses[bucket as usize].consumed]);
        }
        let gathered = self.all_gather(bucket);
        if !self.plan.is_offloaded() {
            // A step must not write while the all-gather reads.
            self.gathered[bucket as usize] = Some(gathered);
        }
        self.accesses[bucket as usize].stepped = Some(gathered);
        self.accesses[bucket as usize].is_unsharded = true;
    }

    /// Frees the other ranks' shards of a bucket, after the trainer's last access. Does nothing if the rank has only
    /// its own shard.
    pub fn reshard(&mut self, bucket: u32) {
        if !std::mem::take(&mut self.accesses[bucket as usize].is_unsharded) {
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
            self.accesses[bucket as usize].released = Some(self.emitter.record(Stream::Gather));
        }
    }

    /// Frees the other ranks' shards of all buckets.
    pub(super) fn reshard_all(&mut self) {
        for bucket in 0..self.accesses.len() as u32 {
            self.reshard(bucket);
        }
    }

    /// Marks every bucket as resharded. The stepper calls this method after a failure, when no op is running any more.
    pub(crate) fn forget_unsharded(&mut self) {
        self.accesses.iter_mut().for_each(|access| access.is_unsharded = false);
    }

    /// Sends the shards of a bucket's parameters, and of their copies, to all ranks.
    pub(super) fn all_gather(&mut self, bucket: u32) -> Mark {
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        for memory in Memory::sent_of(described) {
            let spans = [Span::shard(memory, described), Span::shared(memory, described)];
            self.collective(Stream::Gather, CollectiveKind::AllGather, Some(bucket), spans);
        }
        self.emitter.end(Stream::Gather)
    }

    /// Returns a mark of the trainer's position, or `None` if `stream` is already ordered after the trainer's last
    /// access to the bucket's parameters. `stream` is about to wait for `marks`, so these marks count as already waited
    /// for.
    pub(super) fn trainer_on(&mut self, stream: Stream, bucket: u32, marks: &[Option<Mark>]) -> Option<Mark> {
        let LastAccess { touched, frozen_touched, .. } = self.accesses[bucket as usize];
        let is_after = |touch: &_| {
            let by_marks = marks.iter().flatten().any(|mark| mark.is_after(*touch));
            by_marks || self.emitter.is_after(stream, *touch)
        };
        let is_known = !self.policy.trainer_is_a_stream && [touched, frozen_touched].iter().all(is_after);
        (!is_known).then(|| self.emitter.record(Stream::Compute))
    }

    pub(super) fn can_reshard(&self, bucket: u32) -> bool {
        let described = &self.plan.buckets()[bucket as usize];
        self.plan.shards_params() && !described.is_local && described.len > 0
    }
}
