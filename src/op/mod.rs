//! Operations as plain data: what the scheduler says, executors do and the checker reads.
//!
//! An [`Op`] holds no pointer, closure or foreign handle; [`Memory`] and [`Ticket`] name what executors resolve.
//! [`Op::accesses`] is the one place that says which bytes an op touches: the checker judges by it and the host
//! executor takes its pointers from it, so what was checked is what runs.

mod agreement;
mod span;

use std::fmt;

use crate::layout::{Bucket, Gradients, Master, Plan, SegmentAction, Storage};

pub(crate) use agreement::Agreed;
pub use agreement::Words;
pub use agreement::difference;
pub(crate) use agreement::{Line, WrittenValues, explain};
pub(crate) use span::{FURTHER_CONTROLS_AT, bytes_of};
pub use span::{Memory, Span};

/// A queue of operations that run in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// The trainer's own: forward and backward. On the host device, the caller's thread.
    Compute,
    /// Collectives over gradients.
    Reduce,
    /// Control, norms and steps; on the host, with [offload](crate::StepperBuilder::offload).
    Optim,
    /// Collectives over stepped parameters, on a communicator of their own: in the order of the reduces they would hold
    /// up the next one.
    Gather,
    /// With [offload](crate::StepperBuilder::offload), copies to the host's memory. On the reduce stream they would hold up
    /// the next sum.
    Download,
    /// With offload, copies to the device's memory. A copy waits for a step, so on the download stream it would hold up
    /// later downloads.
    Upload,
}

/// Number of streams.
pub const STREAMS: usize = Stream::ALL.len();

impl Stream {
    /// All streams.
    pub const ALL: [Stream; 6] =
        [Stream::Compute, Stream::Reduce, Stream::Optim, Stream::Gather, Stream::Download, Stream::Upload];

    /// Returns the streams that a plan's ops run on, besides the trainer's.
    pub(crate) fn used(plan: &Plan) -> &'static [Stream] {
        use Stream::*;
        match (plan.is_sharded(), plan.is_offloaded()) {
            (false, false) => &[Reduce, Optim],
            (true, false) => &[Reduce, Optim, Gather],
            (false, true) => &[Reduce, Optim, Download, Upload],
            (true, true) => &[Reduce, Optim, Gather, Download, Upload],
        }
    }

    /// Returns whether every plan has it.
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

/// A position on a stream, counted in Records: an event is "this stream, up to here".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    /// The stream of the position.
    pub stream: Stream,
    /// Number of Records that the stream has passed then.
    pub tick: u64,
}

/// Moments at which the control block changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Opens a pass: counts the last one's updates, derives scalars, empties the accumulators.
    Begin,
    /// Turns the norm into clip coefficient and skip flag, and into what the next pass is to know of this one.
    Decide,
    /// The same for one bucket, by its own norm, before its step.
    DecideBucket {
        /// Which bucket.
        bucket: u32,
    },
    /// Writes what came of the pass where the host reads it without waiting.
    Publish,
}

/// Which collective.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveKind {
    /// Replaces every rank's buffer by the sum over ranks.
    AllReduce,
    /// Replaces every rank's buffer by rank 0's.
    Broadcast,
    /// Rank r's destination becomes the sum over ranks of the r-th part of their sources, which are as many times as
    /// long as there are ranks.
    ReduceScatter,
    /// Copies all sources to every rank's destination, in rank order.
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

/// The ranks that a collective is among, as one of them sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// All ranks.
    World,
    /// The ranks of this rank's group, whose shards together are a full bucket: all ranks, unless there are several
    /// groups.
    Shards,
    /// The replicas: the ranks that have the same shards as this one, one in each group.
    Replicas,
}

