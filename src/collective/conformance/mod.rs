//! A test suite for any [`Collective`] on the host. All ranks run the suite together.
//!
//! The suite uses only the trait, so it works with threads and with processes. Each property is checked in a new group
//! of the ranks, because some checks end their group. Each check runs on a separate thread, so a call that never
//! returns is reported as a failure and does not hang the suite.

mod parts;
mod rank;
mod sums;

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use crate::collective::{CallKey, Collective, CollectiveKind};
use crate::dtype::DType;
use crate::error::{Error, Result};
use rank::{Buffer, IN_PLACE, Rank};

/// A property: its name, the number of ranks that it needs, and its check.
type Property = (&'static str, u32, fn(&Rank) -> Result<(), String>);

/// All properties, in the order in which every rank checks them.
const PROPERTIES: &[Property] = &[
    ("ranks have numbers from 0 on, and all of them are summed", 1, sums::count_ranks),
    ("equal numbers agree", 1, sums::agree),
    ("an all-reduce makes the sum and touches no other memory", 1, sums::add_whole_numbers),
    ("a sum has the same bits on every rank", 1, sums::equal_bits),
    ("NaN and infinity reach the sum", 1, sums::special_values),
    ("a large buffer is summed", 1, sums::large_buffer),
    ("a broadcast carries the bits of rank 0", 1, sums::broadcast_bits),
    ("many calls keep their order", 1, sums::many_calls),
    ("calls that are made together give what each gives alone", 1, sums::calls_together),
    ("a reduce-scatter gives each rank the sum of its part", 1, parts::reduce_scatter),
    ("an all-gather brings every part to all ranks", 1, parts::all_gather),
    ("whole numbers are added, and the largest and smallest found", 1, parts::whole_numbers),
    ("a call of an unknown kind is refused", 1, parts::unknown_kinds),
    ("a second communicator has an order of its own", 2, parts::second_order),
    ("groups of some ranks sum among themselves", 1, parts::groups),
    ("a late rank is waited for", 2, late_rank),
    ("a call of another kind is a mismatch", 2, |rank| {
        differ(rank, |key| CallKey { kind: CollectiveKind::Broadcast, ..key })
    }),
    ("a call of another pass is a mismatch", 2, |rank| {
        differ(rank, |key| CallKey { pass: key.pass + 1, ..key })
    }),
    ("a call for another bucket is a mismatch", 2, |rank| {
        differ(rank, |key| CallKey { bucket: Some(0), ..key })
    }),
    ("a call of another type is a mismatch", 2, other_type),
    ("a call of another length is a mismatch", 2, |rank| {
        differ(rank, |key| CallKey { bytes: key.bytes / 2, ..key })
    }),
    ("a call of another agreement is a mismatch", 2, |rank| {
        differ(rank, |key| CallKey { agreement: !key.agreement, ..key })
    }),
    ("the deadline ends a call that a rank never makes", 2, absent_rank),
    ("an abort ends the other ranks with its cause", 2, abort),
    // All ranks meet once more, so that no rank drops its ends of the groups while another rank still checks an earlier
    // property.
    ("a new group works after others have failed", 1, meet_again),
];

/// The result on one rank, if no property failed on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The rank.
    pub rank: u32,
    /// The names of the properties that hold.
    pub passed: Vec<&'static str>,
    /// The names of the properties that were skipped, because they need more ranks than the group has.
    pub skipped: Vec<&'static str>,
}

/// The properties that failed on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failures {
    /// The rank.
    pub rank: u32,
    /// The name and the failure of each failed property.
    pub failed: Vec<(&'static str, String)>,
}

impl fmt::Display for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "collective of rank {}: {} properties fail", self.rank, self.failed.len())?;
        self.failed.iter().try_for_each(|(property, why)| write!(f, "\n  {property}: {why}"))
    }
}

impl std::error::Error for Failures {}

/// Checks every property of the suite on this rank. Every rank of the group makes this call at about the same time.
///
/// `make` returns this rank's communicator in a new group of the same ranks. On every rank, the suite calls `make` once
/// for each property, in the same order. The suite drops all these communicators at the end. No call of the suite has a
/// deadline longer than `patience`. A property fails if it takes longer than twice `patience`. A `patience` of 20
/// seconds suffices on a busy machine.
///
/// The suite supports up to 256 ranks. The suite tests sums of f32, and sums of every other type for which
/// [`Collective::sums`] is true. The suite tests all-reduce, broadcast, and every other kind of call for which
/// [`Collective::supports`] is true. The collective must reach the host's memory.
///
/// # Errors
/// Returns the properties that fail on this rank. Some failures occur on only one rank, so check every rank's result.
///
/// ```
/// use std::time::Duration;
/// use instep::Solo;
/// use instep::collective::conformance::check;
///
/// let report = check(Duration::from_secs(20), || Ok(Solo::default()))?;
/// assert!(report.skipped.contains(&"a late rank is waited for")); // there is only one rank
/// # Ok::<(), instep::collective::conformance::Failures>(())
/// ```
pub fn check<C: Collective + 'static>(
    patience: Duration,
    mut make: impl FnMut() -> Result<C>,
) -> Result<Report, Failures> {
    let mut report = Report { rank: 0, passed: Vec::new(), skipped: Vec::new() };
    let mut failed = Vec::new();
    // If a rank dropped its end early, other ranks' calls would end because of that, and not because of the condition
    // that is under test.
    let mut groups: Vec<Arc<dyn Collective>> = Vec::new();
    for (name, ranks, property) in PROPERTIES {
        let comm: Arc<dyn Collective> = match make() {
            Ok(comm) => Arc::new(comm),
            Err(error) => {
                failed.push((*name, format!("there is no group for it: {error}")));
                continue;
            }
        };
        groups.push(Arc::clone(&comm));
        report.rank = comm.rank();
        if comm.world_size() < *ranks {
            report.skipped.push(name);
            continue;
        }
        match run(*property, comm, patience) {
            Ok(()) => report.passed.push(name),
            Err(why) => failed.push((name, why)),
        }
    }
    if failed.is_empty() { Ok(report) } else { Err(Failures { rank: report.rank, failed }) }
}

