//! A hook that replaces a bucket's all-reduce. Possible uses are noise, clipping of local gradients, low-rank
//! compression and gossip.
//!
//! The hook gets only gradients. The padding between gradients is cleared after the hook, because values in the padding
//! would add up from pass to pass. The counts in the bucket's tail are summed without the hook. A failed sum is always
//! reported, even if the hook ignores the error.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::collective::{Call, CallKey, Collective};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::Place;
use crate::layout::{Bucket, Plan};
use crate::op::CollectiveKind;
use crate::overlap::bucket::{GradBucket, clear_padding, sum};

/// A communicator that calls a hook instead of each bucket's all-reduce. The hook receives the bucket's gradients. The
/// step uses the hook's result as the SUM over ranks, and divides it by the number of ranks. If a hook computes means,
/// it must call [`means_to_sums`](GradBucket::means_to_sums). The hook's result must have the same bits on every rank,
/// or parameters diverge. `Hooked` works only on the host so far.
///
/// The inner communicator makes the hook's sums, so `Hooked` around [`Compressed`](super::Compressed) sends 16 bits per
/// gradient. For a second hook, wrap the first `Hooked` in a second `Hooked`. The outer wrapper's hook is called first.
/// The inner wrapper accepts only complete buckets, so the outer hook must sum with
/// [`all_reduce`](GradBucket::all_reduce) and with no other call.
///
/// ```
/// use instep::overlap::{GradBucket, Hooked};
/// use instep::{Layout, Sgd, Stepper, in_process};
///
/// let layout = Layout::builder().param("weight", 2).build()?;
/// let weight = layout.id("weight")?;
/// let ranks = in_process(2, |comm| {
///     let comm = Hooked::new(comm, |bucket: &mut GradBucket<'_>| {
///         bucket.values_mut().iter_mut().for_each(|g| *g = g.clamp(-1.0, 1.0)); // local gradients
///         bucket.all_reduce() // now sums over ranks
///     });
///     let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, comm)?;
///     let mut pass = stepper.begin()?;
///     pass.grads().write(weight, &[0.5, 100.0])?;
///     pass.grad_ready(weight)?;
///     pass.finish()?;
///     Ok::<_, instep::Error>(stepper.view::<f32>(weight)?.to_vec())
/// })?;
/// assert_eq!(ranks, [[-0.5, -1.0], [-0.5, -1.0]]);
/// # Ok::<(), instep::Error>(())
/// ```
///
/// # Ordering
/// The hook runs on the reduce stream's thread, one bucket at a time, in the order of the buckets' indices. A bucket's
/// norm and step run after the bucket's hook.
///
/// # Errors
/// `Unsupported` if the stepper counts ranks, but the inner communicator does not sum the counts. Without summed
/// counts, ranks would skip different parameters. A stepper counts ranks if it uses [`Unused::Skip`](crate::Unused) or
/// [`uneven_inputs`](crate::StepperBuilder::uneven_inputs). If the hook returns an error or panics, the stepper is
/// poisoned and the other ranks end with an error. The hook can return its message as [`Error::Hook`]. A sum that has
/// failed poisons the stepper even if the hook returns `Ok`.
///
/// # Source
/// PyTorch's `register_comm_hook` and `_hook_then_optimizer`.
pub struct Hooked<C, H> {
    comm: C,
    state: Mutex<State<H>>,
}

struct State<H> {
    hook: H,
    /// The plan with the offset and length of each gradient.
    plan: Option<Plan>,
    /// A buffer for a bucket's counts, followed by a 1. The buffer stays allocated, so that later passes allocate
    /// nothing.
    counted: Vec<f32>,
}

impl<C: Collective, H: FnMut(&mut GradBucket<'_>) -> Result<()> + Send> Hooked<C, H> {
    /// Builds a communicator in which `hook` replaces the all-reduce. The hook's own all-reduces use `comm`.
    pub fn new(comm: C, hook: H) -> Hooked<C, H> {
        Hooked { comm, state: Mutex::new(State { hook, plan: None, counted: Vec::new() }) }
    }
}

