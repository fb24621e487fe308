//! The parts of a plan as plain data: bucket caps, tails, segments and buckets.
//!
//! Offsets and lengths are elements. This module computes nothing: `cut.rs` and `foreign.rs` fill these structs.

use std::ops::Range;

use crate::abi::INSTEP_QUANTUM;
use crate::dtype::DType;
use crate::layout::{Precision, SegmentAction, Storage};

/// The sizes at which buckets are closed, in bytes of gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketCaps {
    /// The cap of the first bucket. A small first bucket lets communication start early.
    pub first_bytes: u64,
    /// The cap of every later bucket.
    pub rest_bytes: u64,
}

impl Default for BucketCaps {
    /// Returns the caps of PyTorch's DistributedDataParallel: 1 MiB for the first bucket, then 25 MiB.
    fn default() -> Self {
        BucketCaps { first_bytes: 1 << 20, rest_bytes: 25 << 20 }
    }
}

/// The kinds of counts in a bucket's tail block. The tail block follows the bucket's gradients. The bucket's all-reduce
/// sums the counts over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tails {
    /// Whether to count, for each segment, the ranks that had a gradient for the segment.
    pub used: bool,
    /// Whether to count the ranks that had data.
    pub contributors: bool,
}

/// What happens to a gradient after its parameter's step. This option applies only to parameters with the
/// [action](SegmentAction) `Step`. The option never changes the bits of the stepped parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Gradients {
    /// The gradient remains the sum over ranks, without division by the number of ranks and without clipping.
    #[default]
    Keep,
    /// The step's launch overwrites the gradient with zeros, even in a skipped pass.
    Zero,
    /// The step's launch overwrites the gradient with the value that the optimizer used. This value is the mean over
    /// ranks, divided by the loss scale, clipped, and rounded once to the gradient's type. In PyTorch, `.grad` has this
    /// value once `unscale_` and then `clip_grad_norm_` have run. As in PyTorch, a skipped pass overwrites the gradient
    /// too.
    Average,
    /// The gradient's memory is returned to the system, except pages that also have other data. The gradient cannot be
    /// read afterwards.
    Release,
}

/// The elements of one parameter in a bucket. Offsets and lengths are elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the parameter, in registration order.
    pub param: u32,
    /// Index of the segment's bucket.
    pub bucket: u32,
    /// Offset in the arenas of parameters and states, a multiple of 256.
    pub start: u64,
    /// Offset in the arena of gradients. Unless the bucket is foreign, this offset equals [`start`](Self::start).
    pub grad_start: u64,
    /// Number of elements, without padding.
    pub len: u64,
    /// Index of the segment's first element in the layout: the sum of the lengths of all parameters that were
    /// registered earlier. For a shard of [rows](crate::ForeignBucket::rows), the index is the argument `first` of
    /// `rows`.
    pub element: u64,
    /// Number of elements of a row, if rows are padded to whole blocks of 8-bit states, and otherwise 0. If `row` is
    /// not 0, each row starts at a multiple of 256 elements in the states, and in all tensors with the layout of the
    /// states.
    pub row: u64,
    /// What a step does with the segment.
    pub action: SegmentAction,
    /// Index of the segment's group. The group has the hyperparameters.
    pub group: u32,
    /// Offset of the segment's count in the bucket's tail block, if the plan has tails. After the reduce, the count is
    /// the number of ranks that had a gradient for the segment.
    pub tail: Option<u64>,
}

impl Segment {
    /// Returns the number of elements that the segment's states span, including gaps between rows.
    pub(crate) fn state_len(&self) -> u64 {
        self.state_at(self.len)
    }

    /// Returns the offset of the states of the segment's element `at`. The offset is counted from
    /// [`start`](Self::start).
    pub(crate) fn state_at(&self, at: u64) -> u64 {
        match self.row {
            0 => at,
            row => at / row * row.next_multiple_of(INSTEP_QUANTUM.into()) + at % row,
        }
    }

