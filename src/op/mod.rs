//! Operations (ops) as plain data. The schedule creates ops, executors run them, and the checker reads them.
//!
//! An [`Op`] holds no pointer, closure or foreign handle. Executors map an op's [`Memory`] to an address and an op's
//! [`Ticket`] to an event. Only [`Op::accesses`] defines which bytes an op touches. The checker and the launches of
//! steps both use `accesses`, so a step gets exactly the memory that was checked.

mod agreement;
mod span;

use std::fmt;

use crate::abi::{INSTEP_PART_APPLY, INSTEP_PART_END, INSTEP_PART_MEASURE, INSTEP_PART_WHOLE};
use crate::layout::{Bucket, Gradients, Master, Plan, SegmentAction, Storage};

pub(crate) use agreement::Agreed;
pub(crate) use agreement::{Line, WrittenValues, explain};
pub use agreement::{Words, difference};
pub(crate) use span::{FURTHER_CONTROLS_AT, bytes_of};
pub use span::{Memory, Span};

/// A queue of operations that run in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Forward and backward. On a GPU, this stream is the trainer's stream. On the host, it is the caller's thread.
    #[default]
    Compute,
    /// Collectives over gradients.
    Reduce,
    /// Control ops, norms and steps. With [offload](crate::StepperBuilder::offload), these ops run on the host.
    Optim,
    /// Collectives over stepped parameters. These collectives use a separate communicator, so that they do not delay
    /// the next reduce.
    Gather,
    /// Stream for copies to the host's memory, with [offload](crate::StepperBuilder::offload). These copies have their
    /// own stream, because on the reduce stream they would delay the next reduce.
    Download,
    /// Stream for copies to the device's memory, with offload. These copies wait for steps, so on the download stream
    /// they would delay later downloads.
    Upload,
}

/// Number of streams.
pub const STREAMS: usize = Stream::ALL.len();

impl Stream {
    /// All streams.
    pub const ALL: [Stream; 6] =
        [Stream::Compute, Stream::Reduce, Stream::Optim, Stream::Gather, Stream::Download, Stream::Upload];

    /// Returns the streams on which a plan's ops run, except the trainer's stream.
    pub(crate) fn used(plan: &Plan) -> &'static [Stream] {
        use Stream::*;
        match (plan.is_sharded(), plan.is_offloaded()) {
            (false, false) => &[Reduce, Optim],
            (true, false) => &[Reduce, Optim, Gather],
            (false, true) => &[Reduce, Optim, Download, Upload],
            (true, true) => &[Reduce, Optim, Gather, Download, Upload],
        }
    }

    pub(crate) fn is_always_used(self) -> bool {
        matches!(self, Stream::Compute | Stream::Reduce | Stream::Optim)
    }

    pub(crate) const fn index(self) -> usize {
        self as usize
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Stream::Compute => "compute",
            Stream::Reduce => "reduce",
            Stream::Optim => "optim",
            Stream::Gather => "gather",
            Stream::Download => "download",
            Stream::Upload => "upload",
        }
    }
}

/// A position on a stream. A ticket plays the role of a CUDA event: [`Record`](Action::Record) marks it, and
/// [`Wait`](Action::Wait) waits for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ticket {
    /// The stream of the position.
    pub stream: Stream,
    /// The number of `Record` ops on the stream up to this position, including the `Record` at this position.
    pub tick: u64,
}

/// The kinds of control op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Opens a pass: adds the last pass's updates to the step counts, computes the scalars of this pass's steps, and
    /// zeroes the accumulators.
    Begin,
    /// Computes the clip coefficient and the skip flag from the norm, and stores the numbers that the next pass needs.
    Decide,
    /// Computes one bucket's clip coefficient from the bucket's norm, before the bucket's step.
    DecideBucket {
        /// The index of the bucket.
        bucket: u32,
    },
    /// Writes the pass's status to memory that the host can read without waiting for the device.
    Publish,
}

