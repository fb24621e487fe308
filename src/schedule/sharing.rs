//! Which steps share a launch, where all of them come after a decision or after backward.
//!
//! A launch costs the GPU a few microseconds beside its work, and has one mark, so whoever waits for one of its buckets waits
//! for all. Bits do not depend on it: a tile is stepped alike in any launch. On the host a launch costs next to nothing,
//! and waiting does not, so there each bucket has its own.

use std::ops::Range;

use super::{Mode, Schedule};
use crate::op::Span;

/// Most bytes of gradients that a launch of several buckets steps: a step of that many reaches nearly a copy's speed, and the
/// next forward waits for no more (kernels/PERFORMANCE.md).
const MOST_BYTES: u64 = 128 << 20;

impl Schedule {
    /// Says per bucket whether its step may share a launch with the next one's.
    pub fn share_launches(&mut self, with_next: Vec<bool>) {
        self.shares_with_next = with_next;
    }

    /// Returns the buckets of the launch that steps the last stepped bucket before this one.
    pub(super) fn launch_before(&self, end: u32) -> Option<Range<u32>> {
        let last = (0..end).rfind(|bucket| self.is_stepped(*bucket))?;
        let is_first_needed = (last + 1..self.plan.buckets().len() as u32).all(|k| !self.is_stepped(k));
        let is_alone = !self.policy.trainer_is_a_stream || is_first_needed && self.is_awaited_by_bucket();
        let bytes = |bucket: u32| Span::bucket(&self.plan.buckets()[bucket as usize]).bytes();
        let (mut first, mut all) = (last, bytes(last));
        while !is_alone && self.shares_before(first) {
            all += bytes(first - 1);
            if self.is_awaited_by_bucket() && all > MOST_BYTES {
                break;
            }
            first -= 1;
        }
        Some(first..last + 1)
    }

    /// Returns whether anything waits for a single bucket's step. In Sequential the trainer's stream waits for all of them when
    /// the pass ends.
    fn is_awaited_by_bucket(&self) -> bool {
        let are_gathered = self.plan.is_sharded() && !self.plan.shards_params();
        self.policy.mode != Mode::Sequential || are_gathered
    }

    /// Returns whether a bucket's launch may begin with the bucket before it.
    fn shares_before(&self, bucket: u32) -> bool {
        let before = bucket.checked_sub(1);
        before.is_some_and(|before| self.is_stepped(before) && self.shares_with_next[before as usize])
    }
}
