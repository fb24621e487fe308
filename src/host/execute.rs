//! What each op means on a CPU: pointers from its accesses, tiles from the plan, a call into the kernels.
//!
//! Everything that a launch needs is built once; running an op allocates nothing. Must take every address through
//! `Op::accesses`, so that the checker has judged exactly the bytes that are touched.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use crate::abi::{
    INSTEP_ACTION_AVERAGE, INSTEP_ACTION_LEAVE, INSTEP_ACTION_STEP, INSTEP_DTYPE_F32, INSTEP_MAX_STATES,
    INSTEP_NO_BUCKET, INSTEP_TILE_ELEMENTS, InstepBeginArgs, InstepControl, InstepDecideArgs, InstepHyper,
    InstepSegment, InstepStepArgs, InstepTile,
};
use crate::error::Result;
use crate::host::arena::Memories;
use crate::host::kernels::Kernels;
use crate::layout::{Bucket, Plan, Segment, SegmentAction};
use crate::op::{Action, Call, Collective, Frozen, Memory, Op, Phase, Span, Stream};
use crate::pool::{Chunks, Job, Pool};

/// Tiles that one pool task takes: enough to outweigh handing it over, few enough to balance.
const TILES_PER_CHUNK: usize = 16;

/// Bytes up to which the launching thread works alone: waking another one takes longer than half of this work.
const ALONE_BYTES: u64 = 3 << 19;

/// The numbers of a step that no op carries.
#[derive(Clone, Copy)]
pub(crate) struct Rule {
    pub(crate) optimizer: u32,
    pub(crate) states: usize,
    /// Ranks to take the mean over; 0: those that contributed.
    pub(crate) divisor: f64,
    pub(crate) loss_scale: f64,
    pub(crate) max_norm: Option<f64>,
    pub(crate) skip_nonfinite: bool,
}

/// Runs ops on one rank's memories.
pub(crate) struct Executor {
    plan: Arc<Plan>,
    memories: Arc<Memories>,
    rule: Rule,
    kernels: Kernels,
    pool: Pool,
    comm: Arc<dyn Collective>,
    rank: u32,
    deadline: Duration,
    norms: Vec<Arc<Job>>,
    steps: Vec<Arc<Job>>,
}

/// What [`Executor::new`] puts together.
pub(crate) struct Parts {
    pub(crate) plan: Arc<Plan>,
    pub(crate) memories: Arc<Memories>,
    pub(crate) rule: Rule,
    /// First hyperparameters in the settings, by group.
    pub(crate) hypers: Vec<InstepHyper>,
    pub(crate) kernels: Kernels,
    pub(crate) pool: Pool,
    pub(crate) comm: Arc<dyn Collective>,
    pub(crate) deadline: Duration,
}

impl Executor {
    pub(crate) fn new(parts: Parts) -> Executor {
        let Parts { plan, memories, rule, hypers, kernels, pool, comm, deadline } = parts;
        assert!(rule.states <= INSTEP_MAX_STATES as usize);
        initialise_control(&plan, &memories, &hypers);
        let job = |kind: Kind, bucket: usize| {
            Job::new(BucketJob::new(kind, bucket as u32, &plan, &memories, &rule, kernels))
        };
        let buckets = 0..plan.buckets().len();
        Executor {
            norms: buckets.clone().map(|b| job(Kind::Norm, b)).collect(),
            steps: buckets.map(|b| job(Kind::Step, b)).collect(),
            plan,
            memories,
            rule,
            kernels,
            pool,
            rank: comm.rank(),
            comm,
            deadline,
        }
    }

    /// As it was when the executor was built: asking later could run a user's code where a panic has no catcher.
    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    /// About how many ops one pass brings a stream: per bucket its waits, marks and work, per segment two zeros.
    pub(crate) fn op_room(&self) -> usize {
        16 * self.plan.buckets().len() + 2 * self.plan.segments().len()
    }

    pub(crate) fn comm(&self) -> &dyn Collective {
        &*self.comm
    }

