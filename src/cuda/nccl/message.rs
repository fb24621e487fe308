//! Messages between ranks, as bytes.
//!
//! The sender may be anyone, so decoding refuses an unknown kind, a field cut short and bytes left over. It allocates
//! no more than the frame that it was given, and escapes every text that an error may repeat.

use std::fmt;

use crate::collective::CallKey;
use crate::cuda::nccl::UniqueId;
use crate::cuda::nccl::handshake::{Nonce, Proof};
use crate::error::Error;
use crate::op::explain;
use crate::text::sentence;

/// "instep" and the version of the protocol.
const MAGIC: u64 = u64::from_be_bytes(*b"instep\0\x05");
const LONGEST_TEXT_BYTES: usize = 8 * 1024;
/// Ranks that a `Deadline` names to the other ranks.
const MOST_MISSING: usize = 256;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Message {
    /// A rank to rank 0, first of all: who it is, and a nonce if it knows a secret.
    Hello { world_size: u32, rank: u32, job: u64, nonce: Option<Nonce> },
    /// Rank 0's answer to a nonce: its own, and the proof that it knows the secret.
    Challenge { nonce: Nonce, proof: Proof },
    /// The rank's proof.
    Proof(Proof),
    /// Rank 0's verdict: the rank is expected and has its seat,
    Seated,
    /// or the port belongs to another job,
    OtherJob,
    /// or the group has this other size,
    WorldSize(u32),
    /// or another process has this rank's seat,
    Taken,
    /// or the two ends do not know the same secret.
    Unproven,
    /// Rank 0 to all, once all have a seat, and again for each further communicator.
    Id(Box<UniqueId>),
    /// A rank to rank 0: what it is about to do.
    Entry(Entry),
    /// Rank 0 to all: every rank's entry is the same.
    Agreed,
    /// The group has ended, and why.
    Failure(Error),
    /// The sender closes its communicator in order.
    Leaving,
}

/// A comparison that every rank makes with the same content.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Entry {
    /// A collective call.
    Call(CallKey),
    /// A stepper is built, of this agreement.
    Stepper(u64),
    /// Another communicator is made, of these ranks for the sender.
    Communicator(Members),
}

/// The ranks of a further communicator, as one of them sees it. No rank is in two that are made at the same point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Members {
    /// The rank that is number 0 there.
    pub(super) first: u32,
    pub(super) count: u32,
}

impl Entry {
    /// Returns whether a peer that sends `theirs` is about to do the same. Ranks may be in several groups.
    pub(super) fn goes_with(&self, theirs: &Entry) -> bool {
        self == theirs || matches!((self, theirs), (Entry::Communicator(_), Entry::Communicator(_)))
    }

    /// Returns the error for a peer whose entry is another.
    pub(super) fn mismatch(&self, theirs: &Entry, rank: u32, other_rank: u32) -> Error {
        if let (Entry::Call(ours), Entry::Call(theirs)) = (self, theirs) {
            return ours.mismatch(theirs, rank, other_rank);
        }
        let differs = match (self, theirs) {
            (Entry::Stepper(ours), Entry::Stepper(theirs)) => {
                explain(*ours, *theirs, rank, other_rank).unwrap_or_default()
            }
            (Entry::Communicator(_), Entry::Communicator(_)) => "members".to_owned(),
            _ => "kind".to_owned(),
        };
        Error::Mismatch { rank, ours: self.to_string(), other_rank, theirs: theirs.to_string(), differs }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Entry::Call(key) => key.fmt(f),
            Entry::Stepper(number) => write!(f, "a stepper of agreement {number:016x}"),
            Entry::Communicator(Members { first, count }) => {
                write!(f, "a further communicator of {count} ranks, in which rank {first} is number 0")
            }
        }
    }
}

