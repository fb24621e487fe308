//! The ranks after they have met: a star of connections through rank 0, beside the library that moves the sums.
//!
//! It has two uses. Ranks compare what they are about to do, and a rank that ends the group tells the others or is
//! missed when its connection ends. NCCL does neither: there, a rank that disagrees or dies is a hang. A lock is held
//! for one bounded look at every connection and never while waiting, so telling and checking do not block.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry::Vacant;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::cuda::nccl::UniqueId;
use crate::cuda::nccl::link::{Link, Received};
use crate::cuda::nccl::message::{Entry, Members, Message};
use crate::error::{Error, Result};

const POLL: Duration = Duration::from_micros(200);
/// Messages that one look takes from one peer. A rank that keeps to the protocol never has more under way: an entry or
/// a verdict, an id, a failure, a farewell.
const MOST_MESSAGES: u32 = 5;

/// One rank's end of the star.
#[derive(Debug)]
pub(super) struct Group {
    rank: u32,
    world_size: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// All others on rank 0, by rank; rank 0 alone on the others.
    peers: Vec<Peer>,
    awaited: Awaited,
    failure: Option<Error>,
}

/// What a rank other than 0 awaits of rank 0.
#[derive(Debug)]
struct Awaited {
    verdict: Verdict,
    id: AwaitedId,
}

/// Verdict, at a rank other than 0, on the entry that it sent last.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Verdict {
    /// It has sent none since the last agreement.
    NotAsked,
    Asked,
    Agreed,
}

/// The id of another communicator, which rank 0 makes.
#[derive(Debug)]
enum AwaitedId {
    NotAsked,
    Asked,
    Here(Box<UniqueId>),
}

/// A rank at the other end of a connection.
#[derive(Debug)]
pub(super) struct Peer {
    rank: u32,
    link: Link,
    /// On rank 0: what this rank is about to do. It may not send another before the verdict.
    entry: Option<Entry>,
    /// On rank 0: the last entry of this rank that went with all others.
    agreed: Option<Entry>,
    left: bool,
}

impl Peer {
    pub(super) fn new(rank: u32, link: Link) -> Peer {
        Peer { rank, link, entry: None, agreed: None, left: false }
    }

    fn lost(&self, why: String) -> Error {
        Error::PeerLost { rank: self.rank, why }
    }

    fn closed(&self) -> Error {
        self.lost("it has closed its communicator".to_owned())
    }

    /// Takes in one message; returns whether there may be another.
    fn take(&mut self, receiver: u32, awaited: &mut Awaited) -> Result<bool> {
        match self.link.receive() {
            Received::Nothing => Ok(false),
            Received::Ended(_) if self.left => Ok(false),
            Received::Ended(why) => {
                self.left = true;
                Err(self.lost(why))
            }
            Received::Message(Message::Failure(error)) => Err(error),
            Received::Message(Message::Leaving) if !self.left => {
                self.left = true;
                Ok(true)
            }
            Received::Message(Message::Entry(entry)) if receiver == 0 && self.entry.is_none() => {
                self.entry = Some(entry);
                Ok(true)
            }
            Received::Message(Message::Agreed) if receiver > 0 && awaited.verdict == Verdict::Asked => {
                awaited.verdict = Verdict::Agreed;
                Ok(true)
            }
            // Rank 0 sends it after its verdict.
            Received::Message(Message::Id(id))
                if awaited.verdict != Verdict::Asked && matches!(awaited.id, AwaitedId::Asked) =>
            {
                awaited.id = AwaitedId::Here(id);
                Ok(true)
            }
            Received::Message(other) => Err(self.lost(format!("it sent {} out of turn", other.kind()))),
        }
    }
}

impl Group {
    pub(super) fn new(rank: u32, world_size: u32, peers: Vec<Peer>) -> Group {
        let awaited = Awaited { verdict: Verdict::NotAsked, id: AwaitedId::NotAsked };
        let state = State { peers, awaited, failure: None };
        Group { rank, world_size, state: Mutex::new(state) }
    }

