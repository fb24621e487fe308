//! The collective over MPI in four processes: this program starts itself again under `mpirun`.
//!
//! The program needs feature `mpi`, and `mpirun` in PATH. It does not use libtest, because MPI is initialized only once
//! per process.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, unsafe_code)]

use std::env;
use std::fs;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::{Command, exit};
use std::time::{Duration, Instant};

use instep::checkpoint;
use instep::collective::conformance::check;
use instep::collective::{Call, CallKey, CollectiveKind};
use instep::{AdamW, Collective, DType, Error, Layout, Mpi, Solo, Stepper, Strategy};
use mpi::Threading;
use mpi::topology::{Communicator, SimpleCommunicator};

const RANKS: i32 = 4;
/// The environment variable of processes that `mpirun` starts.
const STARTED: &str = "INSTEP_TEST_STARTED_BY_MPIRUN";
/// The environment variable with a folder that all processes reach.
const FOLDER: &str = "INSTEP_TEST_FOLDER";

fn main() {
    if env::var_os(STARTED).is_some() {
        return run_rank();
    }
    let folder = tempfile::tempdir().unwrap();
    // Open MPI refuses root, and more processes than cores, unless it is told; other libraries ignore these variables.
    let allowed =
        ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"];
    let started = Command::new("mpirun")
        .args(["-n", &RANKS.to_string()])
        .arg(env::current_exe().unwrap())
        .envs(allowed.map(|name| (name, "1")))
        .env(STARTED, "1")
        .env(FOLDER, folder.path())
        .status()
        .expect("mpirun is in PATH");
    assert!(started.success(), "mpirun: {started}");
    println!("test result: ok. 1 passed; the collective conforms in {RANKS} processes");
}

fn run_rank() {
    let uninitialized = Mpi::new(&SimpleCommunicator::world());
    assert!(matches!(uninitialized, Err(Error::Order(_))), "{uninitialized:?}");
    let (universe, _) = mpi::initialize_with_threading(Threading::Serialized).unwrap();
    let world = universe.world();
    assert_eq!(world.size(), RANKS);
    let report = check(Duration::from_secs(30), || Mpi::new(&world)).unwrap_or_else(|failures| {
        eprintln!("{failures}");
        exit(1)
    });
    assert_eq!((report.rank as i32, report.skipped), (world.rank(), vec![]));

    let kind = CollectiveKind::AllReduce;
    let key = CallKey { kind, pass: 0, bucket: None, dtype: DType::F32, bytes: 4, agreement: 0 };
    let mut value = [1.0f32];
    for shard_size in [2, 4] {
        save_together(Mpi::new(&world).unwrap(), shard_size);
    }
    end_another_group(&Mpi::new(&world).unwrap(), key);
    let comm = Mpi::new(&world).unwrap();
    drop((world, universe));
    let bytes = bytemuck::cast_slice_mut(&mut value);
    let finalized =
        comm.enqueue(&mut Call::on_host(&Solo::default(), key, None, bytes, Duration::from_secs(1)).unwrap());
    assert!(matches!(finalized, Err(Error::Order(_))), "{finalized:?}");
    comm.abort(&Error::Hook("after the end".to_owned()));
}

/// Processes write one file together. It must equal the file that rank 0 writes by itself.
fn save_together(comm: Mpi, shard_size: u32) {
    let folder = PathBuf::from(env::var_os(FOLDER).unwrap());
    let [alone, together] = ["alone", "together"].map(|name| folder.join(format!("{name}-{shard_size}")));
    let layout = Layout::builder().param("a", 5000).param("b", 17).build().unwrap();
    let builder = Stepper::builder(&layout, AdamW::default()).strategy(Strategy::Fsdp);
    let mut stepper = builder.shard_size(NonZeroU32::new(shard_size).unwrap()).host(comm).unwrap();
    let mut pass = stepper.begin().unwrap();
    for id in layout.ids() {
        pass.grads().get_mut(id).unwrap().fill(0.5);
    }
    pass.finish().unwrap();
    checkpoint::save(&stepper, &alone).unwrap();
    checkpoint::save_together(&stepper, &together).unwrap();
    // Every rank returns after the renaming.
    let written = fs::read(&together).unwrap();
    // Rank 0 has written this one before it began the other.
    assert!(written == fs::read(&alone).unwrap());
    checkpoint::load(&mut stepper, &together).unwrap();
    stepper.close().unwrap();
}

/// Rank 1 ends its group. Rank 2, whose neighbour never comes, gets the error long before its deadline.
fn end_another_group(comm: &Mpi, key: CallKey) {
    let first = comm.rank() / 2 * 2;
    let group = comm.subgroup(&[first, first + 1]).unwrap();
    if comm.rank() == 1 {
        group.abort(&Error::Hook("made up".to_owned()));
    } else if comm.rank().is_multiple_of(2) {
        let mut value = [1.0f32];
        let bytes = bytemuck::cast_slice_mut(&mut value);
        let since = Instant::now();
        let patience = Duration::from_secs(60);
        let ended = group.enqueue(&mut Call::on_host(&*group, key, None, bytes, patience).unwrap());
        assert!(matches!(ended, Err(Error::PeerLost { rank: 1, .. })), "{ended:?}");
        assert!(since.elapsed() < patience / 2);
    }
}