impl Message {
    /// Returns what an error calls this kind of message; nothing that the sender chose is in it.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Message::Hello { .. } => "a hello",
            Message::Challenge { .. } => "a challenge",
            Message::Proof(_) => "a proof",
            Message::Seated => "a seat",
            Message::OtherJob => "another job",
            Message::WorldSize(_) => "another world size",
            Message::Taken => "the rank is taken",
            Message::Unproven => "no common secret",
            Message::Id(_) => "an id",
            Message::Entry(_) => "an entry",
            Message::Agreed => "an agreement",
            Message::Failure(_) => "a failure",
            Message::Leaving => "a farewell",
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut frame = Vec::new();
        match self {
            Message::Hello { world_size, rank, job, nonce } => {
                frame.push(0);
                frame.extend(MAGIC.to_le_bytes());
                frame.extend(world_size.to_le_bytes());
                frame.extend(rank.to_le_bytes());
                frame.extend(job.to_le_bytes());
                frame.extend(nonce.iter().flatten());
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
            Message::Entry(Entry::Call(key)) => {
                frame.push(6);
                frame.extend(key.to_bytes());
            }
            Message::Entry(Entry::Stepper(number)) => {
                frame.push(15);
                frame.extend(number.to_le_bytes());
            }
            Message::Entry(Entry::Communicator(Members { first, count })) => {
                frame.push(17);
                frame.extend(first.to_le_bytes());
                frame.extend(count.to_le_bytes());
            }
            Message::Agreed => frame.push(7),
            Message::Failure(Error::Mismatch { rank, ours, other_rank, theirs, differs }) => {
                frame.push(8);
                frame.extend(rank.to_le_bytes());
                frame.extend(other_rank.to_le_bytes());
                put_text(&mut frame, ours);
                put_text(&mut frame, theirs);
                put_text(&mut frame, differs);
            }
            Message::Failure(Error::Deadline { rank, call, waited_ms, missing }) => {
                frame.push(9);
                frame.extend(rank.to_le_bytes());
                frame.extend(waited_ms.to_le_bytes());
                put_text(&mut frame, call);
                missing.iter().take(MOST_MISSING).for_each(|rank| frame.extend(rank.to_le_bytes()));
            }
            Message::Failure(Error::LeftPass { rank, pass, other_rank, theirs }) => {
                frame.push(16);
                frame.extend(rank.to_le_bytes());
                frame.extend(pass.to_le_bytes());
                frame.extend(other_rank.to_le_bytes());
                put_text(&mut frame, theirs);
            }
            Message::Failure(Error::PeerLost { rank, why }) => {
                frame.push(10);
                frame.extend(rank.to_le_bytes());
                put_text(&mut frame, why);
            }
            // `Group::tell` sends no other error. The receiver would end the connection.
            Message::Failure(_) => {}
            Message::Leaving => frame.push(11),
            Message::Challenge { nonce, proof } => {
                frame.push(12);
                frame.extend(nonce);
                frame.extend(proof);
            }
            Message::Proof(proof) => {
                frame.push(13);
                frame.extend(proof);
            }
            Message::Unproven => frame.push(14),
        }
        frame
    }

    /// Reads one whole frame; `None` if no rank of this version sent it.
    pub(super) fn decode(frame: &[u8]) -> Option<Message> {
        Fields(frame).message()
    }
}

