//! Runs each op on a CPU by calling the kernels. The pointers come from the op's accesses, and the tiles come from the
//! plan.
//!
//! Launches are built once, and running an op allocates nothing. Every address comes from `Op::accesses`, so the
//! checker has checked every byte that is touched.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::abi::INSTEP_OPTIMIZER_CUSTOM;
use crate::collective::{Call, Comms};
use crate::device::unknown_sum;
use crate::error::{Error, Result};
use crate::host::bucket_job::{BucketJob, Execution, Prefetches};
use crate::host::custom::CustomStep;
use crate::host::kernels::Kernels;
use crate::host::memories::Memories;
use crate::host::streams::Run;
use crate::launch::{
    Assignment, BorrowedPieces, Kind, Launch, NormStop, Settings, StepConstants, begin_args, decide_args,
    first_control, first_records, first_sets, part_of_step,
};
use crate::layout::Plan;
use crate::op::{Action, CollectiveKind, Memory, Op, Phase, Stream, Words, most_ops_per_pass};
use crate::pool::{Job, Pool};

/// A closure that returns once the caller's sum of a bucket is complete.
pub(crate) type AwaitedSum = Box<dyn FnOnce() -> Result<()> + Send>;

/// Runs ops on one rank's memories.
pub(crate) struct Runner {
    plan: Arc<Plan>,
    memories: Arc<Memories>,
    constants: StepConstants,
    kernels: Kernels,
    pool: Pool,
    comms: Comms,
    norms: Vec<Vec<Work>>,
    steps: Vec<Vec<Work>>,
    /// For each bucket, the points at which its step pauses until the ranks have summed their contributions to the
    /// norms of parameters.
    stops: Vec<Vec<NormStop>>,
    /// For each bucket, whether this rank's shard of the parameters has been stepped but the other shards have not been
    /// gathered yet.
    partly_gathered: Vec<AtomicBool>,
    /// The caller's sums for which ops must wait, in the ops' order. All these ops are on one stream.
    awaited: Mutex<VecDeque<AwaitedSum>>,
}

/// One launch of a bucket.
enum Work {
    Kernel { work: Arc<BucketJob>, job: Arc<Job> },
    Custom(Box<CustomStep>),
}

/// Parts from which [`Runner::new`] builds a runner.
pub(crate) struct Parts {
    pub(crate) plan: Arc<Plan>,
    pub(crate) memories: Arc<Memories>,
    pub(crate) assignment: Arc<Assignment>,
    pub(crate) kernels: Kernels,
    pub(crate) pool: Pool,
    pub(crate) comms: Comms,
}

impl Runner {
    /// # Errors
    /// `Config` if `INSTEP_PREFETCH` is neither `on` nor `off`.
    pub(crate) fn new(parts: Parts) -> Result<Runner> {
        let Parts { plan, memories, assignment, kernels, pool, comms } = parts;
        let prefetches = Prefetches::of(memories.regions().sizes().map(|(_, bytes)| bytes).sum())?;
        let execution = Execution { kernels, prefetches, threads: pool.threads() };
        initialise(&plan, &memories, &assignment);
        let work = |kind: Kind| {
            let launches = |bucket| Launch::all(kind, bucket, &plan, memories.regions(), &assignment);
            let work = |launch: Launch| match launch.args.optimizer {
                INSTEP_OPTIMIZER_CUSTOM => {
                    Work::Custom(Box::new(CustomStep::new(launch, &plan, &assignment, kernels, &memories)))
                }
                _ => {
                    let work = Arc::new(BucketJob::bound(kind, launch, &memories, execution));
                    Work::Kernel { job: Job::new(Arc::clone(&work)), work }
                }
            };
            let buckets = 0..plan.buckets().len() as u32;
            buckets.map(|bucket| launches(bucket).into_iter().map(work).collect()).collect()
        };
        Ok(Runner {
            stops: (0..plan.buckets().len() as u32).map(|bucket| assignment.stops(&plan, bucket)).collect(),
            norms: work(Kind::Norm),
            steps: work(Kind::Step),
            partly_gathered: plan.buckets().iter().map(|_| AtomicBool::new(false)).collect(),
            awaited: Mutex::default(),
            plan,
            memories,
            constants: assignment.constants,
            kernels,
            pool,
            comms,
        })
    }

