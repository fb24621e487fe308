//! A hook that is called after each bucket's sum over ranks. With any strategy, the hook can read and change the
//! elements that this rank steps.
//!
//! The hook runs inside the call that makes the last collective of a bucket's sum. Norms, decisions and steps therefore
//! run after the hook, and the schedule does not change. The hook must leave the same bits on every rank that steps the
//! same elements. The idea is PyTorch's `FSDPModule.set_all_reduce_hook`.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::collective::{Call, Collective};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, Place};
use crate::layout::{Bucket, Plan};
use crate::op::CollectiveKind;
use crate::overlap::bucket::{BucketSum, EnqueuedSum, SumPlace, clear_padding};

type OnHost = dyn FnMut(&mut BucketSum<'_>) -> Result<()> + Send;
type OnGpu = dyn FnMut(&EnqueuedSum<'_>) -> Result<()> + Send;

enum Hook {
    OnHost(Box<OnHost>),
    OnGpu(Box<OnGpu>),
}

/// A communicator that calls a hook with each bucket's sum over ranks. The sum covers the full bucket, or this rank's
/// shard if there is a [sharding strategy](crate::Strategy). With [`shard_size`](crate::StepperBuilder::shard_size),
/// the hook runs after the all-reduce among replicas. With [`Accumulation::Summed`](crate::Accumulation) and
/// `shard_size`, the hook runs once per pass. With `Summed` and without `shard_size`, the hook runs for each
/// micro-batch, before the micro-batch's sum is added to the earlier sums. Norms, clipping and the step use the values
/// that the hook leaves, and divide them by the number of ranks. Gradients are f32.
///
/// The hook of a [`Hooked`](super::Hooked) replaces the sum. The hook of a `SumHooked` runs after the sum.
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
/// The hook runs on the reduce stream's thread, one bucket at a time, in the order of the sums. The hook is not called
/// for a bucket if all parameters of the bucket are frozen. There is one exception. With `Strategy::Replicated`, the
/// hook is always called for the bucket that contains the count of ranks with data.
///
/// # Errors
/// If the hook returns an error or panics, the stepper is poisoned and the other ranks end with an error. The hook can
/// return its own message as [`Error::Hook`].
///
/// # Source
/// PyTorch's `FSDPModule.set_all_reduce_hook`.
pub struct SumHooked {
    comm: Arc<dyn Collective>,
    rank: u32,
    world_size: u32,
    /// Whether `comm` contains only some of the ranks.
    is_group: bool,
    is_on_gpu: bool,
    state: Arc<Mutex<State>>,
}

struct State {
    hook: Hook,
    /// The plan with the offset and length of each gradient.
    plan: Option<Plan>,
    /// The bucket of the last reduce-scatter, if the bucket's all-reduce among replicas has not run yet.
    scattered: Option<u32>,
}

impl SumHooked {
    /// Builds a communicator that calls `hook` after each sum of `comm`.
    pub fn new<C, H>(comm: C, hook: H) -> SumHooked
    where
        C: Collective + 'static,
        H: FnMut(&mut BucketSum<'_>) -> Result<()> + Send + 'static,
    {
        SumHooked::of(Arc::new(comm), Hook::OnHost(Box::new(hook)))
    }

    /// Builds a communicator that calls `hook` after each sum on a GPU. The hook runs on the trainer's thread, and
    /// enqueues its work on the stream of the sum. If one rank has such a wrapper, all ranks must have one. Without the
    /// wrapper, NCCL starts a bucket's calls together. With the wrapper, NCCL starts a bucket's calls one after
    /// another.
    ///
    /// ```no_run
    /// use instep::cuda::{Cuda, Nccl};
    /// use instep::overlap::{EnqueuedSum, SumHooked};
    ///
    /// # fn clamp(_: instep::DevicePtr, _: u64, _: instep::StreamHandle) {}
    /// let comm = Nccl::from_environment()?;
    /// let comm = SumHooked::on_gpu(comm, |sum: &EnqueuedSum<'_>| {
    ///     for (_, _, range) in sum.gradients() {
    ///         clamp(sum.ptr(range.start), (range.end - range.start) as u64, sum.stream()); // a kernel of yours
    ///     }
    ///     Ok(())
    /// });
    /// # let _: SumHooked = comm;
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn on_gpu<C, H>(comm: C, hook: H) -> SumHooked
    where
        C: Collective + 'static,
        H: FnMut(&EnqueuedSum<'_>) -> Result<()> + Send + 'static,
    {
        SumHooked::of(Arc::new(comm), Hook::OnGpu(Box::new(hook)))
    }

    fn of(comm: Arc<dyn Collective>, hook: Hook) -> SumHooked {
        let is_on_gpu = matches!(hook, Hook::OnGpu(_));
        let state = Arc::new(Mutex::new(State { hook, plan: None, scattered: None }));
        let (rank, world_size) = (comm.rank(), comm.world_size());
        SumHooked { comm, rank, world_size, is_group: false, is_on_gpu, state }
    }
}

impl State {
    /// Returns whether the bucket's sum is complete after this call.
    fn ends_sum(&mut self, kind: CollectiveKind, bucket: u32, is_group: bool) -> bool {
        let Some(plan) = &self.plan else { return false };
        match kind {
            CollectiveKind::ReduceScatter if plan.replicas() > 1 => {
                self.scattered = Some(bucket);
                false
            }
            CollectiveKind::ReduceScatter => true,
            // A sharded bucket's counts of ranks have a separate all-reduce.
            CollectiveKind::AllReduce if plan.is_sharded() => {
                is_group && self.scattered.take() == Some(bucket)
            }
            kind => kind == CollectiveKind::AllReduce,
        }
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

    /// Returns true only for memory of the device on which the hook runs, which is the host or a GPU. The inner
    /// communicator must also reach this memory.
    fn reaches(&self, place: Place) -> bool {
        self.is_on_gpu != (place == Place::Host) && self.comm.reaches(place)
    }

    /// Returns true only for f32, and only if the inner communicator sums f32.
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
        // The counts of ranks may follow the gradients. A buffer of any other length belongs to an outer hook.
        let elements = (call.dst_bytes() / DType::F32.bytes()) as usize;
        let len = |bucket: &Bucket| (bucket.summed().end - bucket.summed().start) as usize;
        let is_whole = |bucket: &Bucket| [len(bucket), bucket.len as usize].contains(&elements);
        let Some((plan, bucket)) = found.filter(|(_, bucket)| is_whole(bucket)) else {
            let remedy = "pass whole buckets of the plan that was prepared";
            let thing = format_args!("[{}]", call.key());
            return Err(Error::order(thing, "a hook takes whole buckets only", remedy));
        };
        let (pass, rank, world_size) = (call.pass, self.rank, self.world_size);
        let place = SumPlace { index, pass, rank, world_size, plan, bucket };
        match hook {
            Hook::OnHost(hook) => {
                let target: &mut [f32] = bytemuck::cast_slice_mut(call.target()?);
                let mut sum = BucketSum { place, values: &mut target[..len(bucket)] };
                let outcome = hook(&mut sum);
                clear_padding(plan, bucket, bucket.summed(), sum.values);
                outcome
            }
            Hook::OnGpu(hook) => {
                let at = DevicePtr(call.dst().addr() as u64);
                hook(&EnqueuedSum { place, at, len: len(bucket), stream: call.require_stream()? })
            }
        }
    }

    fn abort(&self, cause: &Error) {
        self.comm.abort(cause);
    }
}

impl fmt::Debug for SumHooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {} with a hook after its sums", self.rank, self.world_size)
    }
}
