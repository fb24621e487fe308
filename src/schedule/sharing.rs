//! Decides which steps share a launch, if all steps run after a decision or after backward.
//!
//! A launch costs a GPU a few microseconds in addition to its work. A shared launch has one mark, so a wait for one of
//! its buckets is a wait for all of them. The bits of stepped tensors do not depend on which buckets share a launch,
//! because a tile is stepped in the same way in any launch. By default, a schedule has one step op per bucket.

use std::ops::Range;

use super::{Decision, Mode, Schedule};
use crate::op::Span;

/// The limit on the bytes of gradients in a shared launch. The limit applies if all-gathers or the next forward wait
/// for each bucket separately. A launch of this size nearly reaches the speed of a copy, and a larger launch would
/// prolong the waits (kernels/PERFORMANCE.md).
const MOST_BYTES: u64 = 128 << 20;

impl Schedule {
    /// Sets for each bucket whether its step may share a launch with the next bucket's step. Sharing helps on a device
    /// where each launch takes time, such as a GPU.
    pub fn share_launches(&mut self, with_next: Vec<bool>) {
        self.shares_with_next = with_next;
    }

    /// Returns the buckets of one launch: the last stepped bucket before `end`, and the buckets before it that share
    /// its launch.
    pub(super) fn launch_before(&self, end: u32) -> Option<Range<u32>> {
        let last = (0..end).rfind(|bucket| self.is_stepped(*bucket))?;
        let is_awaited = self.are_buckets_awaited();
        let is_first = !(end..self.plan.buckets().len() as u32).any(|bucket| self.is_stepped(bucket));
        let mut first = last;
        if !(is_awaited && is_first) {
            let mut bytes = self.gradient_bytes(last);
            while self.shares_with_previous(first) {
                bytes += self.gradient_bytes(first - 1);
                if is_awaited && bytes > MOST_BYTES {
                    break;
                }
                first -= 1;
            }
        }
        Some(first..last + 1)
    }

    /// Returns whether all-gathers or the next forward wait for each bucket separately. In `Sequential` mode on a GPU,
    /// the next forward waits for all buckets together, because the trainer's stream waits for all steps when the pass
    /// ends.
    fn are_buckets_awaited(&self) -> bool {
        let are_gathered = self.plan.is_sharded() && !self.plan.shards_params();
        self.policy.mode != Mode::Sequential || are_gathered
    }

    fn shares_with_previous(&self, bucket: u32) -> bool {
        let previous = bucket.checked_sub(1).filter(|_| self.policy.decision != Decision::EachBucket);
        previous.is_some_and(|k| self.is_stepped(k) && self.shares_with_next[k as usize])
    }

    fn gradient_bytes(&self, bucket: u32) -> u64 {
        Span::bucket(&self.plan.buckets()[bucket as usize]).bytes()
    }
}