/// Sums counts over ranks. An additional element of 1 is summed with the counts. If the sum of this element is not the
/// number of ranks, the communicator has not summed the counts, and an error is returned.
fn sum_counts(
    comm: &dyn Collective,
    key: CallKey,
    deadline: Duration,
    counts: &mut [f32],
    counted: &mut Vec<f32>,
    failed: &mut Option<Error>,
) -> Result<()> {
    counted.clear();
    counted.extend_from_slice(counts);
    counted.push(1.0);
    sum(comm, key, deadline, counted, failed)?;
    if counted.pop() != Some(comm.world_size() as f32) {
        let wrong =
            "the communicator inside the hook does not sum them, so ranks would skip different parameters";
        let remedy = "use Unused::Refuse or Unused::StepZero and no uneven_inputs";
        return Err(Error::unsupported("counts of ranks", wrong, remedy));
    }
    counts.copy_from_slice(counted);
    Ok(())
}

impl<C: Collective, H: FnMut(&mut GradBucket<'_>) -> Result<()> + Send> Collective for Hooked<C, H> {
    fn inner(&self) -> Option<&dyn Collective> {
        Some(&self.comm)
    }

    fn rank(&self) -> u32 {
        self.comm.rank()
    }

    fn world_size(&self) -> u32 {
        self.comm.world_size()
    }

    /// Returns true only for the host's memory, and only if `C` reaches that memory.
    fn reaches(&self, place: Place) -> bool {
        place == Place::Host && self.comm.reaches(place)
    }

    /// Returns true only for f32.
    fn sums(&self, dtype: DType) -> bool {
        dtype == DType::F32
    }

    fn supports(&self, kind: CollectiveKind) -> bool {
        matches!(kind, CollectiveKind::AllReduce | CollectiveKind::Broadcast)
    }

    fn prepare(&self, plan: &Plan) -> Result<()> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).plan = Some(plan.clone());
        self.comm.prepare(plan)
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        if !self.supports(call.kind) {
            return Err(call.unknown_kind());
        }
        if call.kind != CollectiveKind::AllReduce {
            return self.comm.enqueue(call);
        }
        if call.dtype != DType::F32 {
            let thing = format_args!("{} gradients", call.dtype);
            let remedy = "use f32 gradients, and compress inside the hook's communicator";
            return Err(Error::unsupported(thing, "a hook takes only f32", remedy));
        }
        let Some(index) = call.bucket else {
            // A call without a bucket has the counts of an outer hook, and no hook sees counts.
            return self.comm.enqueue(call);
        };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { hook, plan, counted } = &mut *state;
        let elements = call.bytes / call.dtype.bytes();
        // The length is that of the bucket, or that of the part that an outer hook sees.
        let is_whole = |bucket: &Bucket| [bucket.len, bucket.tail.start - bucket.start].contains(&elements);
        let found = plan.as_ref().and_then(|plan| Some((plan, plan.buckets().get(index as usize)?)));
        let Some((plan, bucket)) = found.filter(|(_, bucket)| is_whole(bucket)) else {
            let remedy = "pass whole buckets of the plan that was prepared";
            return Err(Error::order(format_args!("[{call}]"), "a hook takes whole buckets only", remedy));
        };
        let (key, deadline) = (call.key(), call.deadline());
        let gradients = (bucket.tail.start - bucket.start) as usize;
        let (values, rest) = bytemuck::cast_slice_mut(call.in_place()?).split_at_mut(gradients);
        let counts =
            if rest.is_empty() { rest } else { &mut rest[..(bucket.tail.end - bucket.tail.start) as usize] };
        let mut seen =
            GradBucket { comm: &self.comm, key, deadline, index, plan, bucket, values, failed: None };
        let outcome = hook(&mut seen);
        let mut failed = seen.failed.take();
        clear_padding(plan, bucket, bucket.start..bucket.tail.start, seen.values);
        if !counts.is_empty() && outcome.is_ok() {
            // No hook sees the counts, so this call names no bucket. If a sum has failed, this call fails too.
            let key = CallKey { bucket: None, ..key };
            if let Err(error) = sum_counts(&self.comm, key, deadline, counts, counted, &mut failed) {
                failed.get_or_insert(error);
            }
        }
        failed.map_or(outcome, Err)
    }

    fn abort(&self, cause: &Error) {
        self.comm.abort(cause);
    }
}

impl<C: fmt::Debug, H> fmt::Debug for Hooked<C, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} with a hook", self.comm)
    }
}
