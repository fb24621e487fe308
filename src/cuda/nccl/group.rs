//! The ranks after they have met: a star of connections through rank 0, beside whatever moves the sums.
//!
//! Two uses: ranks hold what they are about to do against each other's, and whoever ends the group tells the others, or
//! is missed when its connection ends. NCCL does neither: a rank that disagrees or dies is a hang there. A lock is held
//! for one look at every connection and never while waiting, so that telling and checking do not block.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::cuda::nccl::link::{Link, Message, Received};
use crate::error::{Error, Result};

const POLL: Duration = Duration::from_micros(200);

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
    /// Verdicts of rank 0 that nobody has taken yet.
    agreed: u64,
    failure: Option<Error>,
}

/// A rank at the other end of a connection.
#[derive(Debug)]
pub(super) struct Peer {
    rank: u32,
    link: Link,
    entries: VecDeque<String>,
    left: bool,
}

impl Peer {
    pub(super) fn new(rank: u32, link: Link) -> Peer {
        Peer { rank, link, entries: VecDeque::new(), left: false }
    }

    pub(super) fn send(&mut self, message: &Message) {
        self.link.send(message);
    }
}

impl Group {
    pub(super) fn new(rank: u32, world_size: u32, peers: Vec<Peer>) -> Group {
        Group { rank, world_size, state: Mutex::new(State { peers, agreed: 0, failure: None }) }
    }

    /// Waits until every rank is about to do the same.
    ///
    /// # Errors
    /// `Mismatch`, `PeerLost` or `Deadline`, on every rank; the group has ended then.
    pub(super) fn compare(&self, entry: &str, deadline: Duration) -> Result<()> {
        if self.world_size == 1 {
            return Ok(());
        }
        let since = Instant::now();
        if self.rank > 0 {
            self.lock().broadcast(&Message::Entry(entry.to_owned()));
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
                let call = entry.to_owned();
                return Err(state.fail(Error::Deadline { rank: self.rank, call, waited_ms, missing }));
            }
            drop(state);
            thread::sleep(POLL);
        }
    }

    /// Whether the group still stands. Never blocks.
    ///
    /// # Errors
    /// What has ended it: a rank's own words, or `PeerLost` for one that is gone without any.
    pub(super) fn check(&self) -> Result<()> {
        let mut state = self.lock();
        state.look(self.rank);
        state.failure.clone().map_or(Ok(()), Err)
    }

    /// Ends the group because of this rank, unless it has ended already. Never blocks.
    pub(super) fn tell(&self, cause: &Error) {
        let error = match cause.cause() {
            own @ (Error::Mismatch { .. } | Error::PeerLost { .. } | Error::Deadline { .. }) => own.clone(),
            other => Error::PeerLost { rank: self.rank, why: other.to_string() },
        };
        self.lock().fail(error);
    }

    /// Says that this rank is through, so that the end of its connections is no failure. Never blocks.
    pub(super) fn leave(&self) {
        self.lock().broadcast(&Message::Leaving);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes in what has arrived.
    fn look(&mut self, rank: u32) {
        let mut failures = Vec::new();
        for peer in &mut self.peers {
            loop {
                let lost = |why| Error::PeerLost { rank: peer.rank, why };
                match peer.link.receive() {
                    Received::Nothing => break,
                    Received::Ended(why) => {
                        if !peer.left {
                            failures.push(lost(why));
                            peer.left = true;
                        }
                        break;
                    }
                    Received::Message(Message::Entry(entry)) if rank == 0 => peer.entries.push_back(entry),
                    Received::Message(Message::Agreed) if rank > 0 => self.agreed += 1,
                    Received::Message(Message::Failure(error)) => failures.push(error),
                    Received::Message(Message::Leaving) => peer.left = true,
                    Received::Message(other) => failures.push(lost(format!("it sent {other:?}"))),
                }
            }
        }
        // The first is the one that counts, and telling it is enough.
        failures.into_iter().take(1).for_each(|error| drop(self.fail(error)));
    }

    /// Rank 0: the ranks that have not said yet what they are about to do.
    fn judge(&mut self, ours: &str) -> Result<Vec<u32>> {
        let mut missing = Vec::new();
        for peer in &self.peers {
            match peer.entries.front() {
                Some(theirs) if theirs == ours => {}
                Some(theirs) => {
                    let (ours, theirs) = (ours.to_owned(), theirs.clone());
                    return Err(Error::Mismatch { rank: 0, ours, other_rank: peer.rank, theirs });
                }
                None if peer.left => return Err(peer.gone()),
                None => missing.push(peer.rank),
            }
        }
        if missing.is_empty() {
            self.peers.iter_mut().for_each(|peer| drop(peer.entries.pop_front()));
            self.broadcast(&Message::Agreed);
        }
        Ok(missing)
    }

    /// The others: rank 0, until it has judged. Whom that one waits for is known to it alone.
    fn verdict(&mut self) -> Result<Vec<u32>> {
        if self.agreed > 0 {
            self.agreed -= 1;
            return Ok(Vec::new());
        }
        self.peers.iter().find(|peer| peer.left).map_or(Ok(vec![0]), |peer| Err(peer.gone()))
    }

    /// Ends the group, once, and tells the others; returns what has ended it.
    fn fail(&mut self, error: Error) -> Error {
        if let Some(first) = &self.failure {
            return first.clone();
        }
        self.failure = Some(error.clone());
        self.broadcast(&Message::Failure(error.clone()));
        error
    }

    fn broadcast(&mut self, message: &Message) {
        self.peers.iter_mut().for_each(|peer| peer.send(message));
    }
}

impl Peer {
    fn gone(&self) -> Error {
        Error::PeerLost { rank: self.rank, why: "it has closed its communicator".to_owned() }
    }
}
