//! Proves that an op list has no race: every conflicting pair of accesses is ordered.
//!
//! The happens-before order is the order of ops on each stream, plus the order from each `Record` to its `Wait`s. The
//! checker computes this order with vector clocks. Accesses are byte ranges, so disjoint views of one arena do not
//! conflict. The checker does not assume an order among collectives that may share one launch. The trainer's own reads
//! and writes are part of the list. The checker trusts the caller's event after a sum, but only for the bytes of the
//! summed bucket. The checker does not depend on the mode, so it can check any list. PyTorch's CUDA sanitizer is
//! similar, but compares base pointers instead of byte ranges.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::layout::Plan;
use crate::op::{Access, Action, Frozen, Memory, Op, STREAMS, Span, Stream, Ticket};

/// One entry of a recorded list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traced {
    /// An op, in submission order.
    Op(Op),
    /// The trainer touched these bytes on the compute stream.
    Trainer(Access),
    /// The trainer froze or unfroze a segment. The change takes effect in the next pass.
    Freeze {
        /// Index of the segment in the plan.
        segment: u32,
        /// True if the trainer froze the segment, false if the trainer unfroze it.
        frozen: bool,
    },
}

/// A fault in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hazard {
    /// Two unordered accesses to the same bytes, at least one of which is a write. `first` and `second` are positions
    /// in the list.
    Race {
        /// The earlier entry.
        first: usize,
        /// The later entry.
        second: usize,
        /// The memory in which both accesses lie.
        memory: Memory,
        /// The first byte that both entries touch.
        byte: u64,
    },
    /// A `Wait` for a ticket that no earlier entry has recorded. In CUDA, such a wait would have no effect.
    UnrecordedWait {
        /// The Wait's position in the list.
        at: usize,
    },
    /// A `Record` with a ticket of another stream, or with a tick that is not above that of its stream's previous
    /// `Record`. A `Wait` for this ticket could end too early.
    MisplacedRecord {
        /// The Record's position in the list.
        at: usize,
    },
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Hazard::Race { first, second, memory, byte } => {
                write!(f, "entries {first} and {second} race at byte {byte} of {memory:?}")
            }
            Hazard::UnrecordedWait { at } => write!(f, "entry {at} waits for what nothing has recorded"),
            Hazard::MisplacedRecord { at } => write!(f, "entry {at} records a position that is not its own"),
        }
    }
}

/// A past access: its stream, its index on that stream, and its index in the list.
#[derive(Clone, Copy, Debug)]
struct Past {
    stream: usize,
    place: u64,
    entry: usize,
    /// For an access by the trainer: the stream that later waited for the caller's sum, and the index of this wait.
    awaited: Option<(usize, u64)>,
}

impl Past {
    /// Returns whether this access happens before the next op of `stream`, which has the clock `clock`.
    fn precedes(&self, stream: usize, clock: &[u64; STREAMS]) -> bool {
        let known = |(of, place): (usize, u64)| of == stream || clock[of] > place;
        known((self.stream, self.place)) || self.awaited.is_some_and(known)
    }
}

/// The accesses to an interval of bytes with which a later access can conflict: the last write, and each stream's last
/// read since that write.
#[derive(Clone, Copy, Debug)]
struct Cell {
    end: u64,
    write: Option<Past>,
    reads: [Option<Past>; STREAMS],
}

/// Checks a list and returns its faults, in list order. `states` is the number of states of the optimizer.
pub fn check(plan: &Plan, states: usize, list: &[Traced]) -> Vec<Hazard> {
    let mut checker = Checker::new(plan, states);
    list.iter().for_each(|traced| checker.push(traced));
    checker.hazards
}

/// Checks a list entry by entry. A clone has checked the same entries, and can then check others.
#[derive(Clone)]
pub struct Checker<'plan> {
    plan: &'plan Plan,
    states: usize,
    entries: usize,
    /// The latest entry, if it is an op. `together` is the index of the first entry in the list that may share a launch
    /// with this op.
    latest: Option<Op>,
    together: usize,
    left_alone: Frozen,
    /// `clocks[s][t]`: how many entries of stream t come before the next op of stream s.
    clocks: [[u64; STREAMS]; STREAMS],
    /// The last position that each stream has recorded.
    ticks: [u64; STREAMS],
    recorded: HashMap<Ticket, [u64; STREAMS]>,
    memories: BTreeMap<Memory, BTreeMap<u64, Cell>>,
    hazards: Vec<Hazard>,
}

impl<'plan> Checker<'plan> {
    /// Returns a checker of an empty list. `states` is the number of states of the optimizer.
    pub fn new(plan: &'plan Plan, states: usize) -> Self {
        Self {
            plan,
            states,
            entries: 0,
            latest: None,
            together: 0,
            left_alone: Frozen::default(),
            clocks: Default::default(),
            ticks: Default::default(),
            recorded: HashMap::new(),
            memories: BTreeMap::new(),
            hazards: Vec::new(),
        }
    }

