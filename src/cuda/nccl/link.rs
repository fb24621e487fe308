//! One connection between two ranks, in messages: sends and receives what it can at once and never waits.
//!
//! A frame is a length and a message. What comes in may be anybody's: a length out of range, an unknown kind or a field
//! cut short ends the connection, and nothing is allocated by what a stranger claims. Must not know what messages mean.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use crate::cuda::nccl::UniqueId;
use crate::error::{Error, Result};

/// Longest frame; the texts in it are a line each.
const LONGEST_BYTES: usize = 64 * 1024;
const LONGEST_TEXT_BYTES: usize = 8 * 1024;
/// "instep" and the version of what follows.
const MAGIC: u64 = u64::from_be_bytes(*b"instep\0\x01");

/// What ranks tell each other.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Message {
    /// A rank to rank 0, first of all: who it is, in what group.
    Hello { world_size: u32, rank: u32, job: u64 },
    /// Rank 0's answers: it is expected here,
    Seated,
    /// or the port belongs to another job,
    OtherJob,
    /// or the group has another size,
    WorldSize(u32),
    /// or another process has this rank.
    Taken,
    /// Rank 0 to all, once all are there.
    Id(Box<UniqueId>),
    /// A rank to rank 0: what it is about to do.
    Entry(String),
    /// Rank 0 to all: every rank's entry is the same.
    Agreed,
    /// The group has ended, and why.
    Failure(Error),
    /// The sender closes its communicator, as it should.
    Leaving,
}

/// What [`Link::receive`] found.
#[derive(Debug, PartialEq)]
pub(super) enum Received {
    Message(Message),
    Nothing,
    /// Nothing will come any more, for this reason.
    Ended(String),
}

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Link {
    stream: TcpStream,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    ended: Option<String>,
}

