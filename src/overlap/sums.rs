//! A closure after each bucket's sum: it sees and changes the elements that this rank steps, with any strategy.
//!
//! The closure runs inside the last collective of a bucket's sum, so norms, decisions and steps come after it and nothing is
//! scheduled anew. It must end with the same bits on every rank that steps the same elements. The idea is PyTorch's
//! `FSDPModule.set_all_reduce_hook`.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::collective::{Call, Collective};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::Place;
use crate::layout::{Bucket, Plan};
use crate::op::CollectiveKind;
use crate::overlap::bucket::clear_padding;

type Hook = dyn FnMut(&mut BucketSum<'_>) -> Result<()> + Send;

/// A communicator that calls a hook with the sum of each bucket's gradients over ranks, as far as this rank steps them: all
/// of the bucket, or with a [strategy](crate::Strategy) that shares tensors out this rank's shard. With
/// [`shard_size`](crate::StepperBuilder::shard_size) the hook comes after the all-reduce among replicas. Where each
/// [micro-batch is summed](crate::Accumulation), that is once a pass; without groups the hook sees the sum of each micro-batch,
/// before it is added to the others. The step takes what the hook leaves, and divides it by the number of ranks; so do norms
/// and clipping. Gradients are f32, on the host only so far.
///
/// [`Hooked`](super::Hooked) is called in place of the sum, and makes it itself; this one is called after it.
///
/// ```
/// use instep::overlap::{BucketSum, SumHooked};
/// use instep::{Layout, Sgd, Stepper, Strategy, in_process};
///
/// let layout = Layout::builder().param("weight", 1024).build()?;
/// let weight = layout.id("weight")?;
/// let ranks = in_process(2, |comm| {
///     let comm = SumHooked::new(comm, |sum: &mut BucketSum<'_>| {
///         assert_eq!(sum.values().len(), 512); // the other rank has the rest
///         sum.values_mut().iter_mut().for_each(|g| *g = g.clamp(-1.0, 1.0));
///         Ok(())
///     });
///     let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() });
///     let mut stepper = builder.strategy(Strategy::Zero).host(comm)?;
///     let mut pass = stepper.begin()?;
///     pass.grads().get_mut(weight)?.fill(3.0);
///     pass.finish()?;
///     Ok::<_, instep::Error>(stepper.view::<f32>(weight)?[0])
/// })?;
/// assert_eq!(ranks, [-0.5, -0.5]); // 3 + 3, clamped to 1, divided by two ranks
/// # Ok::<(), instep::Error>(())
/// ```
///
/// # Ordering
/// The hook runs on the reduce stream's thread, one bucket at a time, in the order of their sums. It is not called for a
/// bucket whose parameters are all frozen, but for one that carries the count of ranks with `Strategy::Replicated`.
///
/// # Errors
/// An error of the hook, or a panic inside it, poisons the stepper and ends the other ranks with an error;
/// [`Error::Hook`] is for words of its own.
///
/// # Source
/// PyTorch's `FSDPModule.set_all_reduce_hook`.
pub struct SumHooked {
    comm: Arc<dyn Collective>,
    rank: u32,
    world_size: u32,
    /// Whether `comm` has some of the ranks only.
    is_group: bool,
    state: Arc<Mutex<State>>,
}

struct State {
    hook: Box<Hook>,
    /// Which gradient lies where.
    plan: Option<Plan>,
    /// The bucket whose shard replicas add up next.
    scattered: Option<u32>,
}

impl SumHooked {
    /// Builds a hook around `comm`.
    pub fn new<C, H>(comm: C, hook: H) -> SumHooked
    where
        C: Collective + 'static,
        H: FnMut(&mut BucketSum<'_>) -> Result<()> + Send + 'static,
    {
        let state = State { hook: Box::new(hook), plan: None, scattered: None };
        SumHooked {
            rank: comm.rank(),
            world_size: comm.world_size(),
            comm: Arc::new(comm),
            is_group: false,
            state: Arc::new(Mutex::new(state)),
        }
    }
}

impl State {
    /// Whether a call that has been made leaves the whole sum of its bucket.
    fn ends_sum(&mut self, kind: CollectiveKind, bucket: u32, is_group: bool) -> bool {
        let Some(plan) = &self.plan else { return false };
        match kind {
            CollectiveKind::ReduceScatter if plan.replicas() > 1 => {
                self.scattered = Some(bucket);
                false
            }
            CollectiveKind::ReduceScatter => true,
            // Of a bucket that is shared out, counts of ranks have an all-reduce too.
            CollectiveKind::AllReduce if plan.is_sharded() => {
                is_group && self.scattered.take() == Some(bucket)
            }
            kind => kind == CollectiveKind::AllReduce,
        }
    }
}

/// The sum of one bucket's gradients over ranks, as far as this rank steps them.
pub struct BucketSum<'a> {
    index: u32,
    pass: u64,
    rank: u32,
    world_size: u32,
    plan: &'a Plan,
    bucket: &'a Bucket,
    values: &'a mut [f32],
}

impl BucketSum<'_> {
    /// Returns the index of the bucket, counted from the first one to be reduced.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Returns the number of the pass, counted from 1 by this stepper.
    pub fn pass(&self) -> u64 {
        self.pass
    }

    /// Returns this rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Returns the number of ranks whose gradients were added up.
    pub fn world_size(&self) -> u32 {
        self.world_size
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

    /// Returns what is here of each parameter: its number in the order of [`Layout::ids`](crate::Layout::ids), its first
    /// element that is here, and where those elements lie in [`values`](Self::values).
    pub fn gradients(&self) -> impl Iterator<Item = (usize, u64, Range<usize>)> + '_ {
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

impl Collective for SumHooked {
    fn inner(&self) -> Option<&dyn Collective> {
        Some(&*self.comm)
    }

    fn rank(&self) -> u32 {
        self.comm.rank()
    }

    fn world_size(&self) -> u32 {
        self.comm.world_size()
    }

    /// The host's memory, if the communicator inside does.
    fn reaches(&self, place: Place) -> bool {
        place == Place::Host && self.comm.reaches(place)
    }

    /// f32, if the communicator inside does.
    fn sums(&self, dtype: DType) -> bool {
        dtype == DType::F32 && self.comm.sums(dtype)
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        self.comm.duplicate()
    }

    fn subgroup(&self, ranks: &[u32]) -> Result<Arc<dyn Collective>> {
        let (comm, state) = (self.comm.subgroup(ranks)?, Arc::clone(&self.state));
        Ok(Arc::new(SumHooked { comm, is_group: true, state, ..*self }))
    }

    fn prepare(&self, plan: &Plan) -> Result<()> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).plan = Some(plan.clone());
        self.comm.prepare(plan)
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        let sums = matches!(call.kind, CollectiveKind::AllReduce | CollectiveKind::ReduceScatter);
        let Some(index) = call.bucket.filter(|_| sums) else {
            return self.comm.enqueue(call);
        };
        if call.dtype != DType::F32 {
            let thing = format_args!("{} gradients", call.dtype);
            return Err(Error::unsupported(thing, "a hook takes only f32", "use f32 gradients"));
        }
        self.comm.enqueue(call)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.ends_sum(call.kind, index, self.is_group) {
            return Ok(());
        }
        let State { hook, plan, .. } = &mut *state;
        let found = plan.as_ref().and_then(|plan| Some((plan, plan.buckets().get(index as usize)?)));
        let (key, pass) = (call.key(), call.pass);
        let target: &mut [f32] = bytemuck::cast_slice_mut(call.target()?);
        let found = found.and_then(|(plan, bucket)| {
            let summed = bucket.summed();
            let len = (summed.end - summed.start) as usize;
            // The counts of ranks may follow. A buffer of another length is an outer hook's own.
            let is_whole = [len, bucket.len as usize].contains(&target.len());
            Some((plan, bucket, target.get_mut(..len).filter(|_| is_whole)?))
        });
        let Some((plan, bucket, values)) = found else {
            let remedy = "pass whole buckets of the plan that was prepared";
            return Err(Error::order(format_args!("[{key}]"), "a hook takes whole buckets only", remedy));
        };
        let (rank, world_size) = (self.rank, self.world_size);
        let mut sum = BucketSum { index, pass, rank, world_size, plan, bucket, values };
        let outcome = hook(&mut sum);
        clear_padding(plan, bucket, bucket.summed(), sum.values);
        outcome
    }

    fn abort(&self, cause: &Error) {
        self.comm.abort(cause);
    }
}

impl fmt::Debug for BucketSum<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sum of bucket {} in pass {}, {} elements here", self.index, self.pass, self.values.len())
    }
}

impl fmt::Debug for SumHooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {} with a hook after its sums", self.rank, self.world_size)
    }
}