/// The kind of a collective.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveKind {
    /// Replaces every rank's buffer by the sum over ranks.
    AllReduce,
    /// Replaces every rank's buffer by rank 0's buffer.
    Broadcast,
    /// Splits each rank's source into `world_size` parts. Rank r's destination gets the sum over ranks of the r-th
    /// parts. A source is `world_size` times as long as a destination.
    ReduceScatter,
    /// Copies the sources of all ranks to every rank's destination, in rank order.
    AllGather,
    /// Replaces unsigned 64-bit integers by their sum over ranks, modulo 2^64.
    Sum64,
    /// Replaces unsigned 32-bit integers by their maximum over ranks.
    Max32,
    /// Replaces unsigned 32-bit integers by their minimum over ranks.
    Min32,
}

impl CollectiveKind {
    /// All kinds.
    pub const ALL: [CollectiveKind; 7] = [
        CollectiveKind::AllReduce,
        CollectiveKind::Broadcast,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllGather,
        CollectiveKind::Sum64,
        CollectiveKind::Max32,
        CollectiveKind::Min32,
    ];
}

impl fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CollectiveKind::AllReduce => "all-reduce",
            CollectiveKind::Broadcast => "broadcast",
            CollectiveKind::ReduceScatter => "reduce-scatter",
            CollectiveKind::AllGather => "all-gather",
            CollectiveKind::Sum64 => "sum of whole numbers",
            CollectiveKind::Max32 => "maximum",
            CollectiveKind::Min32 => "minimum",
        })
    }
}

/// The ranks that take part in a collective, as seen from one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// All ranks.
    World,
    /// The ranks in this rank's group. Together, the shards of all ranks in the group form a full bucket. If there is
    /// only one group, it contains all ranks.
    Shards,
    /// The ranks that have the same shards as this rank. There is one such rank in each `Shards` group.
    Replicas,
}

/// The work of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Makes later ops of the stream wait until the ticket's position has been passed.
    Wait(Ticket),
    /// Marks the ticket's position as passed.
    Record(Ticket),
    /// Makes later ops of the stream wait until the caller's sum of a bucket is complete. On a GPU, the later ops wait
    /// for the caller's event. On the host, the later ops wait until the caller's function returns. The sum runs after
    /// all accesses that the trainer made before the hand-over, so the later ops also run after these accesses.
    AwaitSum {
        /// The index of the bucket.
        bucket: u32,
    },
    /// Runs a control op.
    Control(Phase),
    /// Adds a bucket's sum of squares to the accumulator.
    Norm {
        /// The index of the bucket.
        bucket: u32,
    },
    /// Runs the part of a bucket's step that computes norms of this rank's shards of parameters. The ranks then add up
    /// these norms.
    Measure {
        /// The index of the bucket.
        bucket: u32,
        /// The number of `Measure` ops that precede this op in the bucket's step.
        stage: u32,
    },
    /// Applies the optimizer to a bucket. If the step has [`Measure`](Self::Measure) ops, this op runs the rest of the
    /// step. One op, and thus one launch, may step several neighbouring buckets.
    Step {
        /// The index of the bucket, or the lowest index if the op steps several buckets.
        bucket: u32,
        /// Number of consecutive buckets that the op steps, starting with `bucket`.
        count: u32,
    },
    /// One collective.
    Collective {
        /// The kind of collective.
        kind: CollectiveKind,
        /// The ranks that take part.
        group: Group,
        /// Number of the pass, counted from the stepper's first pass.
        pass: u64,
        /// The agreement's number. This number must be equal on all ranks in this pass.
        agreement: u64,
        /// The bucket to which the collective belongs, if there is one.
        bucket: Option<u32>,
        /// The source.
        src: Span,
        /// The destination, which may be `src`.
        dst: Span,
    },
    /// Makes the steps of the open pass leave a segment unchanged. This op runs after the pass's `Begin`.
    Leave {
        /// The index of the segment in the plan.
        segment: u32,
    },
    /// Copies a part of a bucket. With [offload](crate::StepperBuilder::offload), this op copies between the device's
    /// and the host's memory. With [`Accumulation::Summed`](crate::Accumulation), this op copies the sums of the first
    /// micro-batch. Both spans have the same type and length.
    Copy {
        /// The index of the bucket.
        bucket: u32,
        /// The source.
        src: Span,
        /// The destination.
        dst: Span,
    },
    /// Adds a part of a bucket's gradients to a span of the same type and length. 16-bit sums are rounded.
    Add {
        /// The index of the bucket.
        bucket: u32,
        /// The span that is added.
        src: Span,
        /// The span to which `src` is added.
        dst: Span,
    },
    /// Sets the counts in a bucket's tail block to 1, because each rank first counts only itself. Without offload,
    /// `Begin` does this.
    Count(Span),
    /// Fills the span with zero bytes.
    Zero(Span),
    /// Frees all memory pages that are entirely inside the span. The pages' contents are lost.
    Release(Span),
}