    /// Returns the end of the longest run of elements that starts at `at`, ends no later than `end`, and has no gap
    /// between its states.
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
    /// Number of elements, including tail and padding. Unless the bucket is foreign, `len` is a multiple of 256 times
    /// the number of shards.
    pub len: u64,
    /// The bucket's range in the arenas of parameters and states.
    pub params: Range<u64>,
    /// The part of `params` that this rank steps and has states for. Unless the plan is
    /// [sharded](crate::layout::Plan::sharded), `shard` equals `params`.
    pub shard: Range<u64>,
    /// The bucket's segments, as indices into [`Plan::segments`](crate::layout::Plan::segments).
    pub segments: Range<u32>,
    /// The range of the tail block, or an empty range if the bucket has no tail block.
    pub tail: Range<u64>,
    /// Offset of the element that counts contributing ranks. The tail block starts with this element.
    pub contributors: Option<u64>,
    /// Whether the bucket holds local parameters. No collective touches such a bucket.
    pub is_local: bool,
    /// The [`Storage`] that all parameters of the bucket have in common.
    pub storage: Storage,
    /// The clip set of the bucket's parameters. The parameters of one clip set are clipped together. Set 0 is clipped
    /// by the stepper's [`Clip`](crate::Clip), and every other set by its [group
    /// clip](crate::StepperBuilder::group_clip).
    pub clip_set: u32,
    /// For each kind of tensor, the offset of the bucket's first byte.
    pub(crate) first_bytes: FirstBytes,
}

/// The byte offset at which a bucket starts, for each kind of tensor. In each kind, the size of an element may differ
/// between buckets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FirstBytes {
    pub(crate) params: u64,
    pub(crate) grads: u64,
    pub(crate) master: u64,
    pub(crate) state: u64,
    pub(crate) scales: u64,
    pub(crate) ema: u64,
    /// With offload, the offset in the host's memory for parameters.
    pub(crate) host_params: u64,
    pub(crate) host_grads: u64,
    pub(crate) sums: u64,
}

impl Bucket {
    /// Returns whether the bucket is sharded. In a sharded plan with only one shard, this is true only for reduced
    /// buckets with a tail block, because the shard excludes that block.
    pub(crate) fn is_sharded(&self) -> bool {
        self.shard != self.params
    }

    /// Returns shard number `place` of `params`.
    pub(crate) fn shard_of(&self, place: u32) -> Range<u64> {
        if !self.is_sharded() {
            return self.params.clone();
        }
        let len = self.shard.end - self.shard.start;
        let start = self.params.start + u64::from(place) * len;
        start..start + len
    }

    /// Returns the range of gradients that this rank steps. The tail block with the counts of ranks is not part of this
    /// range.
    pub(crate) fn summed(&self) -> Range<u64> {
        if self.is_sharded() {
            let first = self.start + (self.shard.start - self.params.start);
            return first..first + (self.shard.end - self.shard.start);
        }
        self.start..self.tail.start
    }

    /// Returns the total number of elements of all shards.
    pub(crate) fn shared_len(&self) -> u64 {
        self.tail.start - self.start
    }

    /// Returns the part of a segment in this rank's shard, as a range of the segment's elements.
    pub(crate) fn shard_of_segment(&self, segment: &Segment) -> Range<u64> {
        self.part(segment, &self.shard)
    }

    /// Returns the part of a segment that lies in a shard, as a range of the segment's elements.
    pub(crate) fn part(&self, segment: &Segment, shard: &Range<u64>) -> Range<u64> {
        let inside = |at: u64| at.clamp(segment.start, segment.start + segment.len) - segment.start;
        inside(shard.start)..inside(shard.end)
    }

    /// Returns the number of elements of the bucket's gradients in the host's memory. This memory holds this rank's
    /// sums, the counts of ranks, and padding.
    pub(crate) fn host_grads_len(&self) -> u64 {
        let summed = self.summed();
        (summed.end - summed.start + self.tail.end - self.tail.start).next_multiple_of(INSTEP_QUANTUM.into())
    }

    /// Converts an offset in the arena of gradients to an offset in the host's memory for the bucket's gradients. The
    /// element at this offset is a gradient, or a count in the tail block.
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

    /// Returns the offset of a gradient in the accumulated sums of micro-batches. A local bucket has no accumulated
    /// sums.
    pub(crate) fn sum_at(&self, element: u64) -> u64 {
        let summed = self.summed();
        if self.is_local { 0 } else { element.clamp(summed.start, summed.end) - summed.start }
    }

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

/// The options with which a layout was cut into buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) world_size: u32,
    /// Number of shards of a bucket: one for each rank, or for each rank of a group.
    pub(super) shards: u32,
    pub(super) caps: BucketCaps,
    pub(super) tails: Tails,
    /// This rank's index in its group, if the plan is sharded. `None` if each rank has full buckets.
    pub(super) place: Option<u32>,
}
