//! The conformance suite accepts the crate's own collectives, and names the faults of broken ones.
//!
//! Broken collectives are wrappers in `broken.rs`, each with one fault. A fault may break several properties: the tests
//! require the one that must be among them, and all of them if no deadline takes part.

use std::collections::HashMap;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use instep::collective::conformance::{Failures, Report, check};
use instep::overlap::Compressed;
use instep::{Collective, InProcess, Result, Solo, in_process};

use super::broken::{Broken, Fault};

/// The number of properties, so that a missing one is noticed.
const PROPERTIES: usize = 25;
/// Much longer than any call takes.
const PATIENCE: Duration = Duration::from_secs(20);
/// The deadline for collectives that wait until it ends.
const LITTLE_PATIENCE: Duration = Duration::from_secs(1);

/// Runs the suite on as many threads, and returns each rank's result.
fn check_threads<C: Collective + 'static>(
    ranks: u32,
    patience: Duration,
    wrap: impl Fn(InProcess) -> Result<C> + Sync,
) -> Vec<Result<Report, Failures>> {
    // The n-th group of every rank; a thread takes its own end.
    let groups: Mutex<HashMap<usize, Vec<Option<InProcess>>>> = Mutex::default();
    let (groups, wrap) = (&groups, &wrap);
    let run = |rank: u32| {
        let mut made = 0;
        check(patience, || {
            let mut groups = groups.lock().unwrap();
            let group = groups
                .entry(made)
                .or_insert_with(|| in_process(ranks, |comm| Ok(Some(comm))).expect("a group is made"));
            made += 1;
            wrap(group[rank as usize].take().expect("no rank takes an end twice"))
        })
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn assert_passes(results: Vec<Result<Report, Failures>>, skipped: usize) {
    for (rank, result) in results.into_iter().enumerate() {
        let report = result.unwrap_or_else(|failures| panic!("{failures}"));
        assert_eq!(
            (report.rank as usize, report.passed.len(), report.skipped.len()),
            (rank, PROPERTIES - skipped, skipped)
        );
    }
}

/// Returns the properties that fail on any rank.
fn failed(fault: Fault, patience: Duration) -> Vec<&'static str> {
    let results = check_threads(4, patience, |comm| Ok(Broken::new(comm, fault)));
    let mut failed: Vec<&str> = Vec::new();
    for failures in results.into_iter().filter_map(|result| result.err()) {
        println!("{failures}");
        failed.extend(
            failures
                .failed
                .iter()
                .map(|(property, _)| *property)
                .filter(|name| !failed.contains(name))
                .collect::<Vec<_>>(),
        );
    }
    failed
}

#[test]
fn ranks_in_one_process_conform() {
    for ranks in [2, 3, 4] {
        assert_passes(check_threads(ranks, PATIENCE, Ok), 0);
    }
    assert_passes(check_threads(1, PATIENCE, Ok), 10);
}

#[test]
fn one_rank_that_is_fed_sums_conforms() {
    assert_passes(vec![check(PATIENCE, || Ok(Solo::default()))], 10);
}

#[test]
fn compressed_gradients_conform() {
    assert_passes(check_threads(3, PATIENCE, Compressed::bf16), 0);
    assert_passes(check_threads(3, PATIENCE, Compressed::f16), 0);
}

#[test]
fn a_mean_in_place_of_the_sum_is_noticed() {
    let failed = failed(Fault::Mean, PATIENCE);
    assert!(failed.contains(&"an all-reduce makes the sum and touches no other memory"), "{failed:?}");
    assert!(!failed.contains(&"a broadcast carries the bits of rank 0"), "{failed:?}");
}

#[test]
fn an_order_of_summation_that_depends_on_the_rank_is_noticed() {
    assert_eq!(failed(Fault::OwnOrder, PATIENCE), ["a sum has the same bits on every rank"]);
}

#[test]
fn calls_that_are_not_compared_are_noticed() {
    let expected = ["a call of another pass is a mismatch", "a call of another agreement is a mismatch"];
    assert_eq!(failed(Fault::IgnoresPassAndAgreement, PATIENCE), expected);
}

#[test]
fn a_broadcast_that_makes_every_nan_the_same_is_noticed() {
    let expected = ["a broadcast carries the bits of rank 0", "many calls keep their order"];
    assert_eq!(failed(Fault::OneNan, PATIENCE), expected);
}

#[test]
fn a_call_that_returns_before_the_sum_is_there_is_noticed() {
    let failed = failed(Fault::ReturnsEarly, PATIENCE);
    assert!(failed.contains(&"a large buffer is summed"), "{failed:?}");
    assert!(!failed.contains(&"a sum has the same bits on every rank"), "{failed:?}");
}

#[test]
fn wrong_parts_whole_numbers_groups_and_calls_together_are_noticed() {
    let names = [
        (Fault::OwnPart, "a reduce-scatter gives each rank the sum of its part"),
        (Fault::PartsInReverse, "an all-gather brings every part to all ranks"),
        (Fault::NarrowNumbers, "whole numbers are added, and the largest and smallest found"),
        (Fault::TakesUnknown, "a call of an unknown kind is refused"),
        (Fault::GroupOfAll, "groups of some ranks sum among themselves"),
        (Fault::OneOrder, "a second communicator has an order of its own"),
        (Fault::LeavesOutTheLast, "calls that are made together give what each gives alone"),
    ];
    for (fault, name) in names {
        assert_eq!(failed(fault, PATIENCE), [name]);
    }
}

#[test]
fn a_deadline_that_never_passes_is_noticed() {
    let failed = failed(Fault::NoDeadline, LITTLE_PATIENCE);
    assert!(failed.contains(&"the deadline ends a call that a rank never makes"), "{failed:?}");
}

#[test]
fn an_abort_that_is_not_told_is_noticed() {
    let failed = failed(Fault::SilentAbort, LITTLE_PATIENCE);
    assert!(failed.contains(&"an abort ends the other ranks with its cause"), "{failed:?}");
}

#[test]
fn a_write_to_the_source_and_one_past_the_end_are_noticed() {
    for fault in [Fault::WritesToTheSource, Fault::WritesPastTheEnd] {
        let failed = failed(fault, PATIENCE);
        assert!(failed.contains(&"an all-reduce makes the sum and touches no other memory"), "{failed:?}");
    }
}

#[test]
fn a_group_that_cannot_be_made_fails_by_name() {
    let refuse = || Err::<Solo, _>(instep::Error::Hook("no such group".to_owned()));
    let failures = check(PATIENCE, refuse).unwrap_err();
    assert_eq!(failures.failed.len(), PROPERTIES);
    assert!(failures.to_string().contains("no group for it: hook: no such group"), "{failures}");
}