impl Action {
    /// Returns whether the op does more than order other ops. `Wait`, `Record` and `AwaitSum` only order other ops.
    pub fn is_work(&self) -> bool {
        !matches!(self, Action::Wait(_) | Action::Record(_) | Action::AwaitSum { .. })
    }
}

/// One operation on one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// Stream on which the op runs.
    pub stream: Stream,
    /// Its work.
    pub action: Action,
}

/// Segments that no step touches, until the trainer unfreezes them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frozen {
    segments: Vec<bool>,
}

impl Frozen {
    /// Freezes or unfreezes a segment of the plan.
    pub fn set(&mut self, segment: usize, frozen: bool) {
        if self.segments.len() <= segment {
            self.segments.resize(segment + 1, false);
        }
        self.segments[segment] = frozen;
    }

    /// Returns whether a segment is frozen.
    pub fn contains(&self, segment: usize) -> bool {
        self.segments.get(segment).copied().unwrap_or(false)
    }
}

/// A span that is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The bytes.
    pub span: Span,
    /// Whether the bytes are written, and possibly also read. Otherwise the bytes are only read.
    pub writes: bool,
}

/// The part of a step that one launch runs. `Whole` is a step in one launch. If norms scale the update, the step
/// instead has two launches: `Measure` runs the step up to these norms, and `Apply` runs the rest of the step. `End`
/// zeroes or averages the gradients after a custom optimizer.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Whole = INSTEP_PART_WHOLE,
    Measure = INSTEP_PART_MEASURE,
    Apply = INSTEP_PART_APPLY,
    End = INSTEP_PART_END,
}

impl Part {
    /// Returns the parts of a step, in order.
    pub(crate) fn all(is_scaled: bool) -> &'static [Part] {
        if is_scaled { &[Part::Measure, Part::Apply] } else { &[Part::Whole] }
    }
}

impl Access {
    /// Returns how many bytes a launch moves over the memory bus for this access. A launch also reads all bytes that it
    /// writes, except those of copies and of parameters with an f32 master.
    pub(crate) fn moved_bytes(&self, plan: &Plan, storage: &Storage, part: Part) -> u64 {
        let is_behind_master = storage.precision.master == Master::F32;
        // In a step of two launches, the second launch zeroes gradients. But averaged gradients are written by the
        // first launch, because it reads the sums.
        let last = if plan.gradients_of_step() == Gradients::Zero { Part::Measure } else { Part::Apply };
        let (reads, writes) = match self.span.memory {
            Memory::Grads | Memory::HostGrads | Memory::Sums => {
                (part != Part::Apply, self.writes && part != last)
            }
            _ if part == Part::End => (false, false),
            Memory::Params | Memory::HostParams => (!is_behind_master, self.writes && part != Part::Measure),
            Memory::Master => (true, part != Part::Measure),
            Memory::State(_) | Memory::Scales(_) => (true, part != Part::Apply),
            Memory::Copy => (false, part != Part::Measure),
            Memory::Ema => (part != Part::Measure, part != Part::Measure),
            Memory::Control | Memory::Settings => (true, self.writes),
        };
        self.span.bytes() * (u64::from(reads) + u64::from(writes))
    }
}

impl Op {
    /// Returns whether this collective may share a launch with `previous`, the preceding op in the list. Both ops must
    /// be collectives on the same stream and the same communicator. NCCL does not order the collectives of one launch,
    /// so the checker proves that the two collectives touch different bytes.
    pub(crate) fn joins(&self, previous: &Op, plan: &Plan) -> bool {
        let (Action::Collective { group: own, .. }, Action::Collective { group, .. }) =
            (self.action, previous.action)
        else {
            return false;
        };
        self.stream == previous.stream && (own == group || plan.replicas() == 1)
    }