    /// Replaces the addresses of the caller's tensors.
    ///
    /// # Safety
    /// No op is running or queued.
    pub(crate) unsafe fn rebind(&self, pieces: BorrowedPieces) {
        // SAFETY: the caller's promise: no op runs or is queued, so nothing reads addresses now.
        unsafe { self.memories.rebind(pieces) };
        for work in self.norms.iter().chain(&self.steps).flatten() {
            // SAFETY: the caller's promise: no op runs or is queued, so nothing reads addresses now.
            unsafe {
                match work {
                    Work::Kernel { work, .. } => work.rebind(&self.plan, self.memories.regions()),
                    Work::Custom(step) => step.rebind(&self.plan),
                }
            }
        }
    }

    /// Returns the parts of a runner for another plan. Their memory is new, except for borrowed tensors.
    pub(crate) fn parts_for(
        &self,
        plan: &Arc<Plan>,
        assignment: &Arc<Assignment>,
        borrowed: Option<BorrowedPieces>,
        words: &Arc<Words>,
    ) -> Result<Parts> {
        Ok(Parts {
            memories: Arc::new(Memories::new(plan, assignment, Some(&*self.comms.world), borrowed)?),
            plan: Arc::clone(plan),
            assignment: Arc::clone(assignment),
            kernels: self.kernels,
            pool: self.pool.clone(),
            comms: self.comms.with_words(words),
        })
    }

    /// Returns whether this rank's shard of a bucket has been stepped, but the other shards have not yet been gathered.
    /// No op may be running.
    pub(crate) fn is_partly_gathered(&self, bucket: u32) -> bool {
        self.partly_gathered[bucket as usize].load(Ordering::Relaxed)
    }

    /// Queues the caller's sum for which the next `AwaitSum` op waits.
    pub(crate) fn expect_sum(&self, sum: AwaitedSum) {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner).push_back(sum);
    }

    fn work(&self, launches: &[Work]) -> Result<()> {
        for work in launches {
            match work {
                Work::Kernel { job, .. } => self.pool.run(job),
                Work::Custom(step) => step.run()?,
            }
        }
        Ok(())
    }

    /// Runs the part of a bucket's step between two stops.
    fn step(&self, bucket: u32, stage: usize) -> Result<()> {
        let work = &self.steps[bucket as usize];
        self.work(&work[part_of_step(&self.stops[bucket as usize], stage, work.len())])
    }

    fn begin(&self) {
        let args = begin_args(self.memories.regions(), &self.constants);
        // SAFETY: control memory holds that many records, and the builder has checked their optimizers. By the
        // schedule, no other op touches control memory now.
        unsafe { self.kernels.begin(&args) }
    }

    fn decide(&self, bucket: Option<u32>) {
        let args = decide_args(&self.plan, self.memories.regions(), &self.constants, bucket);
        // SAFETY: control memory is this device's own, and by the schedule no other op touches it now.
        unsafe { self.kernels.decide(&args) }
    }
}

impl Run for Runner {
    fn rank(&self) -> u32 {
        self.comms.world.rank()
    }

    fn op_room(&self) -> usize {
        most_ops_per_pass(&self.plan)
    }

