//! Builds the list of ops without redundant waits.
//!
//! Each stream has a vector clock: `clocks[s][t]` is the last tick of stream t that is known to precede the next op of
//! stream s. For each op, the schedule gives the emitter the marks after which the op must run. The emitter omits the
//! `Wait` for a mark if the clock or another of these marks already implies this wait. (Fidge 1988, Mattern 1989.) No
//! other code creates `Wait` or `Record` ops.

use crate::op::{Action, Op, STREAMS, Stream, Ticket};

/// A recorded position, with the positions of other streams that are known to precede it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    pub(super) ticket: Ticket,
    clock: [u64; STREAMS],
}

impl Mark {
    /// Returns whether `other` is known to precede this mark, or to be the same position.
    fn implies(&self, other: &Mark) -> bool {
        self.is_after(other.ticket)
    }

    /// Returns whether this mark comes after `position`.
    pub(super) fn is_after(&self, position: Ticket) -> bool {
        self.clock[position.stream.index()] >= position.tick
    }
}

#[derive(Debug, Default)]
pub(super) struct Emitter {
    clocks: [[u64; STREAMS]; STREAMS],
    /// The last mark of each stream, if no op follows it.
    ends: [Option<Mark>; STREAMS],
    ops: Vec<Op>,
}

impl Emitter {
    /// Returns an emitter without ops. The emitter's list has room for `ops` ops between two drains.
    pub(super) fn with_room(ops: usize) -> Self {
        Emitter { ops: Vec::with_capacity(ops), ..Emitter::default() }
    }

    /// Appends an op without a mark. Other streams can wait for this op only through a later mark of its stream.
    pub(super) fn emit(&mut self, stream: Stream, action: Action) {
        self.ends[stream.index()] = None;
        self.ops.push(Op { stream, action });
    }

    /// Returns a mark of the stream's current end. Reuses the stream's last mark if no op follows it.
    pub(super) fn end(&mut self, stream: Stream) -> Mark {
        self.ends[stream.index()].unwrap_or_else(|| self.record(stream))
    }

    /// Marks the stream's current end.
    pub(super) fn record(&mut self, stream: Stream) -> Mark {
        let own = stream.index();
        self.clocks[own][own] += 1;
        let mark = Mark { ticket: Ticket { stream, tick: self.clocks[own][own] }, clock: self.clocks[own] };
        self.emit(stream, Action::Record(mark.ticket));
        self.ends[own] = Some(mark);
        mark
    }

    /// Appends an op and marks its end.
    pub(super) fn emit_marked(&mut self, stream: Stream, action: Action) -> Mark {
        self.emit(stream, action);
        self.record(stream)
    }

    /// Makes `stream` wait for all `marks`. Elements that are `None` add no wait.
    pub(super) fn after(&mut self, stream: Stream, marks: &[Option<Mark>]) {
        for (k, mark) in marks.iter().enumerate() {
            let Some(mark) = mark else { continue };
            // If two marks imply each other (the same mark twice), only the second one counts as implied.
            let implied = marks.iter().enumerate().any(|(j, by)| {
                by.is_some_and(|by| j != k && by.implies(mark) && !(mark.implies(&by) && k < j))
            });
            if mark.ticket.stream == stream || self.is_after(stream, mark.ticket) || implied {
                continue;
            }
            self.emit(stream, Action::Wait(mark.ticket));
            for (mine, theirs) in self.clocks[stream.index()].iter_mut().zip(mark.clock) {
                *mine = (*mine).max(theirs);
            }
        }
    }

    /// Returns the position that the stream's next `Record` op will mark.
    pub(super) fn next_ticket(&self, stream: Stream) -> Ticket {
        Ticket { stream, tick: self.clocks[stream.index()][stream.index()] + 1 }
    }

    /// Returns whether the next op of `stream` is already ordered after this position.
    pub(super) fn is_after(&self, stream: Stream, position: Ticket) -> bool {
        self.clocks[stream.index()][position.stream.index()] >= position.tick
    }

    /// Removes and returns the ops that were appended since the last drain. The list's buffer stays allocated, so later
    /// passes allocate nothing.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Op> + '_ {
        self.ops.drain(..)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/schedule/emitter.rs"]
mod tests;