    /// Calls `sink` with every span that the op touches. `states` is the number of the optimizer's states, and `frozen`
    /// has the segments that are frozen when the op is submitted. Padding is included if the op may touch it.
    pub fn accesses(&self, plan: &Plan, states: usize, frozen: &Frozen, sink: &mut impl FnMut(Access)) {
        let mut touch = |span: Span, writes: bool| {
            if span.start < span.end {
                sink(Access { span, writes });
            }
        };
        match self.action {
            Action::Wait(_) | Action::Record(_) => {}
            Action::AwaitSum { bucket } => touch(Span::bucket(&plan.buckets()[bucket as usize]), true),
            Action::Control(phase) => {
                touch(Span::CONTROL, phase != Phase::Publish);
                match phase {
                    Phase::Begin => touch(Span::SCALE, false),
                    Phase::Decide => touch(Span::LOSS_SCALE, true),
                    Phase::DecideBucket { .. } => touch(Span::LOSS_SCALE, false),
                    Phase::Publish => {}
                }
                let counting = match phase {
                    Phase::Decide => plan.carrier(),
                    Phase::DecideBucket { bucket } => plan.buckets().get(bucket as usize),
                    Phase::Begin | Phase::Publish => None,
                };
                if let Some((bucket, count)) =
                    counting.and_then(|bucket| Some((bucket, bucket.contributors?)))
                {
                    touch(Span::within(Memory::Grads.of_step(plan), bucket, count, count + 1), false);
                }
                if phase == Phase::Begin {
                    touch(Span::SETTINGS, false);
                    for bucket in plan.buckets() {
                        touch(Span::tail(Memory::Grads.of_step(plan), bucket), true);
                    }
                }
            }
            Action::Norm { bucket } => {
                let bucket = &plan.buckets()[bucket as usize];
                let summed = Span::summed_in(Memory::Grads.of_step(plan), bucket);
                let is_part = bucket.is_sharded() || plan.is_offloaded();
                touch(if is_part { summed } else { Span::bucket(bucket) }, false);
                if bucket.is_sharded() {
                    // The norm reads the counts to find out which gradients are part of it.
                    touch(Span::tail(Memory::Grads.of_step(plan), bucket), false);
                }
                touch(Span::CONTROL, true);
            }
            Action::Step { bucket, count } if count > 1 => {
                for bucket in bucket..bucket + count {
                    let action = Action::Step { bucket, count: 1 };
                    Op { action, ..*self }.accesses(plan, states, frozen, sink);
                }
            }
            Action::Measure { bucket, .. } | Action::Step { bucket, .. } => {
                let bucket = &plan.buckets()[bucket as usize];
                let averages =
                    plan.segments_of(bucket).iter().any(|s| s.action == SegmentAction::Average && s.len > 0);
                let writes =
                    averages || matches!(plan.gradients_of_step(), Gradients::Zero | Gradients::Average);
                let grads = Memory::Grads.of_step(plan);
                // A step never writes the tail's counts, not even if it overwrites the gradients with means, because
                // the trainer of a joined rank may read the counts at the same time.
                touch(Span::summed_in(grads, bucket), writes);
                touch(Span::tail(grads, bucket), false);
                let memories = Memory::of_bucket(bucket, states).filter(|memory| *memory != Memory::Grads);
                let memories = memories.map(|memory| memory.of_step(plan));
                for (start, end) in stepped_runs(plan, bucket, frozen) {
                    for memory in memories.clone() {
                        touch(Span::within(memory, bucket, start, end), true);
                    }
                }
                touch(Span::CONTROL, true);
            }
            Action::Collective { src, dst, .. }
            | Action::Copy { src, dst, .. }
            | Action::Add { src, dst, .. } => {
                touch(src, false);
                touch(dst, true);
            }
            Action::Leave { .. } => touch(Span::CONTROL, true),
            Action::Count(span) | Action::Zero(span) | Action::Release(span) => touch(span, true),
        }
    }
}

/// Returns how many bytes a bucket's step reads and writes outside control memory.
pub(crate) fn step_bytes(plan: &Plan, states: usize, parts: &[Part], bucket: u32) -> u64 {
    let (mut bytes, storage) = (0, &plan.buckets()[bucket as usize].storage);
    let op = Op { stream: Stream::Optim, action: Action::Step { bucket, count: 1 } };
    op.accesses(plan, states, &Frozen::default(), &mut |access| {
        if access.span.memory != Memory::Control {
            bytes += parts.iter().map(|part| access.moved_bytes(plan, storage, *part)).sum::<u64>();
        }
    });
    bytes
}

