//! Writes the ops of a bucket whose gradients are final on this rank: reduced, measured, stepped, as far as the mode
//! goes.
//!
//! The only code that writes work for the reduce and optim streams. Every last access to a bucket gets a mark, because
//! the next access waits for nothing else.

use std::sync::Arc;

use super::emitter::Mark;
use super::{Mode, NEVER, Schedule};
use crate::layout::{Gradients, Master, Segment};
use crate::op::{Action, CollectiveKind, Memory, Phase, Span, Stream};

impl Schedule {
    /// The bucket's gradients are final on this rank: reduce them, and go as far as the mode allows.
    pub(super) fn launch(&mut self, bucket: u32) {
        if self.is_left_out(bucket) {
            return;
        }
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        if described.is_local {
            // Not summed with other ranks. If steps come after the last reduce, all of it does.
            if self.policy.mode == Mode::Eager && self.is_stepped(bucket) {
                self.collect(bucket, Stream::Optim);
                self.step(bucket);
            }
            return;
        }
        let span = Span::bucket(&plan, described);
        self.collect(bucket, Stream::Reduce);
        self.reduced = Some(self.collective(CollectiveKind::AllReduce, Some(bucket), span));
        if !self.is_stepped(bucket) {
            if described.len > 0 {
                // A frozen carrier: no later op of this pass exists that the trainer and the next reduce could wait
                // for.
                self.stepped[bucket as usize] = self.reduced;
            }
            return;
        }
        match self.policy.mode {
            Mode::Sequential => {}
            Mode::Eager => {
                self.emitter.after(Stream::Optim, &[self.reduced]);
                if self.policy.norm {
                    self.emitter.emit(Stream::Optim, Action::Norm { bucket });
                }
                self.step(bucket);
            }
            Mode::Normed => {
                self.emitter.after(Stream::Optim, &[self.reduced]);
                self.emitter.emit(Stream::Optim, Action::Norm { bucket });
            }
        }
    }

    /// Makes a stream wait for the trainer's gradients, and writes zeros for missing ones.
    fn collect(&mut self, bucket: u32, stream: Stream) {
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        if described.len > 0 {
            // Work given to a stream since it announced a touch may be the touch itself.
            let touched = self.policy.trainer_is_a_stream
                || !self.emitter.is_after(stream, self.touched[bucket as usize]);
            let written = touched.then(|| self.emitter.record(Stream::Compute));
            let begun = self.begun.filter(|_| self.tails);
            self.emitter.after(stream, &[written, begun, self.stepped[bucket as usize]]);
        }
        if self.opening.joined && described.len > 0 {
            self.emitter.emit(stream, Action::Zero(Span::bucket(&plan, described)));
            return;
        }
        for segment in plan.segments_of(described) {
            if !self.readiness.is_handed_over(segment.param as usize) {
                self.contribute_nothing(segment, stream);
            }
        }
    }

    /// Whether a pass steps the bucket: it has elements, and not all of them are frozen.
    pub(super) fn is_stepped(&self, bucket: u32) -> bool {
        let described = &self.plan.buckets()[bucket as usize];
        // A rank without data leaves what is its own alone.
        let rests = described.is_local && self.opening.joined;
        described.len > 0 && !self.readiness.is_bucket_frozen(bucket) && !rests
    }

    pub(super) fn step(&mut self, bucket: u32) {
        if self.policy.clip_per_bucket && !self.plan.buckets()[bucket as usize].is_local {
            self.emitter.emit(Stream::Optim, Action::Control(Phase::DecideBucket { bucket }));
        }
        self.emitter.emit(Stream::Optim, Action::Step { bucket });
        if self.plan.gradients() == Gradients::Release {
            for run in self.plan.stepped_gradients(&self.plan.buckets()[bucket as usize]) {
                let span = Span::elements(Memory::Grads, &self.plan, run.start, run.end);
                self.emitter.emit(Stream::Optim, Action::Release(span));
            }
        }
        let mark = self.emitter.record(Stream::Optim);
        self.stepped[bucket as usize] = Some(mark);
        self.last = Some(mark);
    }

