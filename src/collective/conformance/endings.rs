//! Ends of a group: ranks that differ, that stay away, that abort. Every rank must get an error, and no call may hang.
//!
//! The last rank is the one that misbehaves. Its communicator stays alive until the whole suite has ended, so no other
//! rank can mistake its leaving for the end that a property asks for.

use std::thread;
use std::time::Instant;

use crate::collective::conformance::rank::Buffer;
use crate::collective::conformance::rank::{IN_PLACE, Rank};
use crate::collective::{CallKey, CollectiveKind};
use crate::dtype::DType;
use crate::error::{Error, Result};

const ELEMENTS: usize = 64;

pub(super) fn late_rank(rank: &Rank) -> Result<(), String> {
    if rank.is_last() {
        thread::sleep(rank.patience / 100);
    }
    meet_again(rank)
}

pub(super) fn meet_again(rank: &Rank) -> Result<(), String> {
    let summed = rank.sum(DType::F32, &[1.0; ELEMENTS], IN_PLACE)?;
    let all = summed.iter().all(|sum| *sum == rank.ranks as f32);
    if all { Ok(()) } else { Err(format!("the sum of ones is {}", summed[0])) }
}

pub(super) fn other_kind(rank: &Rank) -> Result<(), String> {
    differ(rank, |key| CallKey { kind: CollectiveKind::Broadcast, ..key })
}

pub(super) fn other_pass(rank: &Rank) -> Result<(), String> {
    differ(rank, |key| CallKey { pass: key.pass + 1, ..key })
}

pub(super) fn other_bucket(rank: &Rank) -> Result<(), String> {
    differ(rank, |key| CallKey { bucket: Some(0), ..key })
}

/// Broadcasts, which know every type.
pub(super) fn other_type(rank: &Rank) -> Result<(), String> {
    let (kind, len) = (CollectiveKind::Broadcast, 4 * ELEMENTS);
    let dtype = if rank.is_last() { DType::F16 } else { DType::F32 };
    expect_mismatch(rank, CallKey { dtype, ..rank.key(kind, DType::F32, len) })
}

pub(super) fn other_length(rank: &Rank) -> Result<(), String> {
    differ(rank, |key| CallKey { bytes: key.bytes / 2, ..key })
}

pub(super) fn other_agreement(rank: &Rank) -> Result<(), String> {
    differ(rank, |key| CallKey { agreement: !key.agreement, ..key })
}

/// One all-reduce, which the last rank calls otherwise.
fn differ(rank: &Rank, otherwise: fn(CallKey) -> CallKey) -> Result<(), String> {
    let key = rank.key(CollectiveKind::AllReduce, DType::F32, 4 * ELEMENTS);
    expect_mismatch(rank, if rank.is_last() { otherwise(key) } else { key })
}

fn expect_mismatch(rank: &Rank, key: CallKey) -> Result<(), String> {
    let mut buffer = Buffer::new(&vec![0; key.bytes as usize], 0);
    match rank.enqueue(key, &mut buffer, None, rank.patience) {
        Err(error) if matches!(error.cause(), Error::Mismatch { .. } | Error::LeftPass { .. }) => {
            expect_the_end(rank)
        }
        Err(error) => Err(format!("the call should be a mismatch, and fails otherwise: {error}")),
        Ok(()) => Err(format!("[{key}] succeeds, although the last rank's call differs")),
    }
}

/// A call on which all ranks agree, after one that failed.
fn expect_the_end(rank: &Rank) -> Result<(), String> {
    let key = rank.key(CollectiveKind::AllReduce, DType::F32, 4 * ELEMENTS);
    let mut buffer = Buffer::new(&[0; 4 * ELEMENTS], 0);
    match rank.enqueue(key, &mut buffer, None, rank.patience / 20) {
        Err(_) => Ok(()),
        Ok(()) => Err("a call after the failure succeeds".to_owned()),
    }
}

pub(super) fn absent_rank(rank: &Rank) -> Result<(), String> {
    if rank.is_last() {
        return Ok(());
    }
    let key = rank.key(CollectiveKind::AllReduce, DType::F32, 4 * ELEMENTS);
    let mut buffer = Buffer::new(&[0; 4 * ELEMENTS], 0);
    let (since, deadline) = (Instant::now(), rank.patience / 100);
    let outcome = rank.enqueue(key, &mut buffer, None, deadline);
    if since.elapsed() > rank.patience {
        return Err(format!("the call took {:?}, and its deadline was {deadline:?}", since.elapsed()));
    }
    let last = rank.ranks - 1;
    match outcome {
        Ok(()) => Err(format!("the call succeeds, although rank {last} never made it")),
        Err(error) => match error.cause() {
            Error::Deadline { .. } => Ok(()),
            // Another rank's deadline passed first.
            Error::PeerLost { rank, .. } if *rank != last => Ok(()),
            _ => Err(format!("the call should end with a deadline, and fails otherwise: {error}")),
        },
    }
}

pub(super) fn abort(rank: &Rank) -> Result<(), String> {
    const CAUSE: &str = "the conformance suite ends this group";
    if rank.is_last() {
        // By now the others are probably inside their call; an abort that comes first must end it, too.
        thread::sleep(rank.patience / 100);
        rank.comm.abort(&Error::Hook(CAUSE.to_owned()));
        return expect_the_end(rank);
    }
    let key = rank.key(CollectiveKind::AllReduce, DType::F32, 4 * ELEMENTS);
    let mut buffer = Buffer::new(&[0; 4 * ELEMENTS], 0);
    match rank.enqueue(key, &mut buffer, None, rank.patience) {
        Err(error) if error.to_string().contains(CAUSE) => expect_the_end(rank),
        Err(error) => {
            Err(format!("the call should end with the abort's cause, and fails otherwise: {error}"))
        }
        Ok(()) => Err("the call succeeds, although the last rank aborted instead".to_owned()),
    }
}
