//! NCCL as far as a machine without a GPU can go: what is refused, by what name, and that the library is found.
//!
//! With feature `cuda` and `INSTEP_NCCL` naming a library, its version and its ids are real. Must not skip silently:
//! with `INSTEP_REQUIRE_NCCL=1` a library that is not found is a failure. What needs a GPU is in `tests/cuda/gpu/nccl.rs`.

use std::time::Duration;

use instep::Error;
use instep::cuda::{Nccl, nccl};

/// The wheel that `scripts/cuda-toolchain.sh --nccl` installs.
const PINNED: u32 = 23203;

fn required() -> bool {
    std::env::var("INSTEP_REQUIRE_NCCL").as_deref() == Ok("1")
}

#[test]
fn a_library_that_is_there_says_its_version_and_makes_ids_and_one_that_is_not_is_a_typed_error() {
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
fn options_that_make_no_group_are_refused_before_anything_is_looked_for() {
    let field = |options: nccl::Options| match Nccl::connect(&options) {
        Err(Error::Config { field, .. }) => field,
        other => panic!("{options:?}: {other:?}"),
    };
    let options = nccl::Options::default();
    assert_eq!(field(nccl::Options { world_size: 0, ..options.clone() }), "WORLD_SIZE");
    assert_eq!(field(nccl::Options { rank: 1, ..options.clone() }), "RANK");
    assert_eq!(field(nccl::Options { world_size: 2, master_port: 0, ..options.clone() }), "MASTER_PORT");
    assert_eq!(field(nccl::Options { deadline: Duration::ZERO, ..options }), "INSTEP_DEADLINE_MS");
}

/// Where there is a GPU this makes a group of one, which is as good.
#[test]
fn what_this_machine_or_build_lacks_is_named_before_another_rank_waits_for_it() {
    match Nccl::connect(&nccl::Options::default()) {
        Ok(alone) => alone.close().unwrap(),
        Err(Error::NcclUnavailable { why }) => assert!(!required(), "{why}"),
        Err(Error::DriverUnavailable { why }) => {
            assert!(why.contains("cuda") || why.contains("cuInit"), "{why}")
        }
        Err(other) => panic!("{other}"),
    }
    // No deadline passes: rank 1 does not even look for rank 0.
    let hour = Duration::from_secs(3600);
    let second = nccl::Options { rank: 1, world_size: 2, device: 4096, deadline: hour, ..Default::default() };
    match Nccl::connect(&second) {
        Err(Error::NcclUnavailable { .. } | Error::DriverUnavailable { .. }) => {}
        Err(Error::Unsupported { what, .. }) => assert_eq!(what, "cuda:4096"),
        other => panic!("{other:?}"),
    }
}