    /// Waits until every rank is about to do the same.
    ///
    /// # Errors
    /// `Mismatch`, `LeftPass`, `PeerLost` or `Deadline`, on every rank; the group has ended then.
    pub(super) fn compare(&self, entry: &Entry, deadline: Duration) -> Result<()> {
        if self.world_size == 1 {
            return Ok(());
        }
        let since = Instant::now();
        if self.rank > 0 {
            let mut state = self.lock();
            state.awaited.verdict = Verdict::Asked;
            state.broadcast(&Message::Entry(*entry));
        }
        loop {
            let mut state = self.lock();
            state.look(self.rank);
            if let Some(error) = &state.failure {
                return Err(error.clone());
            }
            let outcome = if self.rank == 0 { state.judge(entry) } else { state.verdict() };
            let missing = match outcome {
                Ok(missing) if missing.is_empty() => return Ok(()),
                Ok(missing) => missing,
                Err(error) => return Err(state.fail(error)),
            };
            if since.elapsed() >= deadline {
                let waited_ms = deadline.as_millis() as u64;
                let call = entry.to_string();
                return Err(state.fail(Error::Deadline { rank: self.rank, call, waited_ms, missing }));
            }
            drop(state);
            thread::sleep(POLL);
        }
    }

    /// Brings one more id to all ranks of each further communicator: rank 0 makes them. All ranks ask at the same point,
    /// each for its own communicator.
    ///
    /// # Errors
    /// As for [`compare`](Self::compare), `Mismatch` also if a communicator would lack a rank; the error of `make` on rank 0,
    /// which then tells the others.
    pub(super) fn share_id(
        &self,
        members: Members,
        make: impl FnMut() -> Result<UniqueId>,
        deadline: Duration,
    ) -> Result<UniqueId> {
        let since = Instant::now();
        let entry = Entry::Communicator(members);
        if self.rank > 0 {
            self.lock().awaited.id = AwaitedId::Asked;
        }
        self.compare(&entry, deadline)?;
        if self.rank == 0 {
            return self.send_ids(members, make);
        }
        loop {
            let mut state = self.lock();
            state.look(self.rank);
            if let AwaitedId::Here(id) = &state.awaited.id {
                let id = **id;
                state.awaited.id = AwaitedId::NotAsked;
                return Ok(id);
            }
            if let Some(error) = &state.failure {
                return Err(error.clone());
            }
            // One that has left sends nothing more.
            state.verdict()?;
            if since.elapsed() >= deadline {
                let waited_ms = deadline.as_millis() as u64;
                let call = entry.to_string();
                return Err(state.fail(Error::Deadline {
                    rank: self.rank,
                    call,
                    waited_ms,
                    missing: vec![0],
                }));
            }
            drop(state);
            thread::sleep(POLL);
        }
    }

    /// On rank 0: makes an id for each communicator that ranks have agreed to make, and sends it to its members.
    fn send_ids(&self, ours: Members, mut make: impl FnMut() -> Result<UniqueId>) -> Result<UniqueId> {
        let seats = self.lock().seats(ours)?;
        // Without the lock: NCCL may look for network interfaces first.
        let mut ids = BTreeMap::new();
        for (_, Members { first, .. }) in &seats {
            if let Vacant(place) = ids.entry(*first) {
                place.insert(make()?);
            }
        }
        let mut state = self.lock();
        for (peer, (_, Members { first, .. })) in state.peers.iter_mut().zip(&seats[1..]) {
            peer.link.send(&Message::Id(Box::new(ids[first])));
        }
        Ok(ids[&ours.first])
    }

    /// Returns whether the group still stands. Never blocks.
    ///
    /// # Errors
    /// The error that ended it: a rank's own, or `PeerLost` for a rank that is gone without one.
    pub(super) fn check(&self) -> Result<()> {
        let mut state = self.lock();
        state.look(self.rank);
        state.failure.clone().map_or(Ok(()), Err)
    }

    /// Ends the group because of this rank, unless it has ended already. Never blocks.
    pub(super) fn tell(&self, cause: &Error) {
        let error = match cause.cause() {
            own @ (Error::Mismatch { .. }
            | Error::LeftPass { .. }
            | Error::PeerLost { .. }
            | Error::Deadline { .. }) => own.clone(),
            other => Error::PeerLost { rank: self.rank, why: other.to_string() },
        };
        self.lock().fail(error);
    }