/// Returns an upper bound on the number of ops of a pass of one micro-batch on any one stream. The ops of a bucket are
/// waits, marks, broadcasts, and the ops that sum and step the bucket. On any one stream, a segment adds at most two
/// ops, such as two `Zero` ops or a broadcast. Each further clip set has two collectives. If each micro-batch is
/// summed, a pass of several micro-batches may have more ops, and the queues then grow.
pub(crate) fn most_ops_per_pass(plan: &Plan) -> usize {
    let of_bucket = if plan.is_sharded() { 40 } else { 16 } + if plan.is_offloaded() { 24 } else { 0 };
    let of_sets = 2 * plan.max_norms().len();
    64 + of_sets + of_bucket * plan.buckets().len() + 2 * plan.segments().len()
}

/// Splits this rank's part of the bucket into the ranges between frozen segments. If nothing is frozen, there is one
/// range.
fn stepped_runs(plan: &Plan, bucket: &Bucket, frozen: &Frozen) -> impl Iterator<Item = (u64, u64)> {
    let frozen_segments = bucket.segments.clone().filter(|k| frozen.contains(*k as usize));
    let (mut next, end) = (bucket.shard.start, bucket.shard.end);
    let inside = |at: u64| at.clamp(bucket.shard.start, bucket.shard.end);
    let gaps = frozen_segments.map(|k| &plan.segments()[k as usize]);
    let gaps = gaps.map(move |s| (inside(s.start), inside(s.start + s.len)));
    gaps.chain([(end, end)]).map(move |(gap_start, gap_end)| {
        let run = (next, gap_start);
        next = gap_end;
        run
    })
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: ", self.stream)?;
        match self.action {
            Action::Wait(t) => write!(f, "wait {:?} {}", t.stream, t.tick),
            Action::Record(t) => write!(f, "record {}", t.tick),
            Action::AwaitSum { bucket } => write!(f, "wait for the caller's sum of bucket {bucket}"),
            Action::Control(Phase::DecideBucket { bucket }) => write!(f, "decision on bucket {bucket}"),
            Action::Control(phase) => write!(f, "control {phase:?}"),
            Action::Norm { bucket } => write!(f, "norm of bucket {bucket}"),
            Action::Measure { bucket, .. } => write!(f, "norms of the parameters of bucket {bucket}"),
            Action::Step { bucket, count: 1 } => write!(f, "step of bucket {bucket}"),
            Action::Step { bucket, count } => write!(f, "step of buckets {bucket} to {}", bucket + count - 1),
            Action::Collective { kind, group, pass, bucket: Some(b), .. } => {
                let among = if group == Group::Replicas { " among replicas" } else { "" };
                write!(f, "{kind} of bucket {b}{among}, pass {pass}")
            }
            Action::Collective { kind, pass, bucket: None, .. } => write!(f, "{kind}, pass {pass}"),
            Action::Leave { segment } => write!(f, "leave segment {segment}"),
            Action::Copy { bucket, src, dst } => {
                write!(f, "copy of bucket {bucket}, {:?} to {:?}", src.memory, dst.memory)
            }
            Action::Add { bucket, src, dst } => {
                write!(f, "addition in bucket {bucket}, {:?} to {:?}", src.memory, dst.memory)
            }
            Action::Count(span) => write!(f, "count in {:?} {}..{}", span.memory, span.start, span.end),
            Action::Zero(span) => write!(f, "zero {:?} {}..{}", span.memory, span.start, span.end),
            Action::Release(span) => write!(f, "release {:?} {}..{}", span.memory, span.start, span.end),
        }
    }
}

/// An interval on one clock, in nanoseconds since the first stepper of the process was built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    /// Start.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
}

impl Interval {
    /// Returns the length in nanoseconds.
    pub fn ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    /// Returns the intersection of two intervals, or `None` if they do not overlap.
    pub fn overlap(&self, other: &Interval) -> Option<Interval> {
        let (start_ns, end_ns) = (self.start_ns.max(other.start_ns), self.end_ns.min(other.end_ns));
        (start_ns < end_ns).then_some(Interval { start_ns, end_ns })
    }
}

/// An op, and the interval in which it ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOp {
    /// The op.
    pub op: Op,
    /// The interval in which the op ran.
    pub interval: Interval,
}
