//! Appends the copies between device and host if steps are offloaded: gradient sums are copied to the host, and stepped
//! parameters to the device.
//!
//! Without offload, this file appends no op. A copy waits only for the ops that touch the same bytes. A download waits
//! for the bucket's sum and last step, and an upload waits for the bucket's step. (Ren et al., USENIX ATC 2021,
//! "ZeRO-Offload".)

use std::sync::Arc;

use super::emitter::Mark;
use super::{Broadcast, LastAccess, Schedule};
use crate::layout::Gradients;
use crate::op::{Action, Memory, Span, Stream};

impl Schedule {
    /// If steps are offloaded, copies two parts of a bucket to the host: its tail block, and the sums that this rank
    /// steps. The copies run after the mark `reduced`. Then zeroes or releases the device's gradients. Returns a mark
    /// after these ops.
    pub(super) fn download(&mut self, bucket: u32, reduced: Option<Mark>) -> Option<Mark> {
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        if !plan.is_offloaded() {
            return None;
        }
        if described.len == 0 {
            // This bucket's sum has no bytes. The mark of the last sum also covers the copies before this bucket.
            return self.reduced;
        }
        // Begin resets the counts that steps read, so the copy must come after Begin.
        let begun = self.begun.filter(|_| !described.tail.is_empty());
        self.emitter.after(Stream::Download, &[reduced, begun, self.accesses[bucket as usize].consumed]);
        let steps = self.is_stepped(bucket);
        let spans = |of: fn(Memory, &crate::layout::Bucket) -> Span| {
            [Memory::Grads, Memory::HostGrads].map(|memory| of(memory, described))
        };
        if steps {
            self.copy(Stream::Download, bucket, spans(Span::summed_in));
        }
        self.copy(Stream::Download, bucket, spans(Span::tail));
        match plan.gradients() {
            Gradients::Release if steps => self.end_gradients(bucket, Stream::Download, Action::Release),
            Gradients::Zero if steps => self.end_gradients(bucket, Stream::Download, Action::Zero),
            _ => {}
        }
        let downloaded = Some(self.emitter.record(Stream::Download));
        self.accesses[bucket as usize].downloaded = downloaded;
        downloaded
    }

    /// Copies the stepped parameters to the device, unless [`unshard`](Self::unshard) copies them later. Returns the
    /// mark for which an all-gather or the trainer must wait.
    pub(super) fn upload(&mut self, bucket: u32, stepped: Mark) -> Mark {
        let plan = Arc::clone(&self.plan);
        if !plan.is_offloaded() || self.can_reshard(bucket) {
            return stepped;
        }
        self.emitter.after(Stream::Upload, &[Some(stepped)]);
        self.after_readers(Stream::Upload, bucket);
        self.copy_up(bucket)
    }

    /// Copies the stepped parameters of a bucket to the device, before the bucket is unsharded. The copy runs after the
    /// bucket's last step, and after the last release of the bucket's parameters on the device.
    pub(super) fn upload_shard(&mut self, bucket: u32) -> Mark {
        let LastAccess { released, consumed, .. } = self.accesses[bucket as usize];
        let written = self.trainer_on(Stream::Upload, bucket, &[released, consumed]);
        self.emitter.after(Stream::Upload, &[written, released, consumed]);
        self.copy_up(bucket)
    }

    fn copy_up(&mut self, bucket: u32) -> Mark {
        let plan = Arc::clone(&self.plan);
        let described = &plan.buckets()[bucket as usize];
        let spans = [Memory::HostParams, Memory::Params].map(|memory| Span::shard(memory, described));
        self.copy(Stream::Upload, bucket, spans);
        let uploaded = self.emitter.record(Stream::Upload);
        self.gathered[bucket as usize] = Some(uploaded);
        uploaded
    }

    /// After a broadcast has written parameters on the device, copies these parameters to the host's memory. The copies
    /// run after the mark `received`. Returns the mark for which the trainer waits.
    pub(super) fn download_params(
        &mut self,
        broadcast: Broadcast<'_>,
        received: Option<Mark>,
    ) -> Option<Mark> {
        let plan = Arc::clone(&self.plan);
        if !plan.is_offloaded() {
            return received;
        }
        self.emitter.after(Stream::Download, &[received]);
        for (bucket, described) in (0..).zip(plan.buckets()).filter(|(_, described)| !described.is_local) {
            if matches!(broadcast, Broadcast::Buckets(some) if !some.contains(&bucket)) {
                continue;
            }
            let spans = [Memory::Params, Memory::HostParams].map(|memory| Span::shard(memory, described));
            self.copy(Stream::Download, bucket, spans);
        }
        Some(self.emitter.record(Stream::Download))
    }

    fn copy(&mut self, stream: Stream, bucket: u32, [src, dst]: [Span; 2]) {
        if src.bytes() > 0 {
            self.emitter.emit(stream, Action::Copy { bucket, src, dst });
        }
    }
}
