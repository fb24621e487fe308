//! Every rank but 0: it connects to rank 0 again and again, until it has NCCL's id or the deadline passes.
//!
//! The answer may come from a stranger, and rank 0 may not be there yet, so only two answers end the attempts: a
//! failure of the group that this rank has a seat in, and another world size. With a secret, both count only from an
//! end that has proven that it knows it.

use std::io::ErrorKind;
use std::net::{TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::{INTRODUCTION, POLL, job};
use crate::cuda::nccl::group::{Group, Peer};
use crate::cuda::nccl::handshake::{self, Role, Transcript};
use crate::cuda::nccl::link::{Link, Received};
use crate::cuda::nccl::message::Message;
use crate::cuda::nccl::{Options, UniqueId};
use crate::error::{Error, Result};

/// Longest duration of one attempt to connect. A host that drops packets would use up the whole deadline.
const CONNECTION: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(50);

/// Result of one attempt.
#[derive(Debug)]
pub(in crate::cuda::nccl) enum Attempt {
    Joined(Link, Box<UniqueId>),
    /// Rank 0 did not answer: it may not be there yet, or something else has its port.
    Unanswered(String),
    /// A rank 0 answered, but has no seat for this rank now.
    NotSeated(String),
    /// Rank 0 says that another process has this rank's seat. That process may be a stranger, or leave.
    Taken,
    /// The deadline came before an answer, so this attempt has shown nothing.
    CutShort,
}

pub(super) fn join(options: &Options) -> Result<(Group, UniqueId)> {
    let until = Instant::now() + options.deadline;
    let (link, id) = repeat(options, until, || attempt(options, until))?;
    Ok((Group::new(options.rank, options.world_size, vec![Peer::new(0, link)]), *id))
}

/// Repeats an attempt until the deadline. Its error keeps the last answer of a rank 0: what happened to connections
/// after it says less, and an attempt that the deadline cut short says nothing.
pub(in crate::cuda::nccl) fn repeat(
    options: &Options,
    until: Instant,
    mut attempt: impl FnMut() -> Result<Attempt>,
) -> Result<(Link, Box<UniqueId>)> {
    let (mut answer, mut last, mut taken) = (None, "nothing answered".to_owned(), false);
    loop {
        match attempt()? {
            Attempt::Joined(link, id) => return Ok((link, id)),
            Attempt::Unanswered(why) => last = why,
            Attempt::NotSeated(why) => (answer, taken) = (Some(why), false),
            Attempt::Taken => taken = true,
            Attempt::CutShort => {}
        }
        if Instant::now() + RETRY >= until {
            break;
        }
        thread::sleep(RETRY);
    }
    if taken {
        let wrong = "another process has joined as this rank";
        return Err(Error::config("RANK", options.rank, wrong, "start one process per rank"));
    }
    let (address, port) = (&options.master_addr, options.master_port);
    let call = format!("joining rank 0 at {address}:{port}, last result: {}", answer.unwrap_or(last));
    let waited_ms = options.deadline.as_millis() as u64;
    Err(Error::Deadline { rank: options.rank, call, waited_ms, missing: vec![0] })
}

/// Connects once, and waits for a seat and the id.
pub(in crate::cuda::nccl) fn attempt(options: &Options, until: Instant) -> Result<Attempt> {
    let mut link = match connect(options, until) {
        Ok(link) => link,
        Err(error) if error.kind() == ErrorKind::TimedOut && Instant::now() >= until => {
            return Ok(Attempt::CutShort);
        }
        Err(error) => return Ok(Attempt::Unanswered(error.to_string())),
    };
    let (world_size, rank) = (options.world_size, options.rank);
    let nonce = options.secret.as_ref().map(|_| handshake::nonce()).transpose()?;
    link.send(&Message::Hello { world_size, rank, job: job(options), nonce });
    let since = Instant::now();
    // Without a secret every rank 0 is believed.
    let mut believed = options.secret.is_none();
    let mut seated = false;
    let unproven = "rank 0 and this rank have no common secret; give all ranks the same INSTEP_JOB_SECRET";
    loop {
        match link.receive() {
            Received::Message(Message::Challenge { nonce: host, proof }) if !seated => {
                let (Some(secret), Some(guest)) = (&options.secret, &nonce) else {
                    return Ok(Attempt::NotSeated(unproven.to_owned()));
                };
                let transcript = Transcript { job: &options.job, world_size, rank, host: &host, guest };
                if !transcript.verify(secret, Role::Host, &proof) {
                    return Ok(Attempt::NotSeated(unproven.to_owned()));
                }
                believed = true;
                link.send(&Message::Proof(transcript.prove(secret, Role::Guest)));
            }
            Received::Message(Message::Seated) if believed && !seated => {
                seated = true;
                link.trust();
            }
            Received::Message(Message::Id(id)) if seated => return Ok(Attempt::Joined(link, id)),
            Received::Message(Message::Failure(error)) if seated => return Err(error),
            Received::Message(Message::WorldSize(theirs)) if believed => {
                let group = |size| format!("joining a group of {size}");
                let (ours, theirs) = (group(world_size), group(theirs));
                let differs = "world size".to_owned();
                return Err(Error::Mismatch { rank, ours, other_rank: 0, theirs, differs });
            }
            Received::Message(Message::Taken) if believed => return Ok(Attempt::Taken),
            // The port may be free for this job in a moment.
            Received::Message(Message::OtherJob) => {
                return Ok(Attempt::NotSeated("another job answered".to_owned()));
            }
            Received::Message(Message::Unproven | Message::Seated) if !seated => {
                return Ok(Attempt::NotSeated(unproven.to_owned()));
            }
            Received::Message(other) => {
                return Ok(Attempt::Unanswered(format!("it sent {} out of turn", other.kind())));
            }
            Received::Ended(why) => return Ok(Attempt::Unanswered(why)),
            Received::Nothing if !seated && since.elapsed() >= INTRODUCTION => {
                return Ok(Attempt::Unanswered("the program that listens there did not answer".to_owned()));
            }
            Received::Nothing if Instant::now() >= until => {
                let waits = || Attempt::NotSeated("rank 0 still waited for other ranks".to_owned());
                return Ok(if seated { waits() } else { Attempt::CutShort });
            }
            Received::Nothing => thread::sleep(POLL),
        }
    }
}

fn connect(options: &Options, until: Instant) -> std::io::Result<Link> {
    let mut last = std::io::Error::other("the name has no address");
    // The name is resolved each time, because in a cluster that is starting it may appear later.
    for address in (options.master_addr.as_str(), options.master_port).to_socket_addrs()? {
        let left = until.saturating_duration_since(Instant::now()).clamp(POLL, CONNECTION);
        match TcpStream::connect_timeout(&address, left).and_then(Link::new) {
            Ok(link) => return Ok(link),
            Err(error) => last = error,
        }
    }
    Err(last)
}
