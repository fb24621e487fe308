//! Records the trainer's announcements of its next accesses. The announcements determine which ops the trainer waits
//! for, and which ops wait for the trainer.
//!
//! An access waits for exactly the op that last touched the same bytes. Every access must be announced before it
//! happens. Ops wait only until the trainer has passed the announced position. Ops are not ordered with accesses after
//! this position, so each later access needs a new announcement.

use super::emitter::Mark;
use super::{NEVER, Schedule};
use crate::op::Stream;

impl Schedule {
    /// Announces, between passes, that the trainer is about to freeze or unfreeze a parameter.
    pub fn touch_frozen(&mut self, param: usize, frozen: bool) {
        if frozen && !self.plan.rewrites_params() {
            // Steps of earlier passes may still be writing the parameter, and later accesses to a frozen parameter do
            // not wait.
            let bucket = self.plan.segment_of(param).bucket;
            self.emitter.after(Stream::Compute, &[self.accesses[bucket as usize].stepped]);
        }
        self.touch_settings();
    }

    /// Announces that the trainer is about to touch a parameter, its copy or its average. Every access must be
    /// announced: the ops of the bucket wait for exactly the announced accesses.
    pub fn touch(&mut self, param: usize) {
        let segment = self.plan.segment_of(param);
        let (is_empty, bucket) = (segment.len == 0, segment.bucket);
        // No op of a pass touches a frozen parameter, unless ranks gather it with its bucket. Begin comes after the
        // change that unfreezes the parameter.
        if !is_empty && !self.is_frozen(param) {
            self.touch_after(bucket, None);
        } else if !is_empty && self.plan.rewrites_params() {
            self.accesses[bucket as usize].frozen_touched = self.emitter.next_ticket(Stream::Compute);
            self.emitter.after(Stream::Compute, &[self.accesses[bucket as usize].stepped]);
        }
    }

    /// Announces that the trainer is about to touch a parameter's gradient.
    pub fn touch_gradient(&mut self, param: usize) {
        let segment = self.plan.segment_of(param);
        // The sum of a bucket includes its frozen gradients. In a pass, access to a frozen gradient is refused.
        if segment.len > 0 && (!self.open || !self.is_frozen(param)) {
            self.touch_bucket(segment.bucket);
        } else {
            self.touch(param);
        }
    }

    /// Announces that the trainer is about to read the status, or to read or set step counts, between passes.
    pub fn touch_control(&mut self) {
        self.touch_inputs(self.settled);
    }

    /// Announces that the trainer is about to set hyperparameters or actions, between passes. The trainer does not wait
    /// for the last pass's steps, because steps read only values that `Begin` has computed.
    pub fn touch_settings(&mut self) {
        self.touch_inputs(self.begun);
    }

    /// Announces that the trainer is about to read how many ranks contributed to the last pass.
    pub fn touch_contributors(&mut self) {
        self.touch_inputs(self.reduced);
    }

    /// Announces that the trainer is about to read the loss scale of the open pass or, between passes, of the next
    /// pass. The read waits for the last decision, but not for the steps that follow it.
    pub fn touch_loss_scale(&mut self) {
        self.emitter.after(Stream::Compute, &[self.decided]);
        self.loss_scale_touched = self.emitter.next_ticket(Stream::Compute);
    }

    /// Announces that the trainer is about to write its own scaler's scale and flag, or to read the flag. The access
    /// runs after the last decision, and before the next decision and the next `Begin`.
    pub fn touch_scaler(&mut self) {
        self.touch_inputs(self.decided);
        self.loss_scale_touched = self.inputs_touched;
    }

    /// Returns whether, since the last decision, the trainer has read the loss scale, requested its address, or
    /// accessed its own scaler.
    pub fn is_loss_scale_touched(&self) -> bool {
        self.loss_scale_touched != NEVER
    }

    /// Announces an access to memory that `Begin` reads or writes. The trainer waits for `mark`, and the next `Begin`
    /// waits for the trainer.
    fn touch_inputs(&mut self, mark: Option<Mark>) {
        self.emitter.after(Stream::Compute, &[mark]);
        self.inputs_touched = self.emitter.next_ticket(Stream::Compute);
    }

    /// Announces that the trainer is about to touch any parameter, gradient or state.
    pub fn touch_all(&mut self) {
        let here = self.emitter.next_ticket(Stream::Compute);
        if std::mem::replace(&mut self.all_touched, here) == here {
            // Every step and reduce of a touched bucket comes after a Record of this stream. There was no Record since
            // this function was last called, so there is nothing to wait for.
            return;
        }
        // This mark comes first because it implies the others, so there is one wait instead of many.
        self.emitter.after(Stream::Compute, &[self.last]);
        for bucket in 0..self.accesses.len() as u32 {
            self.touch_bucket(bucket);
        }
    }

    /// Announces that the trainer is about to touch any byte of a bucket's gradients, padding included.
    pub fn touch_bucket(&mut self, bucket: u32) {
        self.touch_after(bucket, self.accesses[bucket as usize].summed);
    }

    fn touch_after(&mut self, bucket: u32, summed: Option<Mark>) {
        self.accesses[bucket as usize].touched = self.emitter.next_ticket(Stream::Compute);
        self.emitter.after(Stream::Compute, &[self.accesses[bucket as usize].stepped, summed]);
    }

    /// Makes the other streams wait for the trainer's position, at the start of a captured graph and after its end.
    pub fn fork(&mut self) {
        let here = self.emitter.record(Stream::Compute);
        let is_idle = |stream: &Stream| self.policy.sums_by_caller && *stream == Stream::Reduce;
        for stream in Stream::used(&self.plan).iter().filter(|stream| !is_idle(stream)) {
            self.emitter.after(*stream, &[Some(here)]);
        }
    }

    /// Announces that the trainer is about to wait for everything that was submitted.
    pub fn synchronize(&mut self) {
        // The Record of the trainer's position comes before these waits, so no later reduce has to wait for a position
        // after them.
        let touched = self.emitter.record(Stream::Compute);
        let first = if self.policy.sums_by_caller { self.stream_of_gradients() } else { Stream::Reduce };
        self.emitter.after(first, &[Some(touched)]);
        let reduced = (!self.policy.sums_by_caller).then(|| self.emitter.record(Stream::Reduce));
        let marks = [reduced, Some(self.emitter.record(Stream::Optim))];
        let [_, mut ended] = marks;
        if self.plan.is_sharded() {
            // The gather stream's mark then implies the other marks.
            self.emitter.after(Stream::Gather, &marks);
            ended = Some(self.emitter.record(Stream::Gather));
        }
        if self.plan.is_offloaded() {
            let downloaded = Some(self.emitter.record(Stream::Download));
            self.emitter.after(Stream::Upload, &[marks[0], marks[1], ended, downloaded]);
            ended = Some(self.emitter.record(Stream::Upload));
        }
        self.emitter.after(Stream::Compute, &[marks[0], ended]);
        // Norms leave no mark, so after an abandoned pass this mark stands for the norms too.
        for access in &mut self.accesses {
            (access.stepped, access.consumed, access.downloaded) = (ended, ended, ended);
        }
        (self.last, self.settled) = (ended, ended);
    }
}