    /// Appends an entry to the list, and checks it.
    pub fn push(&mut self, traced: &Traced) {
        let entry = self.entries;
        self.entries += 1;
        let mut stream = Stream::Compute;
        let op = if let Traced::Op(op) = traced { Some(*op) } else { None };
        let latest = std::mem::replace(&mut self.latest, op);
        if !op.zip(latest).is_some_and(|(op, latest)| op.joins(&latest, self.plan)) {
            self.together = entry;
        }
        match traced {
            Traced::Trainer(access) => self.access(stream, entry, *access),
            Traced::Freeze { segment, frozen } => self.left_alone.set(*segment as usize, *frozen),
            Traced::Op(op) => {
                stream = op.stream;
                self.op(op, entry);
            }
        }
        self.clocks[stream.index()][stream.index()] += 1;
    }

    /// Returns the faults found so far, in list order.
    pub fn hazards(&self) -> &[Hazard] {
        &self.hazards
    }

    fn op(&mut self, op: &Op, entry: usize) {
        match op.action {
            Action::Record(ticket) => self.record(op.stream, ticket, entry),
            Action::Wait(ticket) => self.wait(op.stream, ticket, entry),
            _ => {
                if let Action::AwaitSum { bucket } = op.action {
                    self.await_sum(op.stream, bucket);
                }
                let (plan, states) = (self.plan, self.states);
                let left_alone = std::mem::take(&mut self.left_alone);
                op.accesses(plan, states, &left_alone, &mut |access| self.access(op.stream, entry, access));
                self.left_alone = left_alone;
            }
        }
    }

    fn record(&mut self, stream: Stream, ticket: Ticket, at: usize) {
        if ticket.stream != stream || ticket.tick <= self.ticks[stream.index()] {
            self.hazards.push(Hazard::MisplacedRecord { at });
            return;
        }
        self.ticks[stream.index()] = ticket.tick;
        self.recorded.insert(ticket, self.clocks[stream.index()]);
    }

    fn wait(&mut self, stream: Stream, ticket: Ticket, at: usize) {
        let Some(clock) = self.recorded.get(&ticket) else {
            self.hazards.push(Hazard::UnrecordedWait { at });
            return;
        };
        for (mine, theirs) in self.clocks[stream.index()].iter_mut().zip(clock) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// Notes the caller's promise that the trainer's past accesses to this bucket happen before the stream's next op.
    /// The past accesses include accesses to the host's memory, because the trainer's thread made them before it
    /// submitted the `AwaitSum` op.
    fn await_sum(&mut self, stream: Stream, bucket: u32) {
        let here = (stream.index(), self.clocks[stream.index()][stream.index()]);
        let bucket = &self.plan.buckets()[bucket as usize];
        let memories = Memory::of_bucket(bucket, self.states);
        for memory in memories.flat_map(|memory| [memory, memory.of_step(self.plan)]) {
            let elements = if memory.has_gradient_offsets() {
                bucket.start..bucket.start + bucket.len
            } else {
                bucket.params.clone()
            };
            let span = Span::within(memory, bucket, elements.start, elements.end);
            let cells = self.memories.entry(memory).or_default();
            split(cells, span.start);
            split(cells, span.end);
            for (_, cell) in cells.range_mut(span.start..span.end) {
                let ours = [&mut cell.write, &mut cell.reads[Stream::Compute.index()]].into_iter().flatten();
                for past in ours.filter(|past| past.stream == Stream::Compute.index()) {
                    past.awaited.get_or_insert(here);
                }
            }
        }
    }

    fn access(&mut self, stream: Stream, entry: usize, Access { span, writes }: Access) {
        let (clock, together) = (self.clocks[stream.index()], self.together..entry);
        let now = Past { stream: stream.index(), place: clock[stream.index()], entry, awaited: None };
        let cells = self.memories.entry(span.memory).or_default();
        split(cells, span.start);
        split(cells, span.end);
        let mut next = span.start;
        while next < span.end {
            let gap_end = match cells.range_mut(next..span.end).next() {
                Some((start, cell)) if *start == next => {
                    let earlier = cell.reads.iter().flatten().filter(|_| writes).chain(&cell.write);
                    // One fault per cell is enough to find the missing wait.
                    let races =
                        |past: &&Past| together.contains(&past.entry) || !past.precedes(now.stream, &clock);
                    if let Some(past) = { earlier }.find(races) {
                        self.hazards.push(Hazard::Race {
                            first: past.entry,
                            second: entry,
                            memory: span.memory,
                            byte: next,
                        });
                    }
                    if writes {
                        (cell.write, cell.reads) = (Some(now), [None; STREAMS]);
                    } else {
                        cell.reads[now.stream] = Some(now);
                    }
                    next = cell.end;
                    continue;
                }
                Some((start, _)) => *start,
                None => span.end,
            };
            let mut cell = Cell { end: gap_end, write: None, reads: [None; STREAMS] };
            if writes {
                cell.write = Some(now);
            } else {
                cell.reads[now.stream] = Some(now);
            }
            cells.insert(next, cell);
            next = gap_end;
        }
    }
}

/// Makes `at` a boundary between cells.
fn split(cells: &mut BTreeMap<u64, Cell>, at: u64) {
    if let Some((start, cell)) = cells.range_mut(..at).next_back()
        && cell.end > at
        && *start < at
    {
        let right = *cell;
        cell.end = at;
        cells.insert(at, right);
    }
}

#[cfg(test)]
#[path = "../tests/unit/hazard.rs"]
mod tests;
