//! Appends a bucket's reduce once the bucket's gradients are complete on this rank. Appends the bucket's norm and step
//! once the mode allows them.
//!
//! Other files of this module append the ops of shards, micro-batches, offload and unused parameters. A mark follows
//! the last op that accesses a bucket, and the next access waits only for this mark.

use std::ops::Range;
use std::sync::Arc;

use super::emitter::Mark;
use super::{Decision, Mode, NEVER, Schedule, unused};
use crate::layout::{Gradients, Master, Segment};
use crate::op::{Action, CollectiveKind, Group, Memory, Phase, Span, Stream};

impl Schedule {
    /// Reduces a bucket when its gradients are complete on this rank. Appends the norm and the step if the mode allows
    /// them now. If the caller sums gradients and `awaits` is true, the caller's sum may still be incomplete.
    pub(super) fn launch(&mut self, bucket: u32, awaits: bool) {
        if self.is_left_out(bucket) {
            if awaits {
                // No op steps this bucket, but the trainer and a later sum must wait for this sum.
                let stream = self.await_sum(bucket);
                let summed = Some(self.emitter.record(stream));
                self.accesses[bucket as usize].summed = summed;
                self.accesses[bucket as usize].consumed = summed;
            }
            return;
        }
        if !self.is_last_micro_batch() {
            return self.sum_micro_batch(bucket);
        }
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        if described.is_local {
            // A local bucket is not summed over ranks. If steps come after the last reduce, all work of this bucket
            // comes after it too.
            if self.policy.mode == Mode::Eager && self.is_stepped(bucket) {
                let collected = self.collect_local(bucket);
                self.emitter.after(Stream::Optim, &[collected]);
                self.step(bucket..bucket + 1);
            }
            return;
        }
        if self.policy.sums_by_caller {
            self.reduced = self.take_sum(bucket, awaits);
        } else {
            self.collect(bucket, Stream::Reduce);
            let reduced = self.reduce(bucket);
            self.reduced = Some(self.download(bucket, Some(reduced)).unwrap_or(reduced));
        }
        self.reshard(bucket);
        if !self.is_stepped(bucket) {
            if described.len > 0 {
                // This is a frozen bucket that carries the count of ranks. It has no later op in this pass, so the
                // trainer and the next reduce wait for this reduce. The bucket's step in an earlier pass may still run,
                // and the trainer waits for that step separately.
                self.accesses[bucket as usize].summed = self.reduced;
                self.accesses[bucket as usize].consumed = self.reduced;
            }
            return;
        }
        match self.policy.mode {
            Mode::Sequential => {}
            Mode::Eager => {
                self.emitter.after(Stream::Optim, &[self.reduced]);
                if self.policy.measures() {
                    self.emitter.emit(Stream::Optim, Action::Norm { bucket });
                }
                self.step(bucket..bucket + 1);
            }
            Mode::Normed => {
                self.emitter.after(Stream::Optim, &[self.reduced]);
                self.emitter.emit(Stream::Optim, Action::Norm { bucket });
            }
        }
    }

    /// Appends a wait for the caller's sum of a bucket, on the stream that reads the bucket's gradients first. If
    /// `awaits` is true, the stream waits for the caller's event or function. If `awaits` is false, the trainer's
    /// earlier work includes the sum, and the stream waits for this work. Returns the mark for which the step must
    /// wait, or `None` if the step runs on the same stream.
    fn take_sum(&mut self, bucket: u32, awaits: bool) -> Option<Mark> {
        if !awaits {
            return self.collect_local(bucket);
        }
        self.await_sum(bucket);
        self.download(bucket, None)
    }

    /// Appends a wait for the caller's event or function, on the stream that reads the gradients first. Returns that
    /// stream.
    fn await_sum(&mut self, bucket: u32) -> Stream {
        let stream = self.stream_of_gradients();
        self.emitter.emit(stream, Action::AwaitSum { bucket });
        // Later ops come after the trainer's accesses, although the trainer's stream gets no Record here. The next
        // `touch_all` must therefore not return early.
        self.all_touched = NEVER;
        stream
    }

    /// For a bucket that no op sums, returns the stream that reads the gradients first.
    pub(super) fn stream_of_gradients(&self) -> Stream {
        if self.plan.is_offloaded() { Stream::Download } else { Stream::Optim }
    }

