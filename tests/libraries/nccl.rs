//! Calls into NCCL continue in the background until they are done, fail or time out. A close does not hang.
//!
//! The communicator has one rank, and is made by an id or adopted.

use std::ptr;
use std::time::Duration;

use instep::collective::{Call, CallKey, CollectiveKind};
use instep::cuda::{Nccl, nccl};
use instep::dtype::DType;
use instep::{Collective, Error, Result, StreamHandle};

use crate::{alone, compile};

/// Runs a test's body in a process whose NCCL is compiled with these definitions.
fn with_nccl(defines: &[&str], body: impl FnOnce()) {
    let libraries = |folder: &std::path::Path| {
        let driver = compile("cuda.c", &["ELAPSED_V2"], folder);
        vec![("INSTEP_CUDA", driver), ("INSTEP_NCCL", compile("nccl.c", defines, folder))]
    };
    alone(libraries, body);
}

fn connect() -> Nccl {
    Nccl::with_id(&nccl::Options::default(), nccl::unique_id().unwrap()).unwrap()
}

fn sum(comm: &dyn Collective, deadline: Duration) -> Result<()> {
    let (kind, none) = (CollectiveKind::AllReduce, ptr::null_mut());
    let key = CallKey { kind, pass: 0, bucket: Some(0), dtype: DType::F32, bytes: 0, agreement: 0 };
    // SAFETY: no bytes.
    let mut call = unsafe { Call::new(key, 1, none, none, deadline, Some(StreamHandle(0x10))) };
    comm.enqueue(&mut call)
}

/// Returns a communicator of a framework; this NCCL never reads it.
fn adopt() -> Nccl {
    let communicator = ptr::without_provenance_mut(0x10);
    // SAFETY: nobody follows the address.
    unsafe { Nccl::adopt(communicator, AMPLE) }.unwrap()
}

const AMPLE: Duration = Duration::from_secs(60);

#[test]
fn a_sum_in_progress_is_waited_for_however_many_looks_it_takes() {
    with_nccl(&["LOOKS=300"], || {
        let comm = connect();
        for _ in 0..3 {
            sum(&comm, AMPLE).unwrap();
        }
        comm.check().unwrap();
        comm.close().unwrap();
    });
}

#[test]
fn a_sum_that_fails_in_the_background_is_an_error_with_its_code() {
    with_nccl(&["OUTCOME=6"], || {
        let error = sum(&connect(), AMPLE).unwrap_err();
        let text = "rank 0: ncclAllReduce failed with 6, a remote process exited";
        assert_eq!(error.to_string(), text);
    });
}

#[test]
fn a_sum_that_never_ends_is_late_at_its_deadline() {
    with_nccl(&["LOOKS=1000000000000"], || {
        let error = sum(&connect(), Duration::from_millis(5)).unwrap_err();
        let text = "rank 0: ncclAllReduce failed with 7, still in progress after 5 ms";
        assert_eq!(error.to_string(), text);
    });
}

/// The driver has only the older function that tells captures.
#[test]
fn an_old_nccl_sums_on_two_communicators_which_events_order() {
    with_nccl(&["VERSION=22506"], || {
        let comm = connect();
        let further = comm.duplicate().unwrap();
        for _ in 0..2 {
            sum(&comm, AMPLE).unwrap();
            sum(&*further, AMPLE).unwrap();
        }
        assert!(comm.warnings().iter().any(|line| line.starts_with("NCCL before 2.26: ")));
        drop(further);
        comm.close().unwrap();
    });
}

#[test]
fn a_close_is_refused_while_a_captured_pass_holds_the_communicator_and_changes_nothing() {
    with_nccl(&[], || {
        let comm = connect();
        let holds = [comm.hold().unwrap(), comm.hold().unwrap()];
        for (left, hold) in holds.into_iter().enumerate().rev() {
            let refused = comm.close().unwrap_err();
            let expected = format!(
                "communicator: captured passes that hold its collectives: {}; drop them, then close it",
                left + 1
            );
            assert!(matches!(refused, Error::Order(_)));
            assert_eq!(refused.to_string(), expected);
            sum(&comm, AMPLE).unwrap();
            drop(hold);
        }
        comm.close().unwrap();
        assert!(matches!(comm.close(), Err(Error::Order(why)) if why.wrong == "closed already"));
        assert!(sum(&comm, AMPLE).is_err());
    });
}

#[test]
fn an_adopted_communicator_sums_and_is_left_to_its_framework() {
    with_nccl(&[], || {
        // A sum fails once the communicator has been finalized.
        for ends in [|comm: Nccl| comm.close().unwrap(), |comm: Nccl| drop(comm)] {
            let comm = adopt();
            assert_eq!((comm.rank(), comm.world_size()), (0, 1));
            sum(&comm, AMPLE).unwrap();
            ends(comm);
        }
        let comm = adopt();
        comm.abort(&Error::order("test", "the trainer gave up", ""));
        assert!(sum(&comm, AMPLE).is_err());
        sum(&adopt(), AMPLE).unwrap();
        // SAFETY: it is refused.
        let refused = unsafe { Nccl::adopt(ptr::null_mut(), AMPLE) };
        assert!(matches!(refused, Err(Error::Config { field: "communicator", .. })));
    });
}
