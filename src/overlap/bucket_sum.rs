//! The argument of a hook after a bucket's sum: the values, and where each gradient lies in them.
//!
//! On the host it is a slice; on a GPU an address and a stream, on which the hook enqueues work.

use std::fmt;
use std::ops::Range;

use crate::handle::{DevicePtr, StreamHandle};
use crate::layout::{Bucket, Plan};

/// The bucket, pass and rank of a sum.
pub(super) struct SumPlace<'a> {
    pub(super) index: u32,
    pub(super) pass: u64,
    pub(super) rank: u32,
    pub(super) world_size: u32,
    pub(super) plan: &'a Plan,
    pub(super) bucket: &'a Bucket,
}

macro_rules! place {
    ($name:ident, $elements:literal) => {
        impl $name<'_> {
            /// Returns the index of the bucket, counted from the first one to be reduced.
            pub fn index(&self) -> u32 {
                self.place.index
            }

            /// Returns the number of the pass, counted from 1 by this stepper.
            pub fn pass(&self) -> u64 {
                self.place.pass
            }

            /// Returns this rank.
            pub fn rank(&self) -> u32 {
                self.place.rank
            }

            /// Returns the number of ranks whose gradients were added up.
            pub fn world_size(&self) -> u32 {
                self.place.world_size
            }

            /// Returns what is here of each parameter: its number in the order of [`Layout::ids`](crate::Layout::ids), its first
            /// element that is here, and where those elements lie in
            #[doc = $elements]
            pub fn gradients(&self) -> impl Iterator<Item = (usize, u64, Range<usize>)> + '_ {
                self.place.gradients()
            }
        }

        impl fmt::Debug for $name<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let SumPlace { index, pass, .. } = self.place;
                write!(f, "sum of bucket {index} in pass {pass}, {} elements here", self.len())
            }
        }
    };
}

/// The sum of one bucket's gradients over ranks, as far as this rank steps them.
pub struct BucketSum<'a> {
    pub(super) place: SumPlace<'a>,
    pub(super) values: &'a mut [f32],
}

place!(BucketSum, "[`values`](Self::values).");

impl BucketSum<'_> {
    fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns the sums in one piece, the loss scale included and divided by nothing; between parameters are zeros where the
    /// stepper pads. Empty where this rank steps nothing of the bucket.
    pub fn values(&self) -> &[f32] {
        self.values
    }

    /// Returns the same, to be changed. Data written between parameters are lost.
    pub fn values_mut(&mut self) -> &mut [f32] {
        self.values
    }
}

/// The same on a GPU, once the stream has come to it.
///
/// # Ordering
/// Work that the hook enqueues on [`stream`](Self::stream) comes after the sum, and before norms, decisions and steps.
/// Between parameters are zeros where the stepper pads, and they must stay.
pub struct EnqueuedSum<'a> {
    pub(super) place: SumPlace<'a>,
    pub(super) at: DevicePtr,
    pub(super) len: usize,
    pub(super) stream: StreamHandle,
}

place!(EnqueuedSum, "the run of [`len`](Self::len) f32 from [`ptr(0)`](Self::ptr) on.");

impl EnqueuedSum<'_> {
    /// Returns the stream of the sum.
    pub fn stream(&self) -> StreamHandle {
        self.stream
    }

    /// Returns the address of an element: an f32 of a sum, the loss scale included and divided by nothing.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn ptr(&self, element: usize) -> DevicePtr {
        assert!(element <= self.len, "element {element} of {}", self.len);
        DevicePtr(self.at.0 + (element * size_of::<f32>()) as u64)
    }

    /// Returns how many elements are here; 0 where this rank steps nothing of the bucket.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl SumPlace<'_> {
    fn gradients(&self) -> impl Iterator<Item = (usize, u64, Range<usize>)> + '_ {
        let summed = self.bucket.summed();
        self.plan.segments_of(self.bucket).iter().filter_map(move |segment| {
            let end = (segment.grad_start + segment.len).min(summed.end);
            let start = segment.grad_start.max(summed.start);
            let place = |at: u64| (at - summed.start) as usize;
            let first = start.saturating_sub(segment.grad_start);
            (start < end).then(|| (segment.param as usize, first, place(start)..place(end)))
        })
    }
}