    /// Appends a wait for the trainer's writes of a bucket's gradients, on the stream that reads these gradients first.
    /// Appends no sum over ranks. Returns the mark for which the step must wait, or `None` if the step runs on the same
    /// stream.
    fn collect_local(&mut self, bucket: u32) -> Option<Mark> {
        self.collect(bucket, self.stream_of_gradients());
        self.download(bucket, None)
    }

    fn collect_locals(&mut self) -> Option<Mark> {
        let plan = Arc::clone(&self.plan);
        let locals = (0..).zip(plan.buckets()).filter(|(_, bucket)| bucket.is_local);
        let mut collected = None;
        for (bucket, _) in locals {
            if self.is_stepped(bucket) {
                collected = self.collect_local(bucket);
            }
        }
        collected
    }

    /// Makes a stream wait until the trainer has written the bucket's gradients. Gradients that were not handed over
    /// are set to zero.
    pub(super) fn collect(&mut self, bucket: u32, stream: Stream) {
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        if described.len > 0 {
            // If the trainer is a stream, the announced access may be in work that was enqueued after the announcement.
            let touched = self.policy.trainer_is_a_stream
                || !self.emitter.is_after(stream, self.accesses[bucket as usize].touched);
            let written = touched.then(|| self.emitter.record(Stream::Compute));
            let access = &self.accesses[bucket as usize];
            let (begun, last) = if plan.is_offloaded() {
                // Begin and steps use the host's memory, so no wait for them is needed.
                (None, access.downloaded)
            } else {
                (self.begun.filter(|_| self.tails && self.is_last_micro_batch()), access.consumed)
            };
            self.emitter.after(stream, &[written, begun, last]);
        }
        if self.opening.joined && described.len > 0 {
            self.emitter.emit(stream, Action::Zero(Span::bucket(described)));
            return;
        }
        if self.policy.sums_by_caller {
            // The caller has already summed the bucket. Steps and norms skip parameters without a gradient.
            return;
        }
        if plan.is_offloaded() && !described.tail.is_empty() && self.is_last_micro_batch() {
            self.emitter.emit(stream, Action::Count(Span::tail(Memory::Grads, described)));
        }
        for segment in plan.segments_of(described) {
            self.contribute_nothing(segment, stream);
        }
    }

    /// Returns whether the pass steps the bucket. The bucket must have elements, and at least one of its parameters
    /// must not be frozen.
    pub(super) fn is_stepped(&self, bucket: u32) -> bool {
        let described = &self.plan.buckets()[bucket as usize];
        // A rank without data does not step its local parameters.
        let rests = described.is_local && self.opening.joined;
        described.len > 0 && !self.readiness.is_bucket_frozen(bucket) && !rests
    }

    /// Steps a bucket, or neighbouring buckets that share a launch. One mark follows all these steps.
    pub(super) fn step(&mut self, buckets: Range<u32>) {
        let (bucket, count) = (buckets.start, buckets.end - buckets.start);
        if self.policy.decision == Decision::EachBucket && !self.plan.buckets()[bucket as usize].is_local {
            self.share_norm(self.stream_beside_steps(), Some(bucket));
            self.emitter.emit(Stream::Optim, Action::Control(Phase::DecideBucket { bucket }));
        }
        self.emitter.after(Stream::Optim, &self.gathered[bucket as usize..buckets.end as usize]);
        self.measure(bucket);
        self.emitter.emit(Stream::Optim, Action::Step { bucket, count });
        if self.plan.gradients_of_step() == Gradients::Release {
            buckets.clone().for_each(|k| self.end_gradients(k, Stream::Optim, Action::Release));
        }
        let stepped = self.emitter.record(Stream::Optim);
        for bucket in buckets.rev() {
            let uploaded = self.upload(bucket, stepped);
            let gathered = self.gather(bucket, uploaded);
            self.accesses[bucket as usize].consumed = Some(stepped);
            self.accesses[bucket as usize].stepped = Some(gathered);
            self.last = Some(gathered);
        }
    }

    /// Zeroes or releases the gradients that this rank has stepped.
    pub(super) fn end_gradients(&mut self, bucket: u32, stream: Stream, end: fn(Span) -> Action) {
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        for run in plan.stepped_gradients(described) {
            self.emitter.emit(stream, end(Span::within(Memory::Grads, described, run.start, run.end)));
        }
    }