fn run(
    property: fn(&Rank) -> Result<(), String>,
    comm: Arc<dyn Collective>,
    patience: Duration,
) -> Result<(), String> {
    let (done, outcome) = channel();
    let thread = thread::Builder::new().name("instep-conformance".to_owned()).spawn(move || {
        // The receiver no longer exists if this took too long.
        let _ = done.send(property(&Rank::new(comm, patience)));
    });
    if let Err(error) = thread {
        return Err(format!("its thread could not start: {error}"));
    }
    match outcome.recv_timeout(2 * patience) {
        Ok(outcome) => outcome,
        Err(RecvTimeoutError::Timeout) => {
            Err(format!("a call hangs: nothing ended within {:?}", 2 * patience))
        }
        Err(RecvTimeoutError::Disconnected) => Err("a call panicked".to_owned()),
    }
}

const ELEMENTS: usize = 64;

fn late_rank(rank: &Rank) -> Result<(), String> {
    if rank.is_last() {
        thread::sleep(rank.patience / 100);
    }
    meet_again(rank)
}

fn meet_again(rank: &Rank) -> Result<(), String> {
    let summed = rank.sum(DType::F32, &[1.0; ELEMENTS], IN_PLACE)?;
    let all = summed.iter().all(|sum| *sum == rank.ranks as f32);
    if all { Ok(()) } else { Err(format!("the sum of ones is {}", summed[0])) }
}

/// Makes a call in which the last rank uses another element type. The call is a broadcast, because every collective can
/// broadcast every type.
fn other_type(rank: &Rank) -> Result<(), String> {
    let (kind, len) = (CollectiveKind::Broadcast, 4 * ELEMENTS);
    let dtype = if rank.is_last() { DType::F16 } else { DType::F32 };
    expect_mismatch(rank, CallKey { dtype, ..rank.key(kind, DType::F32, len) })
}

/// Makes one all-reduce in which the last rank uses another key.
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

/// Makes an all-reduce of zeros with the same key on all ranks.
fn sum_zeros(rank: &Rank, deadline: Duration) -> Result<()> {
    let key = rank.key(CollectiveKind::AllReduce, DType::F32, 4 * ELEMENTS);
    rank.enqueue(key, &mut Buffer::new(&[0; 4 * ELEMENTS], 0), None, deadline)
}

/// Makes an all-reduce of zeros after a call that failed. This all-reduce must fail too.
fn expect_the_end(rank: &Rank) -> Result<(), String> {
    match sum_zeros(rank, rank.patience / 20) {
        Err(_) => Ok(()),
        Ok(()) => Err("a call after the failure succeeds".to_owned()),
    }
}

fn absent_rank(rank: &Rank) -> Result<(), String> {
    if rank.is_last() {
        return Ok(());
    }
    let (since, deadline) = (Instant::now(), rank.patience / 100);
    let outcome = sum_zeros(rank, deadline);
    if since.elapsed() > rank.patience {
        return Err(format!("the call took {:?}, and its deadline was {deadline:?}", since.elapsed()));
    }
    let last = rank.ranks - 1;
    match outcome {
        Ok(()) => Err(format!("the call succeeds, although rank {last} never made it")),
        Err(error) => match error.cause() {
            Error::Deadline { .. } => Ok(()),
            // The deadline of another rank passed first.
            Error::PeerLost { rank, .. } if *rank != last => Ok(()),
            _ => Err(format!("the call should end with a deadline, and fails otherwise: {error}")),
        },
    }
}

fn abort(rank: &Rank) -> Result<(), String> {
    const CAUSE: &str = "the conformance suite ends this group";
    if rank.is_last() {
        // By now the other ranks are probably inside their call. An abort before the call must end it too.
        thread::sleep(rank.patience / 100);
        rank.comm.abort(&Error::Hook(CAUSE.to_owned()));
        return expect_the_end(rank);
    }
    match sum_zeros(rank, rank.patience) {
        Err(error) if error.to_string().contains(CAUSE) => expect_the_end(rank),
        Err(error) => {
            Err(format!("the call should end with the abort's cause, and fails otherwise: {error}"))
        }
        Ok(()) => Err("the call succeeds, although the last rank aborted instead".to_owned()),
    }
}
