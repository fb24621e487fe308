//! Rank 0 while it waits for the others: it hears everyone who connects and gives each rank one seat.
//!
//! Strangers can cost it a bounded number of connections, bytes and lines of text. When all places are taken, the
//! connection that has waited longest is closed: a rank introduces itself at once, and connects again if it was closed.

use std::collections::VecDeque;
use std::mem;
use std::net::TcpListener;
use std::thread;
use std::time::Instant;

use super::{INTRODUCTION, POLL, job};
use crate::cuda::nccl::group::Peer;
use crate::cuda::nccl::handshake::{self, Nonce, Role, Transcript};
use crate::cuda::nccl::link::{Link, Received};
use crate::cuda::nccl::message::Message;
use crate::cuda::nccl::secret::Secret;
use crate::cuda::nccl::{Options, UniqueId};
use crate::error::{Error, Result};

/// Most connections that have no seat yet.
pub(in crate::cuda::nccl) const MOST_GUESTS: usize = 256;
/// Connections that are accepted between two looks at the others.
const ACCEPTED_AT_ONCE: usize = 64;

/// Waits for all ranks, then hands the id out.
pub(super) fn gather(listener: TcpListener, options: &Options, id: UniqueId) -> Result<Vec<Peer>> {
    listener.set_nonblocking(true).map_err(|error| {
        Error::unsupported(format_args!("MASTER_PORT {}", options.master_port), error, "choose another port")
    })?;
    let since = Instant::now();
    let mut gathering = Gathering::new(options);
    loop {
        gathering.look(&listener)?;
        let missing = gathering.missing();
        if missing.is_empty() {
            break;
        }
        if since.elapsed() >= options.deadline {
            return Err(gathering.give_up(missing));
        }
        thread::sleep(POLL);
    }
    // The port is closed before any rank goes on, because the next group may meet on it.
    drop(listener);
    Ok(gathering.hand_out(id))
}

/// The seats of the other ranks, and the connections that have none.
pub(in crate::cuda::nccl) struct Gathering<'a> {
    options: &'a Options,
    seats: Vec<Option<Link>>,
    /// Oldest first.
    guests: VecDeque<Guest>,
    refused: u64,
    last_refusal: Option<String>,
}

struct Guest {
    link: Link,
    since: Instant,
    claim: Option<Claim>,
}

/// Identity that a guest claims until its proof arrives.
struct Claim {
    world_size: u32,
    rank: u32,
    host: Nonce,
    guest: Nonce,
}