    /// Returns whether the pass omits the bucket, because all its parameters are frozen. The bucket that contains the
    /// count of contributing ranks is never omitted.
    pub(super) fn is_left_out(&self, bucket: u32) -> bool {
        let described = &self.plan.buckets()[bucket as usize];
        let carries = described.contributors.is_some()
            && self.plan.carrier().is_some_and(|carrier| carrier.start == described.start);
        self.readiness.is_bucket_frozen(bucket) && !carries
    }

    /// If a parameter was not handed over, sets its gradient and its count in the tail block to zero.
    fn contribute_nothing(&mut self, segment: &Segment, stream: Stream) {
        let param = segment.param as usize;
        if self.readiness.is_contributing(param) {
            return;
        }
        let gradient = Span::segment(Memory::Grads, &self.plan, segment);
        if gradient.bytes() > 0 {
            self.emitter.emit(stream, Action::Zero(gradient));
        }
        let contributes = !self.is_last_micro_batch() || self.readiness.has_contributed(param);
        if let Some(tail) = segment.tail.filter(|_| !contributes) {
            let flag = Span::within(Memory::Grads, self.plan.bucket_of(segment), tail, tail + 1);
            self.emitter.emit(stream, Action::Zero(flag));
        }
    }

    /// Appends all ops that follow the last reduce: the norms in `Sequential` mode, the decision, and the steps.
    pub(super) fn step_all(&mut self) {
        let plan = Arc::clone(&self.plan);
        let buckets = 0..plan.buckets().len() as u32;
        let is_local = |bucket: u32| plan.buckets()[bucket as usize].is_local;
        let offloads = plan.is_offloaded();
        let collected = if offloads { self.collect_locals() } else { None };
        self.emitter.after(Stream::Optim, &[self.reduced, collected]);
        if !offloads {
            self.collect_locals();
        }
        if self.policy.measures() {
            if self.policy.mode == Mode::Sequential {
                for bucket in buckets.clone() {
                    if self.is_stepped(bucket) && !is_local(bucket) {
                        self.emitter.emit(Stream::Optim, Action::Norm { bucket });
                    }
                }
            }
            self.decide();
        }
        // The last bucket holds the first parameters, which the next forward needs first.
        let mut end = buckets.end;
        while let Some(launch) = self.launch_before(end) {
            end = launch.start;
            self.step(launch);
        }
    }

    /// Appends the op that makes the pass's decision, if the pass has a decision. This op waits for the trainer's last
    /// read of the loss scale.
    pub(super) fn decide(&mut self) {
        if self.policy.decision == Decision::EachBucket {
            return;
        }
        self.share_norm(Stream::Reduce, None);
        let action = Action::Control(Phase::Decide);
        if self.policy.decision != Decision::WholePassAndLossScale {
            return self.emitter.emit(Stream::Optim, action);
        }
        // A trainer that is a stream may read the scale until the end of the pass, once it has asked for the address.
        let asked = self.is_loss_scale_touched();
        let touched = asked
            && (self.policy.trainer_is_a_stream
                || !self.emitter.is_after(Stream::Optim, self.loss_scale_touched));
        let touched = touched.then(|| self.emitter.record(Stream::Compute));
        self.emitter.after(Stream::Optim, &[touched]);
        self.decided = Some(self.emitter.emit_marked(Stream::Optim, action));
        self.loss_scale_touched = NEVER;
    }

    /// Broadcasts rank 0's parameters: in one call if they are contiguous and have one type, and otherwise in several
    /// calls.
    pub(super) fn broadcast_all(&mut self) -> Option<Mark> {
        let plan = Arc::clone(&self.plan);
        let masters = Span::elements(Memory::Master, &plan, 0, plan.common_len());
        // Sharded masters need no broadcast. Every rank has written its own shards, and ranks compare what they wrote.
        if !plan.rewrites_params()
            && plan.storages().iter().any(|storage| storage.precision.master != Master::None)
        {
            self.collective(Stream::Reduce, CollectiveKind::Broadcast, None, [masters; 2]);
        }
        let mut sent = false;
        if plan.is_foreign() {
            for bucket in 0..plan.buckets().len() as u32 {
                sent |= self.broadcast_params(bucket);
            }
        } else {
            for params in plan.common_params() {
                let span = Span::elements(Memory::Params, &plan, params.start, params.end);
                sent |= self.broadcast_span(None, span);
            }
        }
        sent.then(|| self.emitter.end(Stream::Reduce))
    }