    /// Whether the pass goes without the bucket: all of it is frozen, on every rank, since they agree on that. The one
    /// that carries the count of contributing ranks is always reduced.
    pub(super) fn is_left_out(&self, bucket: u32) -> bool {
        let described = &self.plan.buckets()[bucket as usize];
        let carries = described.contributors.is_some()
            && self.plan.carrier().is_some_and(|carrier| carrier.start == described.start);
        self.readiness.is_bucket_frozen(bucket) && !carries
    }

    /// Zeros for a parameter that was not handed over, in its gradient and in its tail.
    fn contribute_nothing(&mut self, segment: &Segment, stream: Stream) {
        let gradient = Span::segment(Memory::Grads, &self.plan, segment);
        if gradient.bytes() > 0 {
            self.emitter.emit(stream, Action::Zero(gradient));
        }
        if let Some(tail) = segment.tail {
            let flag = Span::elements(Memory::Grads, &self.plan, tail, tail + 1);
            self.emitter.emit(stream, Action::Zero(flag));
        }
    }

    /// Writes all ops after the last reduce: norms if they are not done yet, the decision, the steps.
    pub(super) fn step_all(&mut self) {
        let plan = Arc::clone(&self.plan);
        let buckets = 0..plan.buckets().len() as u32;
        let is_local = |bucket: u32| plan.buckets()[bucket as usize].is_local;
        self.emitter.after(Stream::Optim, &[self.reduced]);
        for bucket in buckets.clone().filter(|bucket| is_local(*bucket)) {
            if self.is_stepped(bucket) {
                self.collect(bucket, Stream::Optim);
            }
        }
        if self.policy.norm {
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
        for bucket in buckets.rev() {
            if self.is_stepped(bucket) {
                self.step(bucket);
            }
        }
    }

    /// Decides on the whole pass, if the policy asks for it, after the trainer's last read of the loss scale.
    pub(super) fn decide(&mut self) {
        if self.policy.clip_per_bucket {
            return;
        }
        let action = Action::Control(Phase::Decide);
        if !self.policy.dynamic_loss_scale {
            return self.emitter.emit(Stream::Optim, action);
        }
        // A stream that has asked where the scale lies may read it up to the end of its pass.
        let asked = self.is_loss_scale_touched();
        let touched = asked
            && (self.policy.trainer_is_a_stream
                || !self.emitter.is_after(Stream::Optim, self.loss_scale_touched));
        let touched = touched.then(|| self.emitter.record(Stream::Compute));
        self.emitter.after(Stream::Optim, &[touched]);
        self.decided = Some(self.emitter.emit_marked(Stream::Optim, action));
        self.loss_scale_touched = NEVER;
    }

    /// Rank 0's parameters for all: at once, or one by one where they lie apart.
    pub(super) fn broadcast(&mut self) -> Option<Mark> {
        let plan = Arc::clone(&self.plan);
        let whole = |memory| Span::elements(memory, &plan, 0, plan.common_len());
        if plan.storage().precision.master != Master::None {
            self.collective(CollectiveKind::Broadcast, None, whole(Memory::Master));
        }
        if !plan.is_foreign() {
            return Some(self.collective(CollectiveKind::Broadcast, None, whole(Memory::Params)));
        }
        let mut received = None;
        for segment in plan.segments().iter().filter(|segment| segment.len > 0) {
            let span = Span::segment(Memory::Params, &plan, segment);
            received = Some(self.collective(CollectiveKind::Broadcast, Some(segment.bucket), span));
        }
        received
    }

    /// Broadcasts, between passes, the words that rank 0's trainer wrote to these gradients; the trainer's next access
    /// waits for it. The trainer announces its access with [`touch_all`](Self::touch_all) and
    /// [`touch_control`](Self::touch_control), which the next Begin obeys, before this call and again after it.
    pub fn exchange(&mut self, span: Span, agreement: u64) {
        self.opening.agreement = agreement;
        let written = self.emitter.record(Stream::Compute);
        self.emitter.after(Stream::Reduce, &[Some(written)]);
        self.reduced = Some(self.collective(CollectiveKind::Broadcast, None, span));
        self.emitter.after(Stream::Compute, &[self.reduced]);
    }

    fn collective(&mut self, kind: CollectiveKind, bucket: Option<u32>, span: Span) -> Mark {
        let (pass, agreement) = (self.pass, self.opening.agreement);
        let action = Action::Collective { kind, pass, agreement, bucket, src: span, dst: span };
        self.emitter.emit_marked(Stream::Reduce, action)
    }
}
