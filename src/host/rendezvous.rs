//! Where in-process ranks meet: everybody arrives, works, leaves.
//!
//! Two rules. **Arrival may be refused**: if a peer is lost, late or disagrees, a rank withdraws under the same lock and
//! gets an error. **Departure may not be interrupted**: between the two, peers work inside each other's memory, and
//! returning early would let it be freed under them; that stretch is finite. Must not touch the buffers itself.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::op::Call;

/// The meeting point of one group.
pub(crate) struct Rendezvous {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    calls: Vec<Option<Arrived>>,
    arrived: usize,
    left: usize,
    /// Meetings that all ranks have arrived at.
    met: u64,
    /// Meetings that all ranks have left.
    parted: u64,
    /// The first failure: the rank at fault and what it was.
    failure: Option<(u32, Error)>,
    gone: Vec<bool>,
}

/// A call waiting for its peers.
#[derive(Clone, Copy)]
struct Arrived(Call);

#[allow(unsafe_code)]
// SAFETY: the pointers are only carried; whoever dereferences them has met at this very rendezvous.
unsafe impl Send for Arrived {}

impl Rendezvous {
    pub(crate) fn new(world_size: u32) -> Self {
        let n = world_size as usize;
        let state = State {
            calls: vec![None; n],
            arrived: 0,
            left: 0,
            met: 0,
            parted: 0,
            failure: None,
            gone: vec![false; n],
        };
        Rendezvous { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits for all ranks and returns their calls in `calls`, by rank. After `Ok` the caller must [`part`](Self::part).
    pub(crate) fn meet(&self, rank: u32, call: &Call, calls: &mut Vec<Call>) -> Result<()> {
        let mut state = self.lock();
        state.refuse(rank)?;
        if let Err(error) = state.compare(rank, call) {
            self.changed.notify_all();
            return Err(error);
        }
        let own = rank as usize;
        state.calls[own] = Some(Arrived(*call));
        state.arrived += 1;
        let meeting = state.met + 1;
        if state.arrived == state.calls.len() {
            state.met = meeting;
            self.changed.notify_all();
        }
        let since = Instant::now();
        // Once all have met, a failure no longer matters: the others are at work already.
        while state.met < meeting {
            let waited = since.elapsed();
            let refusal = state.refuse(rank).and_then(|()| match call.deadline.checked_sub(waited) {
                Some(left) if !left.is_zero() => Ok(left),
                _ => Err(state.late(rank, call)),
            });
            match refusal {
                Ok(left) => {
                    state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
                Err(error) => {
                    state.calls[own] = None;
                    state.arrived -= 1;
                    self.changed.notify_all();
                    return Err(error);
                }
            }
        }
        calls.clear();
        calls.extend(state.calls.iter().flatten().map(|arrived| arrived.0));
        Ok(())
    }

    /// Returns once all ranks have done their work.
    pub(crate) fn part(&self) {
        let mut state = self.lock();
        state.left += 1;
        let meeting = state.met;
        if state.left == state.calls.len() {
            state.calls.fill(None);
            (state.arrived, state.left, state.parted) = (0, 0, meeting);
            self.changed.notify_all();
        }
        while state.parted < meeting {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the group because of `rank`, unless something else has ended it before.
    pub(crate) fn fail(&self, rank: u32, error: &Error) {
        let mut state = self.lock();
        state.failure.get_or_insert_with(|| (rank, error.clone()));
        self.changed.notify_all();
    }

    /// `rank` will make no more calls.
    pub(crate) fn leave(&self, rank: u32) {
        self.lock().gone[rank as usize] = true;
        self.changed.notify_all();
    }

    /// The rank at fault, if the group has failed.
    pub(crate) fn culprit(&self) -> Option<u32> {
        self.lock().failure.as_ref().map(|(rank, _)| *rank)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// An error if the meeting cannot take place any more.
    fn refuse(&mut self, rank: u32) -> Result<()> {
        if self.failure.is_none()
            && let Some(absent) = (0..self.calls.len()).find(|&r| self.gone[r] && self.calls[r].is_none())
        {
            let absent = absent as u32;
            let why = "it has left the group".to_owned();
            self.failure = Some((absent, Error::PeerLost { rank: absent, why }));
        }
        match &self.failure {
            None => Ok(()),
            Some((culprit, error)) if *culprit == rank => Err(error.clone()),
            Some((_, error @ (Error::Mismatch { .. } | Error::PeerLost { .. }))) => Err(error.clone()),
            Some((culprit, error)) => Err(Error::PeerLost { rank: *culprit, why: error.to_string() }),
        }
    }

    /// Holds the call against one that has arrived; all others agree with that one.
    fn compare(&mut self, rank: u32, call: &Call) -> Result<()> {
        let Some((other_rank, Arrived(other))) =
            self.calls.iter().enumerate().find_map(|(r, arrived)| arrived.map(|a| (r as u32, a)))
        else {
            return Ok(());
        };
        if call.agrees_with(&other) {
            return Ok(());
        }
        let error = Error::Mismatch { rank, ours: call.to_string(), other_rank, theirs: other.to_string() };
        self.failure = Some((rank, error.clone()));
        Err(error)
    }

    fn late(&mut self, rank: u32, call: &Call) -> Error {
        let missing = (0..self.calls.len()).filter(|&r| self.calls[r].is_none()).map(|r| r as u32).collect();
        let waited_ms = call.deadline.as_millis() as u64;
        let error = Error::Deadline { rank, call: call.to_string(), waited_ms, missing };
        self.failure = Some((rank, error.clone()));
        error
    }
}
