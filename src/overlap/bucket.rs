//! One bucket's gradients, in the forms that communication hooks receive: before or after the sum over ranks.
//!
//! A hook gets one flat array of f32 without the bucket's tail block, and the range of each parameter in this array. If
//! one of a hook's sums fails, all later sums by this hook fail too, because ranks may then be at different calls. On
//! the host, a hook that runs after the sum gets a slice. On a GPU, such a hook gets an address and a stream, and
//! enqueues its work on the stream.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use crate::collective::{Call, CallKey, Collective};
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, StreamHandle};
use crate::layout::{Bucket, Plan};

/// One bucket's gradients before the sum over ranks. A [`Hooked`](super::Hooked) communicator passes these gradients to
/// its hook, and the hook may change the gradients.
pub struct GradBucket<'a> {
    pub(super) comm: &'a dyn Collective,
    pub(super) key: CallKey,
    pub(super) deadline: Duration,
    pub(super) index: u32,
    pub(super) plan: &'a Plan,
    pub(super) bucket: &'a Bucket,
    pub(super) values: &'a mut [f32],
    /// The error of the first sum that failed. After such an error, no step may use these gradients.
    pub(super) failed: Option<Error>,
}

impl GradBucket<'_> {
    /// Returns the index of the bucket. Buckets are reduced in the order of their indices, from 0.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Returns whether this is the last bucket of the plan. Local buckets are ignored, because a hook never receives
    /// them. If all parameters of the last bucket are frozen, ranks may omit this bucket. In such a pass, this method
    /// returns false for all buckets.
    pub fn is_last(&self) -> bool {
        self.plan.buckets().iter().rposition(|bucket| !bucket.is_local) == Some(self.index as usize)
    }

    /// Returns the number of this stepper's pass, counted from 1. After a run resumes from a checkpoint, the new
    /// stepper counts from 1 again. A hook that needs the total number must therefore add the number of earlier passes.
    pub fn pass(&self) -> u64 {
        self.key.pass
    }

    /// Returns this rank.
    pub fn rank(&self) -> u32 {
        self.comm.rank()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> u32 {
        self.comm.world_size()
    }

    /// Returns this rank's own gradients in one piece. The gradients are summed over micro-batches, include the loss
    /// scale, and are not divided by the number of ranks. In memory that the stepper allocated, the padding between
    /// gradients is zero. **Values that the hook leaves here count as the SUM over ranks**: the step divides them by
    /// the number of ranks.
    pub fn values(&self) -> &[f32] {
        self.values
    }

    /// Returns the slice of [`values`](Self::values) for writing. In memory that the stepper allocated, data that a
    /// hook writes between gradients are lost.
    pub fn values_mut(&mut self) -> &mut [f32] {
        self.values
    }

    /// Multiplies the values by the number of ranks. A hook that would otherwise leave means over ranks in the values
    /// must call this method, because the step divides by the number of ranks afterwards.
    ///
    /// ```
    /// use instep::overlap::{GradBucket, Hooked};
    /// use instep::{Layout, Sgd, Stepper, in_process};
    ///
    /// let layout = Layout::builder().param("w", 1).build()?;
    /// let w = layout.id("w")?;
    /// in_process(4, |comm| {
    ///     let comm = Hooked::new(comm, |bucket: &mut GradBucket<'_>| {
    ///         bucket.all_reduce()?;
    ///         bucket.values_mut().iter_mut().for_each(|sum| *sum /= 4.0); // as a library that averages
    ///         bucket.means_to_sums();
    ///         Ok(())
    ///     });
    ///     let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Sgd::default() }, comm)?;
    ///     let mut pass = stepper.begin()?;
    ///     pass.grads().write(w, &[3.0])?;
    ///     pass.finish()?;
    ///     assert_eq!(stepper.view::<f32>(w)?, [-3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn means_to_sums(&mut self) {
        let ranks = self.world_size() as f32;
        self.values.iter_mut().for_each(|mean| *mean *= ranks);
    }

    /// Returns two values for each parameter: its index in [`Layout::ids`](crate::Layout::ids), and the range of its
    /// gradient in [`values`](Self::values).
    pub fn gradients(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let first = self.bucket.start;
        self.plan.segments_of(self.bucket).iter().map(move |segment| {
            let start = (segment.grad_start - first) as usize;
            (segment.param as usize, start..start + segment.len as usize)
        })
    }

    /// Replaces all gradients by their sums over ranks. Without a hook, the stepper makes this all-reduce. A hook may
    /// make any number of all-reduces, but the hooks of all ranks must make the same all-reduces in the same order.
    ///
    /// # Errors
    /// Errors as for [`Collective::enqueue`]. After an error, every later sum by the hook fails too.
    pub fn all_reduce(&mut self) -> Result<()> {
        self.all_reduce_range(0..self.values.len())
    }

    /// Replaces a range of the gradients by their sums over ranks, as [`all_reduce`](Self::all_reduce) does for all
    /// gradients.
    ///
    /// # Errors
    /// Errors as for [`Collective::enqueue`]. After an error, every later sum by the hook fails too. `Hook` if the
    /// range is not inside the bucket's elements.
    pub fn all_reduce_range(&mut self, range: Range<usize>) -> Result<()> {
        let len = self.values.len();
        let Some(part) = self.values.get_mut(range.clone()) else {
            return Err(Error::Hook(format!("elements {range:?} of a bucket that has {len}")));
        };
        sum(self.comm, self.key, self.deadline, part, &mut self.failed)
    }

    /// Replaces the hook's own buffer by its sum over ranks. The buffer must have the same length on every rank.
    ///
    /// # Errors
    /// Errors as for [`Collective::enqueue`]. After an error, every later sum by the hook fails too.
    pub fn all_reduce_buffer(&mut self, buffer: &mut [f32]) -> Result<()> {
        sum(self.comm, self.key, self.deadline, buffer, &mut self.failed)
    }
}

