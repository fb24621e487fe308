//! One bucket's gradients as a communication hook sees them before its sum and after it.
//!
//! A flat run of f32 without the tail counts, and the ranges of its parameters. After the first sum that failed a hook
//! makes no other, because ranks are no longer at the same call. After the sum, the host gives a slice; a GPU gives an address
//! and a stream, on which the hook enqueues work.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use crate::collective::{Call, CallKey, Collective};
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, StreamHandle};
use crate::layout::{Bucket, Plan};

/// One bucket's gradients, as a communication hook sees and changes them.
pub struct GradBucket<'a> {
    pub(super) comm: &'a dyn Collective,
    pub(super) key: CallKey,
    pub(super) deadline: Duration,
    pub(super) index: u32,
    pub(super) plan: &'a Plan,
    pub(super) bucket: &'a Bucket,
    pub(super) values: &'a mut [f32],
    /// The first sum that failed; no step may take these gradients.
    pub(super) failed: Option<Error>,
}

impl GradBucket<'_> {
    /// Returns the index of the bucket, counted from the first one to be reduced.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Returns whether this is the last bucket of the plan that ranks reduce. A hook never sees local buckets. A bucket
    /// whose parameters are all frozen is not reduced; if the last one is such a bucket, no call returns true.
    pub fn is_last(&self) -> bool {
        self.plan.buckets().iter().rposition(|bucket| !bucket.is_local) == Some(self.index as usize)
    }

    /// Returns the number of the pass, counted from 1 by this stepper. A run that resumes from a checkpoint starts at 1
    /// again, so a hook that needs the total must add the earlier passes.
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

    /// Returns this rank's own gradients in one piece, added up over micro-batches, the loss scale included and divided
    /// by nothing; between them are zeros where the stepper pads. **What the hook leaves here is stepped as their SUM
    /// over ranks**, so the step divides it by the number of ranks.
    pub fn values(&self) -> &[f32] {
        self.values
    }

    /// Returns the same, to be changed. Data written between gradients are lost.
    pub fn values_mut(&mut self) -> &mut [f32] {
        self.values
    }

    /// Turns means over ranks into sums, for a hook that has left means: the step divides by the number of ranks, and
    /// would divide them a second time.
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

    /// Returns each parameter's range in [`values`](Self::values): parameters as numbers in the order of
    /// [`Layout::ids`](crate::Layout::ids).
    pub fn gradients(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let first = self.bucket.start;
        self.plan.segments_of(self.bucket).iter().map(move |segment| {
            let start = (segment.grad_start - first) as usize;
            (segment.param as usize, start..start + segment.len as usize)
        })
    }

    /// Makes all gradients their sums over ranks: what happens where there is no hook. Every rank's hook makes the same
    /// calls in the same order, as many as it likes.
    ///
    /// # Errors
    /// Errors as for [`Collective::enqueue`]; again at every later call.
    pub fn all_reduce(&mut self) -> Result<()> {
        self.all_reduce_range(0..self.values.len())
    }

    /// Does the same for some of the elements.
    ///
    /// # Errors
    /// Errors as for [`Collective::enqueue`], again at every later call; `Hook` if the bucket has fewer elements.
    pub fn all_reduce_range(&mut self, range: Range<usize>) -> Result<()> {
        let len = self.values.len();
        let Some(part) = self.values.get_mut(range.clone()) else {
            return Err(Error::Hook(format!("elements {range:?} of a bucket that has {len}")));
        };
        sum(self.comm, (self.key, self.deadline), part, &mut self.failed)
    }

    /// Does the same for a buffer of the hook's own, as long on every rank.
    ///
    /// # Errors
    /// Errors as for [`Collective::enqueue`], again at every later call.
    pub fn all_reduce_buffer(&mut self, buffer: &mut [f32]) -> Result<()> {
        sum(self.comm, (self.key, self.deadline), buffer, &mut self.failed)
    }
}

/// One all-reduce in the name of a call, unless an earlier one has failed.
pub(super) fn sum(
    comm: &dyn Collective,
    (key, deadline): (CallKey, Duration),
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

/// Zeros between the gradients of a part of a bucket, as the stepper has left them there: what a hook writes would add up from
/// pass to pass. In a bucket of the caller's, what lies between is the caller's.
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