/// The work of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Later ops of the stream start after the ticket's position has been passed.
    Wait(Ticket),
    /// Marks the position that the ticket names.
    Record(Ticket),
    /// Later ops of the stream start once the caller's own sum of a bucket is there: after an event of the caller's on a GPU,
    /// after a call on the host. The sum has come after everything that the trainer did with the bucket before its hand-over, so
    /// these ops come after that too.
    AwaitSum {
        /// Which bucket.
        bucket: u32,
    },
    /// Runs the control code.
    Control(Phase),
    /// Adds a bucket's sum of squares to the accumulator.
    Norm {
        /// Which bucket.
        bucket: u32,
    },
    /// Runs the part of a bucket's step that ends with norms of parts of its parameters, which ranks then add up.
    Measure {
        /// Which bucket.
        bucket: u32,
        /// The number of `Measure` ops before this one in the bucket's step.
        stage: u32,
    },
    /// Applies the optimizer to a bucket, or does what its [`Measure`](Self::Measure) ops have left of that. Neighbours may
    /// share the op, and then its launch.
    Step {
        /// Which bucket; of several, the lowest.
        bucket: u32,
        /// Number of buckets, from that one on.
        count: u32,
    },
    /// One collective.
    Collective {
        /// Which one.
        kind: CollectiveKind,
        /// The ranks that take part.
        group: Group,
        /// Counted from the stepper's first pass.
        pass: u64,
        /// The number that ranks must have in common in this pass.
        agreement: u64,
        /// The bucket it belongs to, if it does.
        bucket: Option<u32>,
        /// The source.
        src: Span,
        /// The destination; may be `src`.
        dst: Span,
    },
    /// Makes the open pass leave a segment alone, after its Begin.
    Leave {
        /// Which segment of the plan.
        segment: u32,
    },
    /// Copies a part of a bucket: with [offload](crate::StepperBuilder::offload) between the device's memory and the host's,
    /// with [`Accumulation::Summed`](crate::Accumulation) the first micro-batch's sums. Both spans are of one type and length.
    Copy {
        /// Which bucket.
        bucket: u32,
        /// The source.
        src: Span,
        /// The destination.
        dst: Span,
    },
    /// Adds a part of a bucket's gradients to another one, of the same type and length. 16-bit sums are rounded.
    Add {
        /// Which bucket.
        bucket: u32,
        /// What is added.
        src: Span,
        /// What it is added to.
        dst: Span,
    },
    /// Fills counts of ranks with ones: each rank counts itself. Without offload, Begin does so.
    Count(Span),
    /// Fills with zero bytes.
    Zero(Span),
    /// Gives the whole pages inside back to the system. Their content is lost.
    Release(Span),
}

impl Action {
    /// Returns whether the op takes time of its own. The others only order those.
    pub fn is_work(&self) -> bool {
        !matches!(self, Action::Wait(_) | Action::Record(_) | Action::AwaitSum { .. })
    }
}

/// One operation on one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// Stream on which it runs.
    pub stream: Stream,
    /// Its work.
    pub action: Action,
}

/// Segments that no step touches, until the trainer says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frozen {
    segments: Vec<bool>,
}

impl Frozen {
    /// Freezes a segment of the plan, or unfreezes it.
    pub fn set(&mut self, segment: usize, frozen: bool) {
        if self.segments.len() <= segment {
            self.segments.resize(segment + 1, false);
        }
        self.segments[segment] = frozen;
    }

    /// Returns whether it is frozen.
    pub fn contains(&self, segment: usize) -> bool {
        self.segments.get(segment).copied().unwrap_or(false)
    }
}

/// A span that is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The bytes.
    pub span: Span,
    /// Written (and possibly read), or only read.
    pub writes: bool,
}

/// The part of a step that one launch does: all of it, the part before the norms that scale the change, the rest, or the
/// end of gradients that code of the user's own has stepped with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Whole,
    Measure,
    Apply,
    End,
}

impl Part {
    /// The launches of a step, in order.
    pub(crate) fn all(is_scaled: bool) -> &'static [Part] {
        if is_scaled { &[Part::Measure, Part::Apply] } else { &[Part::Whole] }
    }
}

impl Access {
    /// Bytes that a launch moves over the memory bus for it. A launch reads what it writes, except parameters with an
    /// f32 master and copies.
    pub(crate) fn moved_bytes(&self, plan: &Plan, storage: &Storage, part: Part) -> u64 {
        let is_behind_master = storage.precision.master == Master::F32;
        // Zeros come after the last launch; a mean is written where the sum is read.
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
    /// Names every byte that the op touches, given how many states the optimizer keeps and what is frozen when the op
    /// is submitted. Padding counts as touched where the op may touch it.
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
                    // The counts say which gradients are measured.
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
                // The tail counts are only read, also by averages: a rank that has joined reads them beside the step.
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

/// Bytes that one step of a bucket reads and writes, by the accesses that the checker judges.
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

/// The most ops that one pass writes: per bucket its waits, marks, work and broadcasts, per segment two zeros or a
/// broadcast, per further clip set two collectives.
pub(crate) fn most_ops_per_pass(plan: &Plan) -> usize {
    let of_bucket = if plan.is_sharded() { 40 } else { 16 } + if plan.is_offloaded() { 24 } else { 0 };
    let of_sets = 2 * plan.max_norms().len();
    64 + of_sets + of_bucket * plan.buckets().len() + 2 * plan.segments().len()
}

/// Returns the runs of this rank's part of the bucket between frozen segments: one run if nothing is frozen.
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

/// A stretch of time on one clock, in nanoseconds since the first stepper of the process was built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    /// Start.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
}

impl Interval {
    /// Its length.
    pub fn ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    /// Returns the part that lies in both, if they overlap.
    pub fn overlap(&self, other: &Interval) -> Option<Interval> {
        let (start_ns, end_ns) = (self.start_ns.max(other.start_ns), self.end_ns.min(other.end_ns));
        (start_ns < end_ns).then_some(Interval { start_ns, end_ns })
    }
}

/// An op that ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOp {
    /// Which one.
    pub op: Op,
    /// When.
    pub interval: Interval,
}