    fn streams(&self) -> &'static [Stream] {
        Stream::used(&self.plan)
    }

    fn abort(&self, cause: &Error) {
        self.comms.abort(cause);
    }

    fn run(&self, op: &Op) -> Result<()> {
        match op.action {
            Action::Wait(_) | Action::Record(_) => {}
            Action::AwaitSum { bucket } => {
                let sum = self.awaited.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                sum.ok_or_else(|| unknown_sum(bucket))?()?;
            }
            Action::Control(Phase::Begin) => self.begin(),
            Action::Control(Phase::Decide) => self.decide(None),
            Action::Control(Phase::DecideBucket { bucket }) => self.decide(Some(bucket)),
            // SAFETY: by the schedule, no other op writes control memory now.
            Action::Control(Phase::Publish) => unsafe { self.memories.publish() },
            Action::Norm { bucket } => self.work(&self.norms[bucket as usize])?,
            Action::Measure { bucket, stage } => self.step(bucket, stage as usize)?,
            Action::Step { bucket, count } => {
                for bucket in bucket..bucket + count {
                    let is_gathered =
                        self.plan.buckets()[bucket as usize].is_sharded() && !self.plan.shards_params();
                    self.partly_gathered[bucket as usize].store(is_gathered, Ordering::Relaxed);
                    self.step(bucket, self.stops[bucket as usize].len())?;
                }
            }
            // SAFETY: by the schedule, no other op touches control memory now.
            Action::Leave { segment } => unsafe { self.memories.leave(&self.plan, segment) },
            Action::Copy { src, dst, .. } => {
                assert_eq!(src.bytes(), dst.bytes());
                let [src, dst] = [src, dst].map(|span| (self.memories.resolve(span), span.bytes() as usize));
                // SAFETY: `resolve` has checked the bounds, and two memories never overlap. By the schedule, no other
                // op touches them now.
                unsafe { dst.0.copy_from_nonoverlapping(src.0, src.1) }
            }
            Action::Add { bucket, src, dst } => {
                let dtype = self.plan.buckets()[bucket as usize].storage.precision.grad;
                let count = src.bytes() / dtype.bytes();
                assert_eq!(src.bytes(), dst.bytes());
                let [src, dst] = [src, dst].map(|span| self.memories.resolve(span));
                // SAFETY: `resolve` has checked the bounds, and the sum replaces one of its summands. By the schedule,
                // no other op touches them now.
                unsafe { self.kernels.sum_to(&[dst, src], dtype, 0, count, dst) }
            }
            // SAFETY: by the schedule, no other op touches the span now.
            Action::Count(span) => unsafe { self.memories.count(span, span.dtype(&self.plan)) },
            Action::Zero(span) => {
                // SAFETY: `resolve` has checked the bounds. The schedule guarantees, and the checker proves, that no
                // other op touches the span now.
                unsafe { self.memories.resolve(span).write_bytes(0, span.bytes() as usize) }
            }
            // SAFETY: by the schedule, no other op touches the span now, and its contents are no longer needed.
            Action::Release(span) => unsafe { self.memories.release(span) }?,
            Action::Collective { kind, bucket, dst, .. } => {
                let gathered = bucket.filter(|_| kind == CollectiveKind::AllGather);
                let memory = dst.memory;
                self.comms.enqueue(slice::from_ref(op), &self.plan, |key, ranks, spans| {
                    let [src, dst] = spans.map(|span| self.memories.resolve(span));
                    // SAFETY: both spans are in bounds, and by the schedule no other op touches them meanwhile.
                    unsafe { Call::new(key, ranks, src, dst, self.comms.deadline, None) }
                })?;
                let is_last = |bucket: &u32| {
                    Memory::sent_of(&self.plan.buckets()[*bucket as usize]).last() == Some(memory)
                };
                if let Some(bucket) = gathered.filter(is_last) {
                    self.partly_gathered[bucket as usize].store(false, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }
}

/// Writes control memory and settings as they are before the first pass.
fn initialise(plan: &Plan, memories: &Memories, assignment: &Assignment) {
    // SAFETY: no op has been submitted yet.
    unsafe {
        let records = first_records(plan, memories.regions(), assignment);
        memories.write_control(first_control(&assignment.constants), records);
        memories.write_sets(first_sets(plan, &assignment.constants));
        memories.write_settings(&Settings::new(plan, assignment));
    }
}
