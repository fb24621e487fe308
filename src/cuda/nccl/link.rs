//! One connection between two ranks, in messages: it sends and receives what it can at once and never waits.
//!
//! A frame is a length and a message. The other end may be a stranger, so one call reads and keeps at most one longest
//! frame, which is short until the other end is trusted. A peer that does not read what it is sent loses its
//! connection.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use crate::cuda::nccl::message::Message;

/// Longest frame, with its length, of an end that has not introduced itself.
const LONGEST_INTRODUCTION_BYTES: usize = 256;
/// Maximum frame size from a known rank; its text fields are single lines.
pub(super) const LONGEST_BYTES: usize = 64 * 1024;
/// Most bytes that wait for a peer to read them.
const MOST_UNSENT_BYTES: usize = 2 * LONGEST_BYTES;

/// Result of [`Link::receive`].
#[derive(Debug, PartialEq)]
pub(super) enum Received {
    Message(Message),
    Nothing,
    /// Nothing more will come, for this reason.
    Ended(String),
}

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Link {
    stream: TcpStream,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    longest: usize,
    ended: Option<String>,
}

impl Link {
    pub(super) fn new(stream: TcpStream) -> std::io::Result<Link> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let (inbox, outbox) = (Vec::new(), Vec::new());
        Ok(Link { stream, inbox, outbox, longest: LONGEST_INTRODUCTION_BYTES, ended: None })
    }

    /// From now on takes frames as long as a rank sends.
    pub(super) fn trust(&mut self) {
        self.longest = LONGEST_BYTES;
    }

    /// Queues a message and sends what the system takes now. The rest goes with the next call of either kind.
    pub(super) fn send(&mut self, message: &Message) {
        if self.ended.is_some() {
            return;
        }
        let frame = message.encode();
        self.outbox.extend((frame.len() as u32).to_le_bytes());
        self.outbox.extend(frame);
        self.flush();
        if self.outbox.len() > MOST_UNSENT_BYTES {
            self.outbox = Vec::new();
            self.ended = Some("it does not read what it is sent".to_owned());
        }
    }

    pub(super) fn receive(&mut self) -> Received {
        self.flush();
        self.fill();
        match self.next() {
            // A message that arrived before the end still counts.
            Some(Ok(message)) => Received::Message(message),
            Some(Err(why)) => {
                self.inbox = Vec::new();
                Received::Ended(self.ended.insert(why.to_owned()).clone())
            }
            None => self.ended.clone().map_or(Received::Nothing, Received::Ended),
        }
    }

    pub(super) fn flush(&mut self) {
        while !self.outbox.is_empty() && self.ended.is_none() {
            match self.stream.write(&self.outbox) {
                Ok(sent) => drop(self.outbox.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // Something that says why may still be there to read, and reading finds the end too.
                Err(_) => self.outbox.clear(),
            }
        }
    }

    /// Reads until nothing is there, or until a longest frame is.
    fn fill(&mut self) {
        let mut bytes = [0; 4096];
        while self.ended.is_none() && self.inbox.len() < self.longest {
            let room = bytes.len().min(self.longest - self.inbox.len());
            match self.stream.read(&mut bytes[..room]) {
                Ok(0) => self.ended = Some("its connection was closed".to_owned()),
                Ok(count) => self.inbox.extend(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => self.ended = Some(format!("its connection broke: {error}")),
            }
        }
    }

    /// Takes the first message off, if all of it is there.
    fn next(&mut self) -> Option<Result<Message, &'static str>> {
        let length = u32::from_le_bytes(*self.inbox.first_chunk()?) as usize;
        if !(1..=self.longest - 4).contains(&length) {
            return Some(Err("it does not speak this crate's protocol"));
        }
        let frame = self.inbox.get(4..4 + length)?;
        let message = Message::decode(frame).ok_or("it sent a message that no rank sends");
        self.inbox.drain(..4 + length);
        Some(message)
    }

    /// Bytes in memory for this connection.
    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> usize {
        self.inbox.len() + self.outbox.len()
    }
}