fn put_text(frame: &mut Vec<u8>, text: &str) {
    let fits = (0..=LONGEST_TEXT_BYTES.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    let text = &text[..fits.unwrap_or(0)];
    frame.extend((text.len() as u32).to_le_bytes());
    frame.extend(text.as_bytes());
}

/// The bytes of a frame that have not been read yet.
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

    fn text(&mut self) -> Option<&str> {
        let length = self.u32()? as usize;
        let (text, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        str::from_utf8(text).ok()
    }

    /// A text that goes into an error.
    fn cause(&mut self) -> Option<String> {
        self.text().map(sentence)
    }

    fn ranks(&mut self) -> Option<Vec<u32>> {
        let count = self.0.len() / 4;
        if count > MOST_MISSING { None } else { (0..count).map(|_| self.u32()).collect() }
    }

    fn message(mut self) -> Option<Message> {
        let [kind] = self.array()?;
        let message = match kind {
            0 => {
                let ours = self.u64()? == MAGIC;
                let (world_size, rank, job) = (self.u32()?, self.u32()?, self.u64()?);
                let nonce = if self.0.is_empty() { None } else { Some(self.array()?) };
                ours.then_some(Message::Hello { world_size, rank, job, nonce })?
            }
            1 => Message::Seated,
            2 => Message::OtherJob,
            3 => Message::WorldSize(self.u32()?),
            4 => Message::Taken,
            5 => Message::Id(Box::new(self.array()?)),
            6 => Message::Entry(Entry::Call(CallKey::from_bytes(&self.array()?)?)),
            15 => Message::Entry(Entry::Stepper(self.u64()?)),
            17 => {
                let (first, count) = (self.u32()?, self.u32()?);
                Message::Entry(Entry::Communicator(Members { first, count }))
            }
            7 => Message::Agreed,
            8 => {
                let (rank, other_rank) = (self.u32()?, self.u32()?);
                let (ours, theirs, differs) = (self.cause()?, self.cause()?, self.cause()?);
                Message::Failure(Error::Mismatch { rank, ours, other_rank, theirs, differs })
            }
            9 => {
                let (rank, waited_ms, call) = (self.u32()?, self.u64()?, self.cause()?);
                Message::Failure(Error::Deadline { rank, call, waited_ms, missing: self.ranks()? })
            }
            10 => Message::Failure(Error::PeerLost { rank: self.u32()?, why: self.cause()? }),
            11 => Message::Leaving,
            12 => Message::Challenge { nonce: self.array()?, proof: self.array()? },
            13 => Message::Proof(self.array()?),
            14 => Message::Unproven,
            16 => {
                let (rank, pass, other_rank) = (self.u32()?, self.u64()?, self.u32()?);
                Message::Failure(Error::LeftPass { rank, pass, other_rank, theirs: self.cause()? })
            }
            _ => return None,
        };
        self.0.is_empty().then_some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::CollectiveKind;
    use crate::dtype::DType;

    #[test]
    fn every_message_decodes_to_itself_and_never_from_more_or_fewer_bytes() {
        let text = || "bucket 3".to_owned();
        let kind = CollectiveKind::Broadcast;
        let key = CallKey { kind, pass: 9, bucket: Some(3), dtype: DType::F16, bytes: 20, agreement: 7 };
        let mismatch = Entry::Call(key).mismatch(&Entry::Stepper(3), 1, 2);
        assert!(mismatch.to_string().contains("differs in kind"), "{mismatch}");
        let messages = [
            Message::Hello { world_size: 4, rank: 3, job: 7, nonce: Some([5; 32]) },
            Message::Hello { world_size: 4, rank: 3, job: 7, nonce: None },
            Message::Challenge { nonce: [1; 32], proof: [2; 32] },
            Message::Proof([3; 32]),
            Message::Seated,
            Message::OtherJob,
            Message::WorldSize(9),
            Message::Taken,
            Message::Unproven,
            Message::Id(Box::new([4; 128])),
            Message::Entry(Entry::Call(key)),
            Message::Entry(Entry::Stepper(3)),
            Message::Entry(Entry::Communicator(Members { first: 3, count: 2 })),
            Message::Agreed,
            Message::Failure(mismatch),
            Message::Failure(Error::Deadline { rank: 1, call: text(), waited_ms: 5, missing: vec![] }),
            Message::Failure(Error::LeftPass { rank: 1, pass: 7, other_rank: 2, theirs: text() }),
            Message::Failure(Error::PeerLost { rank: 1, why: text() }),
            Message::Leaving,
        ];
        for message in messages {
            let frame = message.encode();
            assert_eq!(Message::decode(&frame), Some(message.clone()));
            assert_eq!(Message::decode(&[&frame[..], &[0]].concat()), None, "{message:?}");
            for end in 0..frame.len() {
                // A hello is as long as it is with or without a nonce.
                let shorter = Message::decode(&frame[..end]);
                assert!(shorter.is_none() || matches!(shorter, Some(Message::Hello { nonce: None, .. })));
            }
        }
    }

    #[test]
    fn a_failure_names_a_bounded_number_of_ranks() {
        let failure = |missing| {
            Message::Failure(Error::Deadline { rank: 0, call: String::new(), waited_ms: 0, missing })
        };
        let mut frame = failure((0..1000).collect()).encode();
        assert_eq!(Message::decode(&frame), Some(failure((0..256).collect())));
        frame.extend([0; 4]);
        assert_eq!(Message::decode(&frame), None);
    }
}