    /// Broadcasts rank 0's parameters of some buckets. Also broadcasts the buckets' master weights, unless they are
    /// sharded or offloaded.
    pub(super) fn broadcast_buckets(&mut self, buckets: &[u32]) -> Option<Mark> {
        let plan = Arc::clone(&self.plan);
        let mut sent = false;
        for bucket in buckets {
            let described = &plan.buckets()[*bucket as usize];
            let (start, end) = (described.params.start, described.params.end);
            let masters = Span::within(Memory::Master, described, start, end);
            if masters.bytes() > 0 && !described.is_sharded() && !plan.is_offloaded() {
                self.broadcast_span(Some(*bucket), masters);
            }
            sent |= self.broadcast_params(*bucket);
        }
        sent.then(|| self.emitter.end(Stream::Reduce))
    }

    /// Broadcasts rank 0's parameters of one bucket: in one call, or in one call per parameter if they are not
    /// contiguous. Returns false if the bucket has nothing to broadcast.
    fn broadcast_params(&mut self, bucket: u32) -> bool {
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        let mut sent = false;
        let mut send = |span: Span| sent |= span.bytes() > 0 && self.broadcast_span(Some(bucket), span);
        if plan.is_foreign() {
            let segments = plan.segments_of(described).iter();
            segments.for_each(|segment| send(Span::segment(Memory::Params, &plan, segment)));
        } else {
            send(Span::within(Memory::Params, described, described.params.start, described.params.end));
        }
        sent
    }

    /// Broadcasts rank 0's values of a span. Always returns true, so that callers can record that they broadcast
    /// something.
    fn broadcast_span(&mut self, bucket: Option<u32>, span: Span) -> bool {
        // The broadcast uses the groups of the sums that follow. If ranks broadcast different parameters, two ranks
        // then meet in a group with different calls, which is an error. A broadcast to all ranks would instead hang,
        // because it waits for ranks that wait in their groups.
        let of_groups = [Group::Shards, Group::Replicas];
        let groups = if self.plan.replicas() == 1 { &[Group::World][..] } else { &of_groups };
        for group in groups {
            self.collective_among(*group, Stream::Reduce, CollectiveKind::Broadcast, bucket, [span; 2]);
        }
        true
    }

    /// Appends a collective between passes. The collective works on values that the trainer has written to the
    /// gradients' memory. The trainer's next access waits for the collective. The trainer must call
    /// [`touch_all`](Self::touch_all) and [`touch_control`](Self::touch_control) before this call and again after it.
    /// The next `Begin` then waits for the trainer's accesses.
    pub fn exchange(&mut self, kind: CollectiveKind, [src, dst]: [Span; 2], agreement: u64) {
        self.opening.agreement = agreement ^ unused::share(self.late_unused);
        let written = self.emitter.record(Stream::Compute);
        self.emitter.after(Stream::Reduce, &[Some(written)]);
        self.collective(Stream::Reduce, kind, None, [src, dst]);
        self.reduced = Some(self.emitter.end(Stream::Reduce));
        self.emitter.after(Stream::Compute, &[self.reduced]);
    }

    /// Appends a collective without a mark. Consecutive collectives without a mark between them share one launch
    /// ([`Op::joins`](crate::op::Op::joins)). A mark between collectives must therefore depend only on conditions that
    /// are equal on all ranks.
    pub(super) fn collective(
        &mut self,
        stream: Stream,
        kind: CollectiveKind,
        bucket: Option<u32>,
        [src, dst]: [Span; 2],
    ) {
        let group = match kind {
            CollectiveKind::AllReduce | CollectiveKind::Broadcast => Group::World,
            // Replicas have the same shards, so every group computes the same numbers from its shards.
            _ => Group::Shards,
        };
        self.collective_among(group, stream, kind, bucket, [src, dst])
    }

    pub(super) fn collective_among(
        &mut self,
        group: Group,
        stream: Stream,
        kind: CollectiveKind,
        bucket: Option<u32>,
        [src, dst]: [Span; 2],
    ) {
        let sums = matches!(kind, CollectiveKind::AllReduce | CollectiveKind::ReduceScatter);
        let unused = bucket.filter(|_| sums).map_or(0, |k| self.unused_in(k));
        let (pass, agreement) = (self.pass, self.opening.agreement ^ unused::share(unused));
        let action = Action::Collective { kind, group, pass, agreement, bucket, src, dst };
        self.emitter.emit(stream, action);
    }
}
