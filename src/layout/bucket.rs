//! The parts of a plan: bucket caps, tails, segments and buckets, as plain data.
//!
//! Offsets and lengths are elements. This module computes nothing: `cut.rs` and `foreign.rs` fill these structs.

use std::ops::Range;

use crate::abi::INSTEP_QUANTUM;
use crate::dtype::DType;
use crate::layout::{Precision, SegmentAction, Storage};

/// Limits in bytes of gradients at which a bucket closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketCaps {
    /// The first bucket's: small, so that communication starts early.
    pub first_bytes: u64,
    /// Every later bucket's.
    pub rest_bytes: u64,
}

impl Default for BucketCaps {
    /// 1 MiB, then 25 MiB, as PyTorch's DistributedDataParallel.
    fn default() -> Self {
        BucketCaps { first_bytes: 1 << 20, rest_bytes: 25 << 20 }
    }
}

/// Counts that each bucket's own SUM adds up, in a tail block after its gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tails {
    /// Per segment, how many ranks had a gradient for it.
    pub used: bool,
    /// Counts the ranks that had data.
    pub contributors: bool,
}

/// Policy for a parameter's gradient after the parameter's step. Gradients of other
/// [actions](SegmentAction) always stay, and no policy changes a bit of what is stepped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Gradients {
    /// It stays, as the sum over ranks: neither divided by their number, nor clipped.
    #[default]
    Keep,
    /// The step's own launch overwrites it with zeros, in a pass that it skips too.
    Zero,
    /// The step's own launch overwrites it with the value that was stepped: the mean over ranks, without the loss scale
    /// and clipped, rounded once to the gradient's type. This is what `.grad` holds in PyTorch after `unscale_` and
    /// `clip_grad_norm_`; as there, a skipped pass leaves that value too.
    Average,
    /// Its memory goes back to the system, except pages that it shares with what stays. It cannot be read.
    Release,
}

/// One parameter's run inside a bucket. Offsets and lengths are elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the parameter, in registration order.
    pub param: u32,
    /// Index of its bucket.
    pub bucket: u32,
    /// Offset in the arenas of parameters and states, a multiple of 256.
    pub start: u64,
    /// Offset in the arena of gradients: the same, unless the bucket is foreign.
    pub grad_start: u64,
    /// Elements, without padding.
    pub len: u64,
    /// Number of its first element in the layout: the lengths of all parameters registered before. Of a shard that
    /// [rows](crate::ForeignBucket::rows) describe, the number that they give it.
    pub element: u64,
    /// Elements of a row, if blocks of 8-bit states begin anew with each; else 0. Then what lies like the states has each
    /// row at a multiple of 256 elements.
    pub row: u64,
    /// The action of a step on it.
    pub action: SegmentAction,
    /// The group whose hyperparameters it takes.
    pub group: u32,
    /// Offset of its element in the bucket's tail block, if the plan has tails: the SUM leaves there how many
    /// ranks had a gradient for it.
    pub tail: Option<u64>,
}

impl Segment {
    /// Returns the elements that its states span, and all that lies like them.
    pub(crate) fn state_len(&self) -> u64 {
        self.state_at(self.len)
    }

    /// Returns where the states of its element `at` lie, from [`start`](Self::start).
    pub(crate) fn state_at(&self, at: u64) -> u64 {
        match self.row {
            0 => at,
            row => at / row * row.next_multiple_of(INSTEP_QUANTUM.into()) + at % row,
        }
    }

    /// Returns the end of the run without a break in the states that begins at element `at` and ends before `end`.
    pub(crate) fn run_end(&self, at: u64, end: u64) -> u64 {
        match self.row {
            0 => end,
            row => end.min((at / row + 1) * row),
        }
    }
}

/// The unit of communication and of the step. Offsets and lengths are elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Offset in the arena of gradients.
    pub start: u64,
    /// Elements with tail and padding: a multiple of 256 for each rank that may keep a shard of it, unless the bucket is
    /// foreign.
    pub len: u64,
    /// Its range in the arenas of parameters and states.
    pub params: Range<u64>,
    /// The part of `params` whose states this rank keeps and steps: all of it, unless the plan is
    /// [sharded](crate::layout::Plan::sharded).
    pub shard: Range<u64>,
    /// Its segments, as indices into [`Plan::segments`](crate::layout::Plan::segments).
    pub segments: Range<u32>,
    /// Its tail block, empty without tails.
    pub tail: Range<u64>,
    /// Offset of the element that counts contributing ranks, the tail block's first.
    pub contributors: Option<u64>,
    /// It holds parameters that are each rank's own, so no collective touches it.
    pub is_local: bool,
    /// The storage of all its parameters.
    pub storage: Storage,
    /// The clip set of all its parameters, which are clipped together. 0 is that of the stepper's own
    /// [`Clip`](crate::Clip); the others are those of [groups](crate::StepperBuilder::group_clip).
    pub clip_set: u32,
    /// The first byte in each memory of tensors.
    pub(crate) first_bytes: FirstBytes,
}