    /// Runs one op to its end on the calling thread. Wait and Record are the streams' business.
    pub(crate) fn run(&self, op: &Op) -> Result<()> {
        match op.action {
            Action::Wait(_) | Action::Record(_) => {}
            Action::Control(Phase::Begin) => self.begin(),
            Action::Control(Phase::Decide) => self.decide(),
            Action::Norm { bucket } => self.pool.run(&self.norms[bucket as usize]),
            Action::Step { bucket } => self.pool.run(&self.steps[bucket as usize]),
            Action::Zero(span) => {
                // SAFETY: `resolve` has checked the bounds; that nothing else touches the span now is what the
                // schedule guarantees and the checker proves for every op.
                unsafe { self.memories.resolve(span).write_bytes(0, span.bytes() as usize) }
            }
            Action::Collective { kind, pass, agreement, bucket, src, dst } => {
                let call = Call {
                    kind,
                    pass,
                    bucket,
                    dtype: self.plan.dtype(),
                    src: self.memories.resolve(src),
                    dst: self.memories.resolve(dst),
                    bytes: src.bytes(),
                    agreement,
                    deadline: self.deadline,
                };
                // SAFETY: both spans are in bounds, and untouched meanwhile as for every op.
                unsafe { self.comm.enqueue(&call) }?;
            }
        }
        Ok(())
    }

    fn begin(&self) {
        let args = InstepBeginArgs {
            control: self.memories.control(),
            segments: self.memories.segments(),
            groups: self.memories.groups(),
            actions: self.memories.actions(),
            segment_count: self.plan.segments().len() as u64,
            divisor: self.rule.divisor,
            loss_scale: self.rule.loss_scale,
            optimizer: self.rule.optimizer,
            reserved: 0,
        };
        // SAFETY: control memory holds that many segments, each of a group that the builder has checked; exclusive as
        // for every op.
        unsafe { self.kernels.begin(&args) }
    }

    fn decide(&self) {
        let count = self.plan.carrier().and_then(|bucket| bucket.contributors);
        let args = InstepDecideArgs {
            control: self.memories.control(),
            contributors: count.map_or(std::ptr::null(), |at| element(&self.plan, &self.memories, at)),
            max_norm: self.rule.max_norm.unwrap_or(-1.0),
            skip_nonfinite: self.rule.skip_nonfinite.into(),
            reserved: 0,
        };
        // SAFETY: as in `begin`.
        unsafe { self.kernels.decide(&args) }
    }
}

/// What control memory and settings say before the first pass.
fn initialise_control(plan: &Plan, memories: &Memories, hypers: &[InstepHyper]) {
    for (group, hyper) in hypers.iter().enumerate() {
        // SAFETY: no op has been submitted yet.
        unsafe { memories.write_group(group, *hyper) }
    }
    // SAFETY: zeroed memory of the right size and alignment, and no op has been submitted yet.
    let control: &mut InstepControl = unsafe { &mut *memories.control() };
    control.clip = 1.0;
    control.first_nonfinite_bucket = INSTEP_NO_BUCKET;
    for (k, segment) in plan.segments().iter().enumerate() {
        // SAFETY: control memory has one record per segment, zeroed, and no op has been submitted yet.
        let record: &mut InstepSegment = unsafe { &mut *memories.segments().add(k) };
        record.group = segment.group;
        let address = |at: u64| element(plan, memories, at).expose_provenance() as u64;
        record.tail = segment.tail.map_or(0, address);
        record.contributors = plan.buckets()[segment.bucket as usize].contributors.map_or(0, address);
        // SAFETY: as for the groups above.
        unsafe { memories.write_action(k, action_code(segment.action)) }
    }
}

/// One element of gradient memory.
fn element(plan: &Plan, memories: &Memories, at: u64) -> *mut f32 {
    memories.resolve(Span::elements(Memory::Grads, plan, at, at + 1)).cast()
}