impl<'a> Gathering<'a> {
    pub(in crate::cuda::nccl) fn new(options: &'a Options) -> Gathering<'a> {
        let seats = (1..options.world_size).map(|_| None).collect();
        Gathering { options, seats, guests: VecDeque::new(), refused: 0, last_refusal: None }
    }

    /// Accepts who knocks, and hears at most one message of every connection.
    pub(in crate::cuda::nccl) fn look(&mut self, listener: &TcpListener) -> Result<()> {
        for _ in 0..ACCEPTED_AT_ONCE {
            let Ok((stream, _)) = listener.accept() else { break };
            if self.guests.len() == MOST_GUESTS {
                self.guests.pop_front();
            }
            let guest = |link| Guest { link, since: Instant::now(), claim: None };
            self.guests.extend(Link::new(stream).ok().map(guest));
        }
        for seat in &mut self.seats {
            // A seated rank says nothing before the id, so this one has gone. It may come again.
            if seat.as_mut().is_some_and(|link| link.receive() != Received::Nothing) {
                *seat = None;
            }
        }
        for guest in mem::take(&mut self.guests) {
            let stays = self.hear(guest)?;
            self.guests.extend(stays);
        }
        Ok(())
    }

    pub(in crate::cuda::nccl) fn missing(&self) -> Vec<u32> {
        (1..).zip(&self.seats).filter(|(_, seat)| seat.is_none()).map(|(rank, _)| rank).collect()
    }

    /// Returns the guest if its introduction is not over.
    fn hear(&mut self, mut guest: Guest) -> Result<Option<Guest>> {
        match (guest.link.receive(), guest.claim.take()) {
            (Received::Nothing, claim) if guest.since.elapsed() < INTRODUCTION => {
                guest.claim = claim;
                return Ok(Some(guest));
            }
            (Received::Message(Message::Hello { world_size, rank, job: theirs, nonce }), None) => {
                if theirs != job(self.options) {
                    self.refuse(guest.link, world_size, rank, &Message::OtherJob);
                    return Ok(None);
                }
                match (&self.options.secret, nonce) {
                    (None, None) => self.seat(guest.link, world_size, rank),
                    (Some(secret), Some(nonce)) => {
                        let claim = Claim { world_size, rank, host: handshake::nonce()?, guest: nonce };
                        let proof = claim.transcript(&self.options.job).prove(secret, Role::Host);
                        guest.link.send(&Message::Challenge { nonce: claim.host, proof });
                        guest.claim = Some(claim);
                        return Ok(Some(guest));
                    }
                    _ => self.refuse(guest.link, world_size, rank, &Message::Unproven),
                }
            }
            (Received::Message(Message::Proof(proof)), Some(claim)) => {
                let transcript = claim.transcript(&self.options.job);
                let holds = |secret: &Secret| transcript.verify(secret, Role::Guest, &proof);
                if self.options.secret.as_ref().is_some_and(holds) {
                    self.seat(guest.link, claim.world_size, claim.rank);
                } else {
                    self.refuse(guest.link, claim.world_size, claim.rank, &Message::Unproven);
                }
            }
            // A stranger, or a connection that says nothing.
            (Received::Message(_) | Received::Ended(_) | Received::Nothing, _) => {}
        }
        Ok(None)
    }

    fn seat(&mut self, mut link: Link, world_size: u32, rank: u32) {
        if world_size != self.options.world_size {
            return self.refuse(link, world_size, rank, &Message::WorldSize(self.options.world_size));
        }
        match rank.checked_sub(1).and_then(|at| self.seats.get_mut(at as usize)) {
            Some(seat @ None) => {
                link.send(&Message::Seated);
                *seat = Some(link);
            }
            Some(Some(_)) | None => self.refuse(link, world_size, rank, &Message::Taken),
        }
    }

    fn refuse(&mut self, mut link: Link, world_size: u32, rank: u32, answer: &Message) {
        link.send(answer);
        self.refused += 1;
        self.last_refusal = Some(format!("rank {rank} of {world_size}: {}", answer.kind()));
    }

    pub(in crate::cuda::nccl) fn give_up(mut self, missing: Vec<u32>) -> Error {
        let Options { rank, world_size, master_port, deadline, .. } = self.options;
        let mut call = format!("gathering {world_size} ranks on port {master_port}");
        if let Some(last) = &self.last_refusal {
            call += &format!(", {} refused, the last was {last}", self.refused);
        }
        let waited_ms = deadline.as_millis() as u64;
        let error = Error::Deadline { rank: *rank, call, waited_ms, missing };
        self.seats.iter_mut().flatten().for_each(|link| link.send(&Message::Failure(error.clone())));
        error
    }

    fn hand_out(self, id: UniqueId) -> Vec<Peer> {
        let peer = |(rank, mut link): (u32, Link)| {
            link.trust();
            link.send(&Message::Id(Box::new(id)));
            Peer::new(rank, link)
        };
        (1..).zip(self.seats.into_iter().flatten()).map(peer).collect()
    }

    /// Connections without a seat, and the bytes that everyone who connected makes this rank hold.
    #[cfg(test)]
    pub(in crate::cuda::nccl) fn held(&self) -> (usize, usize) {
        let links = self.guests.iter().map(|guest| &guest.link).chain(self.seats.iter().flatten());
        (
            self.guests.len(),
            links.map(Link::held_bytes).sum::<usize>() + self.last_refusal.as_ref().map_or(0, String::len),
        )
    }
}

impl Claim {
    fn transcript<'a>(&'a self, job: &'a str) -> Transcript<'a> {
        let Claim { world_size, rank, host, guest } = self;
        Transcript { job, world_size: *world_size, rank: *rank, host, guest }
    }
}