/// Makes one all-reduce with this key, and stores its error in `failed`. If `failed` already has the error of an
/// earlier all-reduce, makes no all-reduce and returns that error.
pub(super) fn sum(
    comm: &dyn Collective,
    key: CallKey,
    deadline: Duration,
    values: &mut [f32],
    failed: &mut Option<Error>,
) -> Result<()> {
    if let Some(error) = failed {
        return Err(error.clone());
    }
    let key = CallKey { bytes: size_of_val(values) as u64, ..key };
    let call = Call::on_host(comm, key, None, bytemuck::cast_slice_mut(values), deadline);
    let outcome = call.and_then(|mut call| comm.enqueue(&mut call));
    *failed = outcome.clone().err();
    outcome
}

impl fmt::Debug for GradBucket<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bucket {} of pass {}, {} elements", self.index, self.pass(), self.values.len())
    }
}

/// Writes zeros between the gradients of a part of a bucket. Values that a hook leaves between gradients would add up
/// from pass to pass. If the caller allocated the memory, nothing is written.
pub(super) fn clear_padding(plan: &Plan, bucket: &Bucket, part: Range<u64>, values: &mut [f32]) {
    if plan.is_foreign() {
        return;
    }
    let mut next = 0;
    for segment in plan.segments_of(bucket) {
        let place = |at: u64| (at.clamp(part.start, part.end) - part.start) as usize;
        values[next..place(segment.grad_start)].fill(0.0);
        next = place(segment.grad_start + segment.len);
    }
    values[next..].fill(0.0);
}

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
            /// Returns the index of the bucket. Buckets are reduced in the order of their indices, from 0.
            pub fn index(&self) -> u32 {
                self.place.index
            }

            /// Returns the number of this stepper's pass, counted from 1.
            pub fn pass(&self) -> u64 {
                self.place.pass
            }

            /// Returns this rank.
            pub fn rank(&self) -> u32 {
                self.place.rank
            }

            /// Returns the number of ranks that added up their gradients.
            pub fn world_size(&self) -> u32 {
                self.place.world_size
            }

            /// Returns three values for each parameter that has elements in this sum: its index in
            /// [`Layout::ids`](crate::Layout::ids), the number of its elements that precede this part, and the range of
            /// this part in
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

/// One bucket's gradients, summed over ranks. A `BucketSum` contains only the elements that this rank steps.
pub struct BucketSum<'a> {
    pub(super) place: SumPlace<'a>,
    pub(super) values: &'a mut [f32],
}

place!(BucketSum, "[`values`](Self::values).");

impl BucketSum<'_> {
    fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns the sums in one piece. The sums include the loss scale and are not divided by the number of ranks. In
    /// memory that the stepper allocated, the padding between gradients is zero. If this rank steps no element of the
    /// bucket, the slice has only padding.
    pub fn values(&self) -> &[f32] {
        self.values
    }

    /// Returns the slice of [`values`](Self::values) for writing. In memory that the stepper allocated, data that a
    /// hook writes between gradients are lost.
    pub fn values_mut(&mut self) -> &mut [f32] {
        self.values
    }
}

/// One bucket's gradients on a GPU, summed over ranks. Like a [`BucketSum`], an `EnqueuedSum` contains only the
/// elements that this rank steps. The values are complete when the stream reaches the work that the hook enqueues.
///
/// # Ordering
/// Work that the hook enqueues on [`stream`](Self::stream) runs after the sum, and before norms, decisions and steps.
/// In memory that the stepper allocated, the padding between gradients is zero, and the hook must not change it.
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

    /// Returns the address of an f32 element. The sum includes the loss scale and is not divided by the number of
    /// ranks.
    ///
    /// # Panics
    /// Panics if `element` is larger than [`len`](Self::len).
    pub fn ptr(&self, element: usize) -> DevicePtr {
        assert!(element <= self.len, "element {element} of {}", self.len);
        DevicePtr(self.at.0 + (element * size_of::<f32>()) as u64)
    }

    /// Returns the number of elements, including padding.
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