impl Link {
    pub(super) fn new(stream: TcpStream) -> std::io::Result<Link> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Link { stream, inbox: Vec::new(), outbox: Vec::new(), ended: None })
    }

    /// Queues a message and sends what the system takes now; the rest goes with the next call of either kind.
    pub(super) fn send(&mut self, message: &Message) {
        let frame = encode(message);
        self.outbox.extend((frame.len() as u32).to_le_bytes());
        self.outbox.extend(frame);
        self.flush();
    }

    pub(super) fn receive(&mut self) -> Received {
        self.flush();
        self.fill();
        match decode(&mut self.inbox) {
            // What arrived before the end still counts.
            Some(Ok(message)) => Received::Message(message),
            Some(Err(why)) => {
                self.inbox.clear();
                Received::Ended(self.ended.insert(why.to_owned()).clone())
            }
            None => self.ended.clone().map_or(Received::Nothing, Received::Ended),
        }
    }

    fn flush(&mut self) {
        while !self.outbox.is_empty() && self.ended.is_none() {
            match self.stream.write(&self.outbox) {
                Ok(sent) => drop(self.outbox.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // There may still be something to read, which says why; reading will find the end, too.
                Err(_) => self.outbox.clear(),
            }
        }
    }

    fn fill(&mut self) {
        let mut bytes = [0; 4096];
        while self.ended.is_none() && self.inbox.len() < LONGEST_BYTES {
            match self.stream.read(&mut bytes) {
                Ok(0) => self.ended = Some("its connection was closed".to_owned()),
                Ok(count) => self.inbox.extend(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => self.ended = Some(format!("its connection broke: {error}")),
            }
        }
    }
}

fn encode(message: &Message) -> Vec<u8> {
    let mut frame = Vec::new();
    match message {
        Message::Hello { world_size, rank, job } => {
            frame.push(0);
            frame.extend(MAGIC.to_le_bytes());
            frame.extend(world_size.to_le_bytes());
            frame.extend(rank.to_le_bytes());
            frame.extend(job.to_le_bytes());
        }
        Message::Seated => frame.push(1),
        Message::OtherJob => frame.push(2),
        Message::WorldSize(world_size) => {
            frame.push(3);
            frame.extend(world_size.to_le_bytes());
        }
        Message::Taken => frame.push(4),
        Message::Id(id) => {
            frame.push(5);
            frame.extend(id.iter());
        }
        Message::Entry(text) => {
            frame.push(6);
            put_text(&mut frame, text);
        }
        Message::Agreed => frame.push(7),
        Message::Failure(Error::Mismatch { rank, ours, other_rank, theirs }) => {
            frame.push(8);
            frame.extend(rank.to_le_bytes());
            frame.extend(other_rank.to_le_bytes());
            put_text(&mut frame, ours);
            put_text(&mut frame, theirs);
        }
        Message::Failure(Error::Deadline { rank, call, waited_ms, missing }) => {
            frame.push(9);
            frame.extend(rank.to_le_bytes());
            frame.extend(waited_ms.to_le_bytes());
            put_text(&mut frame, call);
            // All of them only if they fit.
            missing.iter().take(4096).for_each(|rank| frame.extend(rank.to_le_bytes()));
        }
        Message::Failure(Error::PeerLost { rank, why }) => {
            frame.push(10);
            frame.extend(rank.to_le_bytes());
            put_text(&mut frame, why);
        }
        // Nobody else's error crosses (`Group::tell`); if one did, the connection's end would say as much.
        Message::Failure(_) => {}
        Message::Leaving => frame.push(11),
    }
    frame
}

fn put_text(frame: &mut Vec<u8>, text: &str) {
    let fits = (0..=LONGEST_TEXT_BYTES.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    let text = &text[..fits.unwrap_or(0)];
    frame.extend((text.len() as u32).to_le_bytes());
    frame.extend(text.as_bytes());
}

/// Takes the first message off, if all of it is there.
fn decode(inbox: &mut Vec<u8>) -> Option<Result<Message, &'static str>> {
    let length = u32::from_le_bytes(*inbox.first_chunk()?) as usize;
    if !(1..=LONGEST_BYTES - 4).contains(&length) {
        return Some(Err("what it sends is not from a rank of this crate"));
    }
    let frame = inbox.get(4..4 + length)?;
    let message = Fields(frame).message().ok_or("what it sends makes no sense");
    inbox.drain(..4 + length);
    Some(message)
}

/// What is left of a frame.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Option<String> {
        let length = self.u32()? as usize;
        let (text, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        String::from_utf8(text.to_owned()).ok()
    }

    fn ranks(&mut self) -> Option<Vec<u32>> {
        (0..self.0.len() / 4).map(|_| self.u32()).collect()
    }

    fn message(mut self) -> Option<Message> {
        let [kind] = self.array()?;
        let message = match kind {
            0 => {
                let ours = self.u64()? == MAGIC;
                let (world_size, rank, job) = (self.u32()?, self.u32()?, self.u64()?);
                ours.then_some(Message::Hello { world_size, rank, job })?
            }
            1 => Message::Seated,
            2 => Message::OtherJob,
            3 => Message::WorldSize(self.u32()?),
            4 => Message::Taken,
            5 => Message::Id(Box::new(self.array()?)),
            6 => Message::Entry(self.text()?),
            7 => Message::Agreed,
            8 => {
                let (rank, other_rank) = (self.u32()?, self.u32()?);
                let (ours, theirs) = (self.text()?, self.text()?);
                Message::Failure(Error::Mismatch { rank, ours, other_rank, theirs })
            }
            9 => {
                let (rank, waited_ms, call) = (self.u32()?, self.u64()?, self.text()?);
                Message::Failure(Error::Deadline { rank, call, waited_ms, missing: self.ranks()? })
            }
            10 => Message::Failure(Error::PeerLost { rank: self.u32()?, why: self.text()? }),
            11 => Message::Leaving,
            _ => return None,
        };
        self.0.is_empty().then_some(message)
    }
}
