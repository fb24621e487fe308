//! Before ranks make a stepper or a communicator together, each rank sends all ranks a record that describes what the
//! rank is about to make.
//!
//! Every rank checks the same records in the same order, so all return the same error. This file does not communicate.

use std::fmt;

use crate::cuda::nccl::UniqueId;
use crate::error::{Error, Result};
use crate::op::difference;

/// The thing that a rank is about to make.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Entry {
    /// A stepper, or a pass after a write of parameters, with a number that is computed from the values that the ranks
    /// compare at this point.
    Stepper(u64),
    /// A further communicator of `count` ranks, as one of these ranks describes it. Communicators that are made at the
    /// same point have no rank in common. Rank `first` of the group becomes rank 0 of this communicator, and makes the
    /// communicator's id.
    Communicator { first: u32, count: u32 },
}

/// What one rank sends: its entry and an id. The first member of a communicator sends the communicator's id, and every
/// other rank sends zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Record {
    pub(super) entry: Entry,
    pub(super) id: UniqueId,
}

impl Record {
    const BYTES: usize = 144;

    pub(super) fn encode(&self) -> [u8; Record::BYTES] {
        let (kind, number) = match self.entry {
            Entry::Stepper(number) => (0u64, number),
            Entry::Communicator { first, count } => (1, u64::from(first) << 32 | u64::from(count)),
        };
        let mut bytes = [0; Record::BYTES];
        bytes[..8].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&number.to_le_bytes());
        bytes[16..].copy_from_slice(&self.id);
        bytes
    }

    fn decode(bytes: &[u8; Record::BYTES]) -> Option<Record> {
        let (kind, rest) = bytes.split_first_chunk()?;
        let (number, id) = rest.split_first_chunk()?;
        let number = u64::from_le_bytes(*number);
        let entry = match u64::from_le_bytes(*kind) {
            0 => Entry::Stepper(number),
            1 => Entry::Communicator { first: (number >> 32) as u32, count: number as u32 },
            _ => return None,
        };
        Some(Record { entry, id: id.try_into().ok()? })
    }

    /// Reads and checks the records of all ranks, in the order of the ranks.
    ///
    /// # Errors
    /// `Mismatch` if ranks make different steppers, if one makes a stepper and another a communicator, or if a
    /// communicator would lack a rank. Without this error, NCCL would wait for the missing rank until the deadline.
    /// `PeerLost` if a rank has sent an invalid record.
    pub(super) fn read_all(bytes: &[u8]) -> Result<Vec<Record>> {
        let (records, _) = bytes.as_chunks::<{ Record::BYTES }>();
        let decode =
            |(rank, bytes)| Record::decode(bytes).ok_or_else(|| Error::other_version(rank, "record"));
        let records = (0..).zip(records).map(decode).collect::<Result<Vec<_>>>()?;
        let entries: Vec<Entry> = records.iter().map(|record| record.entry).collect();
        for (rank, theirs) in (0..).zip(&entries) {
            if !entries[0].goes_with(theirs) {
                return Err(entries[0].mismatch(theirs, 0, rank));
            }
        }
        refuse_partial(&entries)?;
        Ok(records)
    }
}

/// Refuses a communicator unless exactly `count` ranks describe it in the same way.
fn refuse_partial(entries: &[Entry]) -> Result<()> {
    for (rank, ours) in (0u32..).zip(entries) {
        let Entry::Communicator { first, count } = *ours else { continue };
        if entries.iter().filter(|theirs| *theirs == ours).count() == count as usize {
            continue;
        }
        let names_first =
            |theirs: &Entry| matches!(theirs, Entry::Communicator { first: named, .. } if *named == first);
        let others = || (0u32..).zip(entries).filter(|(other, _)| *other != rank);
        let overlapping = others().find(|(_, theirs)| names_first(theirs) && *theirs != ours);
        let other = overlapping.or_else(|| others().find(|(other, _)| *other == first));
        let (other, theirs) = other.or_else(|| others().next()).unwrap_or((rank, ours));
        return Err(ours.mismatch(theirs, rank, other));
    }
    Ok(())
}

impl Entry {
    /// Returns whether ranks with these entries may proceed together. Ranks may make different communicators, because
    /// they may be in different groups.
    fn goes_with(&self, theirs: &Entry) -> bool {
        self == theirs || matches!((self, theirs), (Entry::Communicator { .. }, Entry::Communicator { .. }))
    }

    fn mismatch(&self, theirs: &Entry, rank: u32, other_rank: u32) -> Error {
        let differs = match (self, theirs) {
            (Entry::Stepper(ours), Entry::Stepper(theirs)) => {
                difference(*ours, *theirs).unwrap_or_default().to_owned()
            }
            (Entry::Communicator { .. }, Entry::Communicator { .. }) => "members".to_owned(),
            _ => "kind".to_owned(),
        };
        Error::Mismatch { rank, ours: self.to_string(), other_rank, theirs: theirs.to_string(), differs }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Entry::Stepper(number) => write!(f, "a stepper of agreement {number:016x}"),
            Entry::Communicator { first, count } => {
                write!(f, "a further communicator of {count} ranks, in which rank {first} is number 0")
            }
        }
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/cuda/nccl/entry.rs"]
mod tests;
