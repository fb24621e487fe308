//! Work that was enqueued and has not run: lanes in order, and what each piece waits for.
//!
//! A lane is a stream, or one branch of a graph. The first piece of a lane may run once all work before it is done.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::clock::Clock;
use crate::shadow::Touch;
use crate::work::Work;

/// A position on a lane, with everything that comes before it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mark {
    pub(crate) lane: usize,
    pub(crate) position: u64,
    pub(crate) clock: Clock,
}

/// One piece of work at its position.
pub(crate) struct Operation {
    pub(crate) touch: Touch,
    pub(crate) clock: Clock,
    /// Lanes and positions of the work that must run before it, except on the same lane.
    pub(crate) after: Vec<(usize, u64)>,
    pub(crate) work: Work,
}

struct Lane {
    context: usize,
    name: String,
    pending: VecDeque<Operation>,
    issued: u64,
    done: u64,
    /// The clock of the last operation that was issued.
    clock: Clock,
    /// The position before the last operation that was no marker.
    before_work: Mark,
}

#[derive(Default)]
pub(crate) struct Queue {
    lanes: Vec<Lane>,
    /// The work before the host's next work.
    pub(crate) host: Clock,
}

impl Queue {
    pub(crate) fn open_lane(&mut self, context: usize, name: impl FnOnce(usize) -> String) -> usize {
        let (lane, pending) = (self.lanes.len(), VecDeque::new());
        let name = name(lane);
        let before_work = Mark { lane, ..Mark::default() };
        self.lanes.push(Lane {
            context,
            name,
            pending,
            issued: 0,
            done: 0,
            clock: Clock::default(),
            before_work,
        });
        lane
    }

    /// Adds work to a lane, after the lane's own work, the host's calls so far, and these marks.
    pub(crate) fn add(&mut self, lane: usize, what: &str, work: Work, after: &[Mark]) -> Mark {
        let row = &self.lanes[lane];
        let (position, mut clock) = (row.issued + 1, row.clock.clone());
        clock.join(&self.host);
        after.iter().for_each(|mark| clock.join(&mark.clock));
        clock.advance(lane, position);
        let waits = after.iter().map(|mark| (mark.lane, mark.position)).filter(|mark| !self.is_done(*mark));
        let after = waits.collect();
        let name: Arc<str> = format!("{what} ({}, operation {position})", row.name).into();
        let row = &mut self.lanes[lane];
        if !matches!(work, Work::Marker) {
            row.before_work = Mark { lane, position: row.issued, clock: row.clock.clone() };
        }
        row.issued = position;
        row.clock = clock.clone();
        let touch = Touch { lane, position, name };
        row.pending.push_back(Operation { touch, clock: clock.clone(), after, work });
        Mark { lane, position, clock }
    }

    pub(crate) fn context_of(&self, lane: usize) -> usize {
        self.lanes[lane].context
    }

    /// Returns the position after all work of a lane.
    pub(crate) fn tail(&self, lane: usize) -> Mark {
        let row = &self.lanes[lane];
        Mark { lane, position: row.issued, clock: row.clock.clone() }
    }

    /// Returns the positions after all work of a context, also of destroyed streams.
    pub(crate) fn tails(&self, context: usize) -> Vec<Mark> {
        let own = (0..self.lanes.len()).filter(|lane| self.lanes[*lane].context == context);
        own.map(|lane| self.tail(lane)).collect()
    }

    /// Returns the position before the last work of a lane.
    pub(crate) fn before_work(&self, lane: usize) -> Mark {
        self.lanes[lane].before_work.clone()
    }

    pub(crate) fn is_done(&self, (lane, position): (usize, u64)) -> bool {
        self.lanes[lane].done >= position
    }

    /// Returns the lanes whose first piece of work may run.
    pub(crate) fn ready(&self) -> Vec<usize> {
        let ready = |lane: &usize| {
            let first = self.lanes[*lane].pending.front();
            first.is_some_and(|first| first.after.iter().all(|mark| self.is_done(*mark)))
        };
        (0..self.lanes.len()).filter(ready).collect()
    }

    /// Returns, for each lane, the last position that a mark needs.
    pub(crate) fn needed(&self, mark: (usize, u64)) -> Vec<u64> {
        let (mut needed, mut open) = (vec![0; self.lanes.len()], vec![mark]);
        while let Some((lane, position)) = open.pop() {
            if needed[lane] >= position || self.is_done((lane, position)) {
                continue;
            }
            let known = std::mem::replace(&mut needed[lane], position);
            let ahead = self.lanes[lane].pending.iter().take_while(|op| op.touch.position <= position);
            open.extend(ahead.filter(|op| op.touch.position > known).flat_map(|op| op.after.iter().copied()));
        }
        needed
    }

    /// Returns the position of a lane's first piece of work.
    pub(crate) fn first(&self, lane: usize) -> Option<u64> {
        self.lanes[lane].pending.front().map(|first| first.touch.position)
    }

    pub(crate) fn take(&mut self, lane: usize) -> Option<Operation> {
        self.lanes[lane].pending.pop_front()
    }

    pub(crate) fn put_back(&mut self, operation: Operation) {
        self.lanes[operation.touch.lane].pending.push_front(operation);
    }

    pub(crate) fn set_done(&mut self, touch: &Touch) {
        self.lanes[touch.lane].done = touch.position;
    }

    /// Notes that the host has waited for a mark.
    pub(crate) fn host_waited(&mut self, mark: &Mark) {
        self.host.join(&mark.clock);
    }
}