/// The first byte of a bucket in the memories whose elements differ in size between buckets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FirstBytes {
    pub(crate) params: u64,
    pub(crate) grads: u64,
    pub(crate) master: u64,
    pub(crate) state: u64,
    pub(crate) scales: u64,
    pub(crate) ema: u64,
    /// With offload, in the host's memory.
    pub(crate) host_params: u64,
    pub(crate) host_grads: u64,
    pub(crate) sums: u64,
}

impl Bucket {
    /// Returns whether the bucket is sharded: other ranks have shards of it, or its counts follow its last shard.
    pub(crate) fn is_sharded(&self) -> bool {
        self.shard != self.params
    }

    /// Returns the shard number `place` of `params`.
    pub(crate) fn shard_of(&self, place: u32) -> Range<u64> {
        if !self.is_sharded() {
            return self.params.clone();
        }
        let len = self.shard.end - self.shard.start;
        let start = self.params.start + u64::from(place) * len;
        start..start + len
    }

    /// Returns the gradients that this rank steps, without counts of ranks.
    pub(crate) fn summed(&self) -> Range<u64> {
        if self.is_sharded() {
            let first = self.start + (self.shard.start - self.params.start);
            return first..first + (self.shard.end - self.shard.start);
        }
        self.start..self.tail.start
    }

    /// Returns the number of elements of all shards.
    pub(crate) fn shared_len(&self) -> u64 {
        self.tail.start - self.start
    }

    /// Returns the part of a segment in this rank's shard, as elements of the segment.
    pub(crate) fn shard_of_segment(&self, segment: &Segment) -> Range<u64> {
        self.part(segment, &self.shard)
    }

    /// Returns the part of a segment that lies in a shard, as elements of the segment.
    pub(crate) fn part(&self, segment: &Segment, shard: &Range<u64>) -> Range<u64> {
        let inside = |at: u64| at.clamp(segment.start, segment.start + segment.len) - segment.start;
        inside(shard.start)..inside(shard.end)
    }

    /// Returns the elements of the gradients that a host steps: its sums, the counts of ranks, and padding.
    pub(crate) fn host_grads_len(&self) -> u64 {
        let summed = self.summed();
        (summed.end - summed.start + self.tail.end - self.tail.start).next_multiple_of(INSTEP_QUANTUM.into())
    }

    /// Returns the place of a gradient or a count among the gradients that a host steps.
    pub(crate) fn host_grad(&self, element: u64) -> u64 {
        let summed = self.summed();
        if element >= self.start + self.len {
            self.host_grads_len()
        } else if element >= self.tail.start {
            summed.end - summed.start + (element - self.tail.start).min(self.tail.end - self.tail.start)
        } else {
            element.clamp(summed.start, summed.end) - summed.start
        }
    }

    /// Returns where a gradient lies among the sums of micro-batches. A local bucket has none.
    pub(crate) fn sum_at(&self, element: u64) -> u64 {
        let summed = self.summed();
        if self.is_local { 0 } else { element.clamp(summed.start, summed.end) - summed.start }
    }

    /// The first bytes of the bucket that follows this one.
    pub(super) fn next_bytes(&self) -> FirstBytes {
        let (first, Precision { param, grad, master, moments, .. }) =
            (self.first_bytes, self.storage.precision);
        let [elements, kept] = [&self.params, &self.shard].map(|range| range.end - range.start);
        FirstBytes {
            params: first.params + elements * param.bytes(),
            grads: first.grads + self.len * grad.bytes(),
            master: first.master + kept * master.bytes(),
            state: first.state + kept * moments.bytes(),
            scales: first.scales + moments.scale_bytes(kept),
            ema: first.ema + if self.storage.ema { kept * DType::F32.bytes() } else { 0 },
            host_params: first.host_params + kept * param.bytes(),
            host_grads: first.host_grads + self.host_grads_len() * grad.bytes(),
            sums: first.sums + self.sum_at(self.start + self.len) * grad.bytes(),
        }
    }
}

/// The options that a plan is cut by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) world_size: u32,
    /// How many equal parts a bucket can be cut into: one for each rank, or for each of a group of ranks.
    pub(super) shards: u32,
    pub(super) caps: BucketCaps,
    pub(super) tails: Tails,
    /// The place in its group of the rank whose shards the plan has; `None` if each rank keeps all.
    pub(super) place: Option<u32>,
}
