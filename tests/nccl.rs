//! NCCL without a GPU: the library is found, and wrong options are refused by name.
//!
//! If feature `cuda` is on and `INSTEP_NCCL` names a library, its version and ids are real. With
//! `INSTEP_REQUIRE_NCCL=1` a missing library is a failure, not a skip. This is a separate binary, so that CI builds it
//! with `cuda` in seconds. Tests that need a GPU are in `tests/cuda/gpu/nccl.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::time::Duration;

use instep::cuda::{Nccl, nccl};
use instep::{Collective, Error, Solo, in_process};

/// The version of the wheel that `scripts/cuda-toolchain.sh --nccl` installs.
const PINNED: u32 = 23203;

fn required() -> bool {
    std::env::var("INSTEP_REQUIRE_NCCL").as_deref() == Ok("1")
}

#[test]
fn the_library_reports_its_version_and_makes_ids_or_its_absence_is_a_typed_error() {
    match nccl::version() {
        Ok(version) => {
            assert!(!required() || version == PINNED, "{version}");
            let [a, b] = [nccl::unique_id().unwrap(), nccl::unique_id().unwrap()];
            assert_ne!(a, b);
            assert_ne!(a, [0; 128]);
        }
        Err(Error::NcclUnavailable { why }) => {
            assert!(!required(), "{why}");
            eprintln!("SKIPPED: no NCCL here, so no version and no id: {why}");
            assert_eq!(cfg!(feature = "cuda"), !why.contains("--features cuda"), "{why}");
            assert_eq!(nccl::unique_id(), Err(Error::NcclUnavailable { why }));
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn wrong_options_are_refused_before_the_library_is_loaded() {
    let field = |options: nccl::Options| match Nccl::from_file(&options, "id") {
        Err(Error::Config { field, .. }) => field,
        other => panic!("{options:?}: {other:?}"),
    };
    let options = nccl::Options { job: "a test".to_owned(), ..Default::default() };
    assert_eq!(field(nccl::Options { world_size: 0, ..options.clone() }), "WORLD_SIZE");
    assert_eq!(field(nccl::Options { rank: 1, ..options.clone() }), "RANK");
    assert_eq!(field(nccl::Options { job: String::new(), ..options.clone() }), "job");
    assert_eq!(field(nccl::Options { ledger: true, ..options.clone() }), "INSTEP_LEDGER");
    assert_eq!(field(nccl::Options { deadline: Duration::ZERO, ..options.clone() }), "INSTEP_DEADLINE_MS");
    assert!(!std::path::Path::new("id").exists());
    let zero = nccl::Options { deadline: Duration::ZERO, ..options };
    let beside = Nccl::beside(Solo::default(), &zero);
    assert!(matches!(beside, Err(Error::Config { field: "INSTEP_DEADLINE_MS", .. })));
}

/// On a machine with a GPU and NCCL the call makes a group of one rank.
#[test]
fn a_machine_that_lacks_a_library_fails_before_another_rank_waits_for_it() {
    match Nccl::beside(Solo::default(), &nccl::Options::default()) {
        Ok(alone) => alone.close().unwrap(),
        Err(Error::NcclUnavailable { why }) => assert!(!required(), "{why}"),
        Err(Error::DriverUnavailable { why }) => {
            assert!(why.contains("cuda") || why.contains("cuInit"), "{why}")
        }
        Err(other) => panic!("{other}"),
    }
    // Rank 1 fails without looking for rank 0's file, so the deadline does not matter.
    let deadline = Duration::from_secs(3600);
    let job = "a test".to_owned();
    let second = nccl::Options { rank: 1, world_size: 2, device: 4096, job, deadline, ..Default::default() };
    match Nccl::from_file(&second, "id") {
        Err(Error::NcclUnavailable { .. } | Error::DriverUnavailable { .. }) => {}
        Err(Error::Unsupported(refusal)) => assert_eq!(refusal.thing, "cuda:4096"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_rank_that_cannot_join_beside_a_host_ends_it_for_the_others() {
    let options = nccl::Options { device: 4096, ..Default::default() };
    let outcome = in_process(2, |comm| match comm.rank() {
        0 => Nccl::beside(comm, &options).map(drop),
        _ => loop {
            comm.check()?;
            std::thread::yield_now();
        },
    });
    match outcome {
        Err(Error::NcclUnavailable { .. } | Error::DriverUnavailable { .. } | Error::Unsupported(_)) => {}
        other => panic!("{other:?}"),
    }
}
