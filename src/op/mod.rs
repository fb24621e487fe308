//! Operations as plain data: what the scheduler says, executors do and the checker reads.
//!
//! An [`Op`] holds no pointer, closure or foreign handle; [`Memory`] and [`Ticket`] name what executors resolve.
//! [`Op::accesses`] is the one place that says which bytes an op touches: the checker judges by it and the host
//! executor takes its pointers from it, so what was checked is what runs.

mod agreement;
mod interval;

pub(crate) use agreement::Agreed;
pub use agreement::difference;
pub use interval::{Interval, TimedOp};

use std::fmt;

use crate::abi::INSTEP_QUANTUM;
use crate::dtype::DType;
use crate::layout::{Bucket, Gradients, Master, Moments, Plan, Segment, SegmentAction};

/// A queue of operations that run in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// The trainer's own: forward and backward. On the host device, the caller's thread.
    Compute,
    /// Collectives over gradients.
    Reduce,
    /// Control, norms and steps.
    Optim,
}

/// Number of streams.
pub const STREAMS: usize = 3;

impl Stream {
    /// All streams.
    pub const ALL: [Stream; STREAMS] = [Stream::Compute, Stream::Reduce, Stream::Optim];

    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

/// One allocation; two memories never overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Memory {
    /// Parameters.
    Params,
    /// Gradients, with each bucket's tail block.
    Grads,
    /// Control block and per-segment scalars.
    Control,
    /// Hyperparameters per group, and per segment its rate's multiplier and its action, which the trainer sets between
    /// passes and Begin reads.
    Settings,
    /// The bits that 16-bit parameters lack of f32.
    Master,
    /// Optimizer state by its number.
    State(u8),
    /// Of an 8-bit state, an f32 per block of 256 elements.
    Scales(u8),
    /// The parameters once more, in another type.
    Copy,
    /// Moving averages of the parameters.
    Ema,
}

/// The size of a moving average's element, and of a block's scale.
const F32_BYTES: u64 = DType::F32.bytes();

impl Memory {
    /// Returns every memory of tensors that a plan has, with that many states.
    pub fn of_tensors(plan: &Plan, states: usize) -> impl Iterator<Item = Memory> + use<> {
        let storage = *plan.storage();
        let states = (0..states).map(|k| k as u8);
        let scales = states.clone().filter(move |_| storage.precision.moments == Moments::EightBit);
        let is_there = move |memory: &Memory| match memory {
            Memory::Master => storage.precision.master != Master::None,
            Memory::Copy => storage.copy.is_some(),
            Memory::Ema => storage.ema,
            _ => true,
        };
        let single = [Memory::Params, Memory::Grads, Memory::Master, Memory::Copy, Memory::Ema];
        let single = single.into_iter().filter(is_there);
        single.chain(states.map(Memory::State)).chain(scales.map(Memory::Scales))
    }
}

/// A range of bytes of one memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Which memory.
    pub memory: Memory,
    /// First byte.
    pub start: u64,
    /// Past the last byte.
    pub end: u64,
}

impl Span {
    /// Returns `start..end` elements of `plan`'s arenas.
    ///
    /// # Panics
    /// If the memory is not one of tensors.
    pub fn elements(memory: Memory, plan: &Plan, start: u64, end: u64) -> Span {
        let storage = plan.storage();
        let bytes = match memory {
            Memory::Params => storage.precision.param.bytes(),
            Memory::Grads => storage.precision.grad.bytes(),
            Memory::Master => storage.precision.master.bytes(),
            Memory::State(_) => storage.precision.moments.bytes(),
            Memory::Copy => storage.copy.map_or(0, |dtype| dtype.bytes()),
            Memory::Ema => F32_BYTES,
            Memory::Scales(_) => {
                // A block is its first element's.
                let block = |at: u64| at.div_ceil(INSTEP_QUANTUM.into());
                return Span { memory, start: block(start) * F32_BYTES, end: block(end) * F32_BYTES };
            }
            Memory::Control | Memory::Settings => panic!("{memory:?} holds no elements"),
        };
        Span { memory, start: start * bytes, end: end * bytes }
    }

    /// Returns all of a memory that a plan has.
    ///
    /// # Panics
    /// Panics as for [`elements`](Self::elements).
    pub fn whole(memory: Memory, plan: &Plan) -> Span {
        let len = if memory == Memory::Grads { plan.grads_len() } else { plan.arena_len() };
        Span::elements(memory, plan, 0, len)
    }

    /// Returns a bucket's gradients, tail and padding included.
    pub fn bucket(plan: &Plan, bucket: &Bucket) -> Span {
        Span::elements(Memory::Grads, plan, bucket.start, bucket.start + bucket.len)
    }

    /// Returns one parameter's tensor in a memory that has one.
    pub fn segment(memory: Memory, plan: &Plan, segment: &Segment) -> Span {
        let start = if memory == Memory::Grads { segment.grad_start } else { segment.start };
        Span::elements(memory, plan, start, start + segment.len)
    }

    /// The loss scale of the next pass and how far it is from growing: all of control memory that Decide alone writes.
    pub const LOSS_SCALE: Span = Span { memory: Memory::Control, start: 0, end: 8 };

    /// The rest of control memory.
    pub const CONTROL: Span = Span { memory: Memory::Control, start: 8, end: u64::MAX };

    /// All hyperparameters and actions.
    pub const SETTINGS: Span = Span { memory: Memory::Settings, start: 0, end: u64::MAX };

