//! The rendezvous of in-process ranks: all ranks arrive, work on each other's buffers, and depart.
//!
//! **Arrival may be refused**: if another rank is lost or late, or makes a different call, this rank withdraws under
//! the same lock and gets an error. **Departure must not be interrupted**: until all ranks depart, they access each
//! other's memory, and a rank that returned early could free memory that other ranks still access. This phase always
//! ends. Splits meet independently and fail together, so one lock covers all splits. The rendezvous itself never
//! touches the buffers.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use crate::collective::{Addresses, Call, CallKey};
use crate::error::{Error, Result};
use crate::op::{Words, explain};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// The meeting points of one group, one per split. A split has all ranks of the group or some of them.
pub(crate) struct Rendezvous {
    state: Mutex<State>,
}

struct State {
    /// The splits, in the order in which their first seats were taken.
    splits: Vec<Split>,
    members: Vec<Member>,
    /// The first failure: the rank at fault and its error.
    failure: Option<(u32, Error)>,
}

/// For one rank and all splits: how many seats the rank has taken, and how many of these seats it has given up.
#[derive(Clone, Copy, Default)]
struct Member {
    /// Number of seats that the rank has taken. The rank takes its next seat in a split that has this value as its
    /// `number`.
    taken: usize,
    /// Number of seats that the rank has given up.
    left: usize,
}

/// A rank's entry in a meeting: the key and the raw addresses of its call.
pub(crate) type Arrived = (CallKey, Addresses);

/// One sequence of meetings of some ranks. The lists of a split are in the order of `ranks`.
struct Split {
    /// How many seats each rank of this split had taken before its seat in this split. Groups that ranks make at the
    /// same point have the same number.
    number: usize,
    ranks: Arc<[u32]>,
    calls: Vec<Option<Arrived>>,
    /// For each rank, the text of its latest call. If the calls differ, the error quotes these texts.
    words: Vec<Option<Arc<Words>>>,
    arrived: usize,
    departed: usize,
    /// Number of meetings at which all ranks have arrived.
    met: u64,
    /// Number of meetings from which all ranks have departed.
    parted: u64,
    /// For each rank, whether it has given up its seat in this split.
    empty: Vec<bool>,
    changed: Arc<Condvar>,
}

/// One rank's seat in one split.
pub(crate) struct Seat {
    /// The rank's number among all ranks.
    pub(crate) member: u32,
    /// The rank's index among the ranks of the split.
    pub(crate) place: u32,
    split: usize,
    /// The split's condition variable. The seat has its own clone, because a wait takes the guard of the state's lock,
    /// and the split is reached only through this guard.
    changed: Arc<Condvar>,
}

impl Rendezvous {
    pub(crate) fn new(world_size: u32) -> Self {
        let members = vec![Member::default(); world_size as usize];
        Rendezvous { state: Mutex::new(State { splits: Vec::new(), members, failure: None }) }
    }

    /// Returns a seat for the rank `ranks[place]`. The seat is in the first split of these ranks in which this rank has
    /// not taken a seat. If another rank has made a different group at that point, the whole group ends with an error.
    pub(crate) fn sit(&self, place: u32, ranks: &Arc<[u32]>) -> Seat {
        let (mut state, rank) = (self.lock(), ranks[place as usize]);
        let member = &mut state.members[rank as usize];
        let number = member.taken;
        member.taken += 1;
        let known = state.splits.iter().position(|split| split.number == number && split.ranks == *ranks);
        let split = known.unwrap_or_else(|| {
            let overlaps = |split: &&Split| {
                split.number == number && split.ranks.iter().any(|other| ranks.contains(other))
            };
            if let Some(other) = state.splits.iter().find(overlaps).map(|split| Arc::clone(&split.ranks)) {
                let [ours, theirs] = [ranks, &other].map(|ranks| format!("a group of ranks {ranks:?}"));
                let differs = "the ranks of a group".to_owned();
                let error = Error::Mismatch { rank, ours, other_rank: other[0], theirs, differs };
                state.fail(rank, error);
            }
            state.splits.push(Split::new(number, ranks));
            state.splits.len() - 1
        });
        Seat { member: rank, place, split, changed: Arc::clone(&state.splits[split].changed) }
    }

