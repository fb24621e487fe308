//! Collectives of a sharded plan: gradients to the rank that steps them, stepped parameters back to all, and the numbers
//! that ranks decide by.
//!
//! Without shards, nothing here writes an op but the all-reduce of a bucket.

use std::sync::Arc;

use super::Schedule;
use super::emitter::Mark;
use crate::layout::Gradients;
use crate::op::{Action, CollectiveKind, Group, Memory, Span, Stream};

impl Schedule {
    /// Sums a bucket over ranks: by an all-reduce, or for a sharded plan by a reduce-scatter, and an all-reduce of the
    /// counts of ranks.
    pub(super) fn reduce(&mut self, bucket: u32) -> Mark {
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        if !plan.is_sharded() {
            let span = Span::bucket(described);
            return self.collective(Stream::Reduce, CollectiveKind::AllReduce, Some(bucket), [span; 2]);
        }
        let (whole, shard) = (Span::shared(Memory::Grads, described), Span::summed(described));
        let tail = Span::tail(Memory::Grads, described);
        // A frozen bucket comes here for its counts alone.
        let steps = self.is_stepped(bucket) || tail.bytes() == 0;
        if steps {
            let kind = CollectiveKind::ReduceScatter;
            self.collective(Stream::Reduce, kind, Some(bucket), [whole, shard]);
            self.add_sums(bucket, described);
            if plan.replicas() > 1 {
                let (group, kind) = (Group::Replicas, CollectiveKind::AllReduce);
                self.collective_among(group, Stream::Reduce, kind, Some(bucket), [shard; 2]);
            }
            self.end_others(Span::others(Memory::Grads, described));
        }
        if tail.bytes() > 0 {
            // Counts alone go the way of the sums that other ranks make, if those have not frozen the bucket: they meet.
            let groups: &[Group] = match steps || plan.replicas() == 1 {
                true => &[Group::World],
                false => &[Group::Shards, Group::Replicas],
            };
            for group in groups {
                let kind = CollectiveKind::AllReduce;
                self.collective_among(*group, Stream::Reduce, kind, Some(bucket), [tail; 2]);
            }
        }
        self.emitter.end(Stream::Reduce)
    }

    /// Does with the gradients that other ranks step what the step does with this rank's.
    fn end_others(&mut self, others: [Span; 2]) {
        let end: fn(Span) -> Action = match self.plan.gradients() {
            Gradients::Release => Action::Release,
            Gradients::Zero => Action::Zero,
            Gradients::Keep | Gradients::Average => return,
        };
        let others = others.into_iter().filter(|other| other.bytes() > 0);
        others.for_each(|other| self.emitter.emit(Stream::Reduce, end(other)));
    }

    /// Brings the stepped shards of a bucket to all ranks, after this rank's step. Returns what the next access waits for.
    pub(super) fn gather(&mut self, bucket: u32, stepped: Mark) -> Mark {
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        if !plan.is_sharded() || described.is_local || plan.shards_params() {
            return stepped;
        }
        self.emitter.after(Stream::Gather, &[Some(stepped)]);
        if !plan.is_offloaded() {
            // Otherwise the upload has.
            self.after_readers(Stream::Gather, bucket);
        }
        self.all_gather(bucket)
    }

    /// Makes a stream wait for the trainer, which may read what this pass does not step, before that is written once more, with
    /// the same values.
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

    /// Adds up the ranks' sums of squares, of the pass or of one bucket, and finds the largest magnitude.
    pub(super) fn share_norm(&mut self, stream: Stream, bucket: Option<u32>) {
        let of_block = |span: Span| bucket.map_or(span, |bucket| span.of_control_block(bucket));
        let parts = [(CollectiveKind::Sum64, Span::SQUARES), (CollectiveKind::Max32, Span::LARGEST)];
        self.share(stream, bucket, &parts.map(|(kind, span)| (kind, of_block(span))));
    }

    /// The stream on which ranks combine numbers in the middle of a bucket's step, where it holds up no next sum if it can.
    /// Ranks may launch a bucket at different moments between their unshards, so these keep the gather stream to themselves.
    pub(super) fn stream_beside_steps(&self) -> Stream {
        if self.plan.shards_params() { Stream::Reduce } else { Stream::Gather }
    }

    /// Runs a bucket's step up to its last norms of whole parameters, which ranks add up from those of their parts.
    pub(super) fn measure(&mut self, bucket: u32) {
        for stage in 0..self.shared_norms[bucket as usize].len() {
            let span = self.shared_norms[bucket as usize][stage];
            self.emitter.emit(Stream::Optim, Action::Measure { bucket, stage: stage as u32 });
            self.share(self.stream_beside_steps(), Some(bucket), &[(CollectiveKind::Sum64, span)]);
        }
    }

    /// Finds the first bucket that was not finite on any rank, after all steps.
    pub(super) fn share_nonfinite(&mut self) {
        self.share(Stream::Gather, None, &[(CollectiveKind::Min32, Span::NONFINITE)]);
    }

    /// Combines numbers of the control block over ranks, between two ops of the optim stream.
    fn share(&mut self, stream: Stream, bucket: Option<u32>, parts: &[(CollectiveKind, Span)]) {
        if !self.plan.is_sharded() {
            return;
        }
        let ready = self.emitter.end(Stream::Optim);
        self.emitter.after(stream, &[Some(ready)]);
        let shared =
            parts.iter().map(|(kind, span)| self.collective(stream, *kind, bucket, [*span; 2])).last();
        self.emitter.after(Stream::Optim, &[shared]);
    }
}
