//! The parts of a plan: bucket caps, tails, segments and buckets, as plain data.
//!
//! Offsets and lengths are elements. This module computes nothing: `cut.rs` and `foreign.rs` fill these structs.

use std::ops::Range;

use crate::layout::SegmentAction;

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
    /// Number of its first element in the layout: the lengths of all parameters registered before.
    pub element: u64,
    /// The action of a step on it.
    pub action: SegmentAction,
    /// The group whose hyperparameters it takes.
    pub group: u32,
    /// Offset of its element in the bucket's tail block, if the plan has tails: the SUM leaves there how many
    /// ranks had a gradient for it.
    pub tail: Option<u64>,
}

/// The unit of communication and of the step. Offsets and lengths are elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Offset in the arena of gradients.
    pub start: u64,
    /// Elements with tail and padding: a multiple of world_size x 256, unless the bucket is foreign.
    pub len: u64,
    /// Its range in the arenas of parameters and states.
    pub params: Range<u64>,
    /// Its segments, as indices into [`Plan::segments`](crate::layout::Plan::segments).
    pub segments: Range<u32>,
    /// Its tail block, empty without tails.
    pub tail: Range<u64>,
    /// Offset of the element that counts contributing ranks, the tail block's first.
    pub contributors: Option<u64>,
    /// It holds parameters that are each rank's own, so no collective touches it.
    pub is_local: bool,
}

/// The options that a plan is cut by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) world_size: u32,
    pub(super) caps: BucketCaps,
    pub(super) tails: Tails,
}