/// What the kernels call an action.
pub(crate) fn action_code(action: SegmentAction) -> u32 {
    match action {
        SegmentAction::Step => INSTEP_ACTION_STEP,
        SegmentAction::Average => INSTEP_ACTION_AVERAGE,
        SegmentAction::Leave => INSTEP_ACTION_LEAVE,
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Norm,
    Step,
}

/// One bucket's launch: arguments and tiles, built once.
struct BucketJob {
    kind: Kind,
    args: InstepStepArgs,
    tiles: Vec<InstepTile>,
    tiles_per_chunk: usize,
    kernels: Kernels,
    /// Keeps what the arguments point to alive.
    _memories: Arc<Memories>,
}

// SAFETY: the pointers lead into `_memories`, which is shareable; chunks of one launch touch different tiles, and
// control words that they share are atomics on the other side.
unsafe impl Send for BucketJob {}
// SAFETY: as above.
unsafe impl Sync for BucketJob {}

impl BucketJob {
    fn new(
        kind: Kind,
        bucket: u32,
        plan: &Plan,
        memories: &Arc<Memories>,
        rule: &Rule,
        kernels: Kernels,
    ) -> BucketJob {
        let action = match kind {
            Kind::Norm => Action::Norm { bucket },
            Kind::Step => Action::Step { bucket },
        };
        let mut args = InstepStepArgs {
            control: memories.control(),
            segments: memories.segments(),
            tiles: std::ptr::null(),
            tile_count: 0,
            param_base: std::ptr::null_mut(),
            grads: std::ptr::null_mut(),
            master: std::ptr::null_mut(),
            states: [std::ptr::null_mut(); INSTEP_MAX_STATES as usize],
            optimizer: rule.optimizer,
            state_count: rule.states as u32,
            bucket,
            param_dtype: INSTEP_DTYPE_F32,
            grad_dtype: INSTEP_DTYPE_F32,
            reserved: 0,
        };
        // With nothing frozen: what is frozen later the kernels leave out by its action.
        let first = Span::bucket(plan, &plan.buckets()[bucket as usize]).start;
        let (mut params, mut bytes) = (None, 0);
        let op = Op { stream: Stream::Optim, action };
        op.accesses(plan, rule.states, &Frozen::default(), &mut |access| {
            bytes += if access.span.memory == Memory::Control { 0 } else { access.moved_bytes() };
            match access.span.memory {
                Memory::Grads if access.span.start == first => {
                    args.grads = memories.resolve(access.span).cast()
                }
                Memory::Params => params = Some(access.span),
                Memory::State(k) => args.states[usize::from(k)] = memories.resolve(access.span).cast(),
                Memory::Grads | Memory::Control | Memory::Settings => {}
            }
        });
        let param = |segment: &Segment| {
            let span = Span::segment(Memory::Params, plan, segment);
            // A norm has no parameters, and its tiles an address of zero that is never read.
            params.map_or(0, |claimed: Span| {
                assert!(
                    claimed.start <= span.start && span.end <= claimed.end,
                    "a tile leaves its op's spans"
                );
                memories.resolve(span).expose_provenance() as u64
            })
        };
        let tiles = tiles(plan, &plan.buckets()[bucket as usize], param);
        args.tiles = tiles.as_ptr();
        args.tile_count = tiles.len() as u64;
        let tiles_per_chunk = if bytes <= ALONE_BYTES { tiles.len().max(1) } else { TILES_PER_CHUNK };
        BucketJob { kind, args, tiles, tiles_per_chunk, kernels, _memories: Arc::clone(memories) }
    }
}

/// A bucket's segments, cut into tiles; `param` gives a segment's address, offsets are relative to the bucket. Padding
/// belongs to none.
fn tiles(plan: &Plan, bucket: &Bucket, param: impl Fn(&Segment) -> u64) -> Vec<InstepTile> {
    let mut tiles = Vec::new();
    for index in bucket.segments.clone() {
        let segment = &plan.segments()[index as usize];
        let param = param(segment);
        let (grad, state) = (segment.grad_start - bucket.start, segment.start - bucket.params.start);
        assert!(grad + segment.len <= bucket.len, "a segment leaves its bucket");
        let mut done = 0;
        while done < segment.len {
            let count = (segment.len - done).min(INSTEP_TILE_ELEMENTS.into());
            tiles.push(InstepTile {
                param: if param == 0 { 0 } else { param + done * plan.dtype().bytes() },
                grad_offset: grad + done,
                state_offset: state + done,
                count: count as u32,
                segment: index,
                first: (done == 0).into(),
                reserved: [0; 7],
            });
            done += count;
        }
    }
    tiles
}

impl Chunks for BucketJob {
    fn chunk_count(&self) -> usize {
        self.tiles.len().div_ceil(self.tiles_per_chunk)
    }

    fn run_chunk(&self, chunk: usize) {
        let first = chunk * self.tiles_per_chunk;
        let last = (first + self.tiles_per_chunk).min(self.tiles.len());
        // SAFETY: the arguments were resolved from the op's accesses and `_memories` keeps them alive; chunks are
        // disjoint runs of this job's own tiles; nothing else touches the bucket, as for every op.
        unsafe {
            match self.kind {
                Kind::Norm => self.kernels.norm(&self.args, first as u64, last as u64),
                Kind::Step => self.kernels.step(&self.args, first as u64, last as u64),
            }
        }
    }
}