    /// Says that this rank has finished, so that the end of its connections is no failure. Never blocks.
    pub(super) fn leave(&self) {
        self.lock().broadcast(&Message::Leaving);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes in memory that peers can make this rank hold.
    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> usize {
        self.lock().peers.iter().map(|peer| peer.link.held_bytes()).sum()
    }
}

/// Refuses communicators of which a member asks for another one, or of which members differ in how many they are: NCCL
/// would wait for them up to the deadline.
fn refuse_partial(seats: &[(u32, Members)]) -> Result<()> {
    for (rank, members) in seats {
        let same = seats.iter().filter(|(_, theirs)| theirs == members).count();
        if same == members.count as usize {
            continue;
        }
        let overlaps = |(_, theirs): &&(u32, Members)| theirs.first == members.first && theirs != members;
        let is_first = |(other, _): &&(u32, Members)| *other == members.first;
        let is_other = |(other, _): &&(u32, Members)| other != rank;
        let other = seats.iter().find(overlaps).or_else(|| seats.iter().find(is_first));
        let other = other.filter(is_other).or_else(|| seats.iter().find(is_other)).unwrap_or(&seats[0]);
        let [ours, theirs] = [members, &other.1].map(|members| Entry::Communicator(*members));
        return Err(ours.mismatch(&theirs, *rank, other.0));
    }
    Ok(())
}

impl State {
    /// Takes in what has arrived. After a failure it only sends what is still queued.
    fn look(&mut self, rank: u32) {
        let mut failure = None;
        for peer in &mut self.peers {
            if self.failure.is_some() {
                peer.link.flush();
                continue;
            }
            for _ in 0..MOST_MESSAGES {
                match peer.take(rank, &mut self.awaited) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        failure.get_or_insert(error);
                        break;
                    }
                }
            }
        }
        failure.into_iter().for_each(|error| drop(self.fail(error)));
    }

    /// On rank 0: the ranks that have not said yet what they are about to do.
    fn judge(&mut self, ours: &Entry) -> Result<Vec<u32>> {
        let mut missing = Vec::new();
        for peer in &self.peers {
            match &peer.entry {
                Some(theirs) if ours.goes_with(theirs) => {}
                Some(theirs) => return Err(ours.mismatch(theirs, 0, peer.rank)),
                None if peer.left => return Err(peer.closed()),
                None => missing.push(peer.rank),
            }
        }
        if missing.is_empty() {
            self.peers.iter_mut().for_each(|peer| peer.agreed = peer.entry.take());
            self.broadcast(&Message::Agreed);
        }
        Ok(missing)
    }

    /// On rank 0: what all ranks, by rank, have agreed to make.
    fn seats(&mut self, ours: Members) -> Result<Vec<(u32, Members)>> {
        let theirs = self.peers.iter().filter_map(|peer| match peer.agreed {
            Some(Entry::Communicator(members)) => Some((peer.rank, members)),
            _ => None,
        });
        let seats: Vec<(u32, Members)> = std::iter::once((0, ours)).chain(theirs).collect();
        refuse_partial(&seats).map_err(|error| self.fail(error))?;
        Ok(seats)
    }

    /// On the others: rank 0, until it has judged. Only rank 0 knows for whom it waits.
    fn verdict(&mut self) -> Result<Vec<u32>> {
        if self.awaited.verdict == Verdict::Agreed {
            self.awaited.verdict = Verdict::NotAsked;
            return Ok(Vec::new());
        }
        self.peers.iter().find(|peer| peer.left).map_or(Ok(vec![0]), |peer| Err(peer.closed()))
    }

    /// Ends the group, once, and tells the others; returns the error that ended it.
    fn fail(&mut self, error: Error) -> Error {
        if let Some(first) = &self.failure {
            return first.clone();
        }
        self.failure = Some(error.clone());
        self.broadcast(&Message::Failure(error.clone()));
        error
    }

    fn broadcast(&mut self, message: &Message) {
        self.peers.iter_mut().for_each(|peer| peer.link.send(message));
    }
}