    /// The element type that a collective uses. A master weight is only copied, as words of 4 bytes.
    pub(crate) fn dtype(&self, plan: &Plan) -> DType {
        match self.memory {
            Memory::Params => plan.storage().precision.param,
            Memory::Grads => plan.storage().precision.grad,
            _ => DType::F32,
        }
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> u64 {
        self.end - self.start
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
    /// Every rank's buffer becomes the sum over ranks.
    AllReduce,
    /// Every rank's buffer becomes rank 0's.
    Broadcast,
}

impl fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CollectiveKind::AllReduce => "all-reduce",
            CollectiveKind::Broadcast => "broadcast",
        })
    }
}

/// The work of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Later ops of the stream start after the ticket's position has been passed.
    Wait(Ticket),
    /// Marks the position that the ticket names.
    Record(Ticket),
    /// Runs the control code.
    Control(Phase),
    /// Adds a bucket's sum of squares to the accumulator.
    Norm {
        /// Which bucket.
        bucket: u32,
    },
    /// Applies the optimizer to a bucket.
    Step {
        /// Which bucket.
        bucket: u32,
    },
    /// One collective of all ranks.
    Collective {
        /// Which one.
        kind: CollectiveKind,
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
    /// Fills with zero bytes.
    Zero(Span),
    /// Gives the whole pages inside back to the system. Their content is lost.
    Release(Span),
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

/// The part of a step that one launch does: all of it, or the part before the norms that scale the change, or the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Whole,
    Measure,
    Apply,
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
    pub(crate) fn moved_bytes(&self, plan: &Plan, part: Part) -> u64 {
        let is_behind_master = plan.storage().precision.master == Master::F32;
        let (reads, writes) = match self.span.memory {
            Memory::Grads => (part != Part::Apply, self.writes && part != Part::Measure),
            Memory::Params => (!is_behind_master, self.writes && part != Part::Measure),
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
            Action::Control(phase) => {
                touch(Span::CONTROL, phase != Phase::Publish);
                if phase != Phase::Publish {
                    touch(Span::LOSS_SCALE, phase == Phase::Decide);
                }
                let counting = match phase {
                    Phase::Decide => plan.carrier(),
                    Phase::DecideBucket { bucket } => plan.buckets().get(bucket as usize),
                    Phase::Begin | Phase::Publish => None,
                };
                if let Some(count) = counting.and_then(|bucket| bucket.contributors) {
                    touch(Span::elements(Memory::Grads, plan, count, count + 1), false);
                }
                if phase == Phase::Begin {
                    touch(Span::SETTINGS, false);
                    for tail in plan.buckets().iter().map(|b| b.tail.clone()) {
                        touch(Span::elements(Memory::Grads, plan, tail.start, tail.end), true);
                    }
                }
            }
            Action::Norm { bucket } => {
                touch(Span::bucket(plan, &plan.buckets()[bucket as usize]), false);
                touch(Span::CONTROL, true);
            }
            Action::Step { bucket } => {
                let bucket = &plan.buckets()[bucket as usize];
                let averages =
                    plan.segments_of(bucket).iter().any(|s| s.action == SegmentAction::Average && s.len > 0);
                let writes = averages || plan.gradients() == Gradients::Zero;
                // The tail counts are only read, also by averages: a rank that has joined reads them beside the step.
                touch(Span::elements(Memory::Grads, plan, bucket.start, bucket.tail.start), writes);
                touch(Span::elements(Memory::Grads, plan, bucket.tail.start, bucket.tail.end), false);
                for (start, end) in stepped_runs(plan, bucket, frozen) {
                    for memory in Memory::of_tensors(plan, states).filter(|memory| *memory != Memory::Grads) {
                        touch(Span::elements(memory, plan, start, end), true);
                    }
                }
                touch(Span::CONTROL, true);
            }
            Action::Collective { src, dst, .. } => {
                touch(src, false);
                touch(dst, true);
            }
            Action::Zero(span) | Action::Release(span) => touch(span, true),
        }
    }
}

/// The most ops that one pass writes: per bucket its waits, marks and work, per segment two zeros or a broadcast.
pub(crate) fn most_ops_per_pass(plan: &Plan) -> usize {
    64 + 16 * plan.buckets().len() + 2 * plan.segments().len()
}

/// The bucket without its frozen segments: one run where nothing is frozen, as almost always.
fn stepped_runs(plan: &Plan, bucket: &Bucket, frozen: &Frozen) -> impl Iterator<Item = (u64, u64)> {
    let frozen_segments = bucket.segments.clone().filter(|k| frozen.contains(*k as usize));
    let gaps = frozen_segments.map(|k| &plan.segments()[k as usize]).map(|s| (s.start, s.start + s.len));
    let (mut next, end) = (bucket.params.start, bucket.params.end);
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
            Action::Control(Phase::DecideBucket { bucket }) => write!(f, "decision on bucket {bucket}"),
            Action::Control(phase) => write!(f, "control {phase:?}"),
            Action::Norm { bucket } => write!(f, "norm of bucket {bucket}"),
            Action::Step { bucket } => write!(f, "step of bucket {bucket}"),
            Action::Collective { kind, pass, bucket: Some(b), .. } => {
                write!(f, "{kind} of bucket {b}, pass {pass}")
            }
            Action::Collective { kind, pass, bucket: None, .. } => write!(f, "{kind}, pass {pass}"),
            Action::Zero(span) => write!(f, "zero {:?} {}..{}", span.memory, span.start, span.end),
            Action::Release(span) => write!(f, "release {:?} {}..{}", span.memory, span.start, span.end),
        }
    }
}
