//! A suite that any [`Collective`] on the host can be run against, by all ranks together.
//!
//! It knows only the trait, so it fits threads and processes alike. Each property takes a fresh group, because some end
//! theirs, and runs on a thread of its own, so that a call that never returns is a failure and not a hang.

mod endings;
mod parts;
mod rank;
mod sums;
mod transfers;

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use crate::collective::Collective;
use crate::error::Result;
use rank::Rank;

/// A property: its name, the ranks that it takes, and its check.
type Property = (&'static str, u32, fn(&Rank) -> Result<(), String>);

/// In this order, the same on every rank.
const PROPERTIES: &[Property] = &[
    ("ranks have numbers from 0 on, and all of them are summed", 1, sums::count_ranks),
    ("equal numbers agree", 1, transfers::agree),
    ("an all-reduce makes the sum and touches no other memory", 1, sums::add_whole_numbers),
    ("a sum has the same bits on every rank", 1, sums::equal_bits),
    ("NaN and infinity reach the sum", 1, sums::special_values),
    ("a large buffer is summed", 1, sums::large_buffer),
    ("a broadcast carries the bits of rank 0", 1, transfers::broadcast_bits),
    ("many calls keep their order", 1, transfers::many_calls),
    ("a reduce-scatter gives each rank the sum of its part", 1, parts::reduce_scatter),
    ("an all-gather brings every part to all ranks", 1, parts::all_gather),
    ("whole numbers are added, and the largest and smallest found", 1, parts::whole_numbers),
    ("a call of an unknown kind is refused", 1, parts::unknown_kinds),
    ("a second communicator has an order of its own", 2, parts::second_order),
    ("groups of some ranks sum among themselves", 1, parts::groups),
    ("a late rank is waited for", 2, endings::late_rank),
    ("a call of another kind is a mismatch", 2, endings::other_kind),
    ("a call of another pass is a mismatch", 2, endings::other_pass),
    ("a call for another bucket is a mismatch", 2, endings::other_bucket),
    ("a call of another type is a mismatch", 2, endings::other_type),
    ("a call of another length is a mismatch", 2, endings::other_length),
    ("a call of another agreement is a mismatch", 2, endings::other_agreement),
    ("the deadline ends a call that a rank never makes", 2, endings::absent_rank),
    ("an abort ends the other ranks with its cause", 2, endings::abort),
    // All ranks meet once more, so that none drops its ends while another is inside an earlier property.
    ("a new group works after others have failed", 1, endings::meet_again),
];

/// The results of a collective on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The rank.
    pub rank: u32,
    /// Properties that hold.
    pub passed: Vec<&'static str>,
    /// Properties that take more ranks than there are.
    pub skipped: Vec<&'static str>,
}

/// Properties that do not hold on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failures {
    /// The rank.
    pub rank: u32,
    /// Each property's name, and what went wrong.
    pub failed: Vec<(&'static str, String)>,
}

impl fmt::Display for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "collective of rank {}: {} properties fail", self.rank, self.failed.len())?;
        self.failed.iter().try_for_each(|(property, why)| write!(f, "\n  {property}: {why}"))
    }
}

impl std::error::Error for Failures {}

/// Runs every property of the suite on this rank; every rank of the group calls it at about the same time.
///
/// `make` makes this rank's end of a new group of the same ranks. The suite calls it once for each property, on every
/// rank in the same order, and drops all groups at its end. Calls have `patience` as their longest deadline, and a
/// property has failed if it takes twice as long: 20 seconds are enough on a busy machine.
///
/// The suite takes sums of f32, and of every other type that [`Collective::sums`] claims, up to 256 ranks. Of the kinds of
/// calls it takes all-reduce, broadcast, and those that the collective [knows](Collective::knows). It is for collectives
/// that reach the host's memory.
///
/// # Errors
/// The properties that fail on this rank. Some failures show on one rank only, so look at every rank's result.
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
    // A rank that drops its end early would end calls of others that a property wants to see ended otherwise.
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
        // The receiver is gone if this took too long.
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