    /// Waits for all ranks of the split and returns their calls in `calls`, in the order of the ranks. After `Ok` the
    /// caller must call [`part`](Self::part).
    pub(crate) fn meet(&self, seat: &Seat, call: &Call<'_>, calls: &mut Vec<Arrived>) -> Result<()> {
        let mut state = self.lock();
        state.refuse(seat)?;
        state.compare(seat, call)?;
        let meeting = state.splits[seat.split].arrive(seat.place, call);
        let since = Instant::now();
        // Once all ranks have arrived, a failure no longer matters for this meeting, because the other ranks already
        // work on the buffers.
        while state.splits[seat.split].met < meeting {
            let waited = since.elapsed();
            let refusal = state.refuse(seat).and_then(|()| match call.deadline().checked_sub(waited) {
                Some(left) if !left.is_zero() => Ok(left),
                _ => Err(state.late(seat, call)),
            });
            match refusal {
                Ok(left) => {
                    state = seat.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
                Err(error) => {
                    state.splits[seat.split].withdraw(seat.place);
                    return Err(error);
                }
            }
        }
        calls.clear();
        calls.extend(state.splits[seat.split].calls.iter().flatten().copied());
        Ok(())
    }

    /// Waits until all ranks have finished the current meeting.
    pub(crate) fn part(&self, seat: &Seat) {
        let mut state = self.lock();
        let meeting = state.splits[seat.split].depart();
        while state.splits[seat.split].parted < meeting {
            state = seat.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the error that has ended the group, if the group has ended.
    pub(crate) fn check(&self, seat: &Seat) -> Result<()> {
        self.lock().refuse(seat)
    }

    /// Ends the group with an error of `rank`, unless the group has already ended.
    pub(crate) fn fail(&self, rank: u32, error: &Error) {
        self.lock().fail(rank, error.clone());
    }

    /// Gives up a seat. The rank makes no more calls with this seat.
    pub(crate) fn leave(&self, seat: &Seat) {
        let mut state = self.lock();
        state.members[seat.member as usize].left += 1;
        state.splits[seat.split].empty[seat.place as usize] = true;
        // If that was the rank's last seat, other ranks may also be waiting for the rank in splits that it never
        // joined.
        state.wake_all();
    }

    /// Returns the rank at fault, if the group has failed.
    pub(crate) fn culprit(&self) -> Option<u32> {
        self.lock().failure.as_ref().map(|(rank, _)| *rank)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Returns an error if the meeting can no longer happen.
    fn refuse(&mut self, seat: &Seat) -> Result<()> {
        let split = &self.splits[seat.split];
        let is_gone = |k: usize| split.empty[k] || self.members[split.ranks[k] as usize].is_gone();
        let absent = |k: &usize| split.calls[*k].is_none() && is_gone(*k);
        if self.failure.is_none()
            && let Some(absent) = (0..split.ranks.len()).find(absent)
        {
            let absent = split.ranks[absent];
            let why = "it has left the group".to_owned();
            self.fail(absent, Error::PeerLost { rank: absent, why });
        }
        match &self.failure {
            None => Ok(()),
            Some((culprit, error)) if *culprit == seat.member => Err(error.clone()),
            Some((_, error @ (Error::Mismatch { .. } | Error::LeftPass { .. } | Error::PeerLost { .. }))) => {
                Err(error.clone())
            }
            Some((culprit, error)) => Err(Error::PeerLost { rank: *culprit, why: error.to_string() }),
        }
    }

    /// Compares the call with one call that has already arrived. One comparison suffices, because all arrived calls
    /// agree.
    fn compare(&mut self, seat: &Seat, call: &Call<'_>) -> Result<()> {
        let Split { calls, words, ranks, .. } = &self.splits[seat.split];
        let arrived = (0..).zip(calls).find_map(|(place, arrived)| Some((place, arrived.as_ref()?.0)));
        let Some((place, other)) = arrived.filter(|(_, other)| *other != call.key()) else {
            return Ok(());
        };
        let (ranks, theirs) = ([seat.member, ranks[place]], (other.agreement, words[place].as_ref()));
        let agreement = explain((call.agreement, call.words()), theirs, ranks);
        let error = call.key().explained(&other, ranks, agreement);
        self.fail(seat.member, error.clone());
        Err(error)
    }

    fn late(&mut self, seat: &Seat, call: &Call<'_>) -> Error {
        let Split { calls, ranks, .. } = &self.splits[seat.split];
        let missing =
            calls.iter().zip(&**ranks).filter(|(call, _)| call.is_none()).map(|(_, rank)| *rank).collect();
        let error = Error::deadline(seat.member, call, call.deadline(), missing);
        self.fail(seat.member, error.clone());
        error
    }

    fn fail(&mut self, rank: u32, error: Error) {
        self.failure.get_or_insert((rank, error));
        self.wake_all();
    }

    fn wake_all(&self) {
        self.splits.iter().for_each(|split| split.changed.notify_all());
    }
}

impl Member {
    /// Returns whether the rank has given up all its seats, and so can make no further call. Only a rank that still has
    /// a seat can take a further seat.
    fn is_gone(self) -> bool {
        self.taken > 0 && self.left == self.taken
    }
}

impl Split {
    fn new(number: usize, ranks: &Arc<[u32]>) -> Self {
        Split {
            number,
            ranks: Arc::clone(ranks),
            calls: vec![None; ranks.len()],
            words: vec![None; ranks.len()],
            arrived: 0,
            departed: 0,
            met: 0,
            parted: 0,
            empty: vec![false; ranks.len()],
            changed: Arc::new(Condvar::new()),
        }
    }

    /// Adds a rank's call to the next meeting. Returns the number of this meeting, counted from 1.
    fn arrive(&mut self, place: u32, call: &Call<'_>) -> u64 {
        self.calls[place as usize] = Some((call.key(), call.addresses()));
        self.words[place as usize] = call.words().cloned();
        self.arrived += 1;
        let meeting = self.met + 1;
        if self.arrived == self.calls.len() {
            self.met = meeting;
            self.changed.notify_all();
        }
        meeting
    }

    fn withdraw(&mut self, place: u32) {
        self.calls[place as usize] = None;
        self.arrived -= 1;
        self.changed.notify_all();
    }

    /// Counts one more rank as departed from the current meeting. Returns the number of this meeting.
    fn depart(&mut self) -> u64 {
        self.departed += 1;
        let meeting = self.met;
        if self.departed == self.calls.len() {
            self.calls.fill(None);
            (self.arrived, self.departed, self.parted) = (0, 0, meeting);
            self.changed.notify_all();
        }
        meeting
    }
}
