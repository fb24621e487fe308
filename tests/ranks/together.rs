//! Ranks write checkpoints together. The file has the bytes of one that rank 0 writes, and it is complete or absent,
//! whichever rank fails.
//!
//! Ranks are threads here, so another folder represents another file system, and `/dev/full` represents a full disk.

use std::fs;
use std::num::NonZeroU32;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use instep::checkpoint::{self, Extras, Scalar};
use instep::collective::{Call, CollectiveKind};
use instep::{
    Adam, AdamW, Collective, DType, Error, InProcess, Layout, Master, Moments, NAdam, OffloadPolicy,
    Precision, Result, Solo, Stepper, StepperBuilder, Strategy, Unused, in_process,
};

use crate::ranks::zero::{LENS, gradient, layout};
use crate::ranks::zero_failures::{Ending, Failing};
use crate::support::{self, Outcome};

const LOW: Precision = Precision {
    param: DType::BF16,
    grad: DType::BF16,
    master: Master::F32,
    moments: Moments::EightBit,
    ..Precision::F32
};

/// A strategy, the number of ranks, and the number of ranks that shard tensors.
const SHARINGS: [(Strategy, u32, u32); 4] =
    [(Strategy::Zero, 3, 3), (Strategy::Fsdp, 3, 3), (Strategy::Zero, 4, 2), (Strategy::Fsdp, 4, 2)];

fn passes(stepper: &mut Stepper, steps: usize) -> Result<()> {
    let (layout, rank) = (stepper.layout().clone(), stepper.rank() as usize);
    for step in 0..steps {
        let mut pass = stepper.begin()?;
        for (param, id) in layout.ids().enumerate().rev() {
            let len = layout.parameter(id)?.len as usize;
            let values: Vec<f32> = (0..len).map(|k| gradient(step, rank, param, k)).collect();
            pass.write(id.grad(), &values)?;
        }
        pass.finish()?;
    }
    Ok(())
}

fn extras() -> Extras {
    let scalars = [("epoch".to_owned(), Scalar::U64(12)), ("loss".to_owned(), Scalar::F64(0.5))].into();
    Extras { scalars, metadata: [("run".to_owned(), "a".to_owned())].into() }
}

/// Saves both ways, and asserts that the files are the same, that nothing else remains, and that the stepper is
/// unchanged. Returns the file.
fn assert_same_file(
    (strategy, ranks, shard_size): (Strategy, u32, u32),
    steps: usize,
    what: &str,
    builder: impl Fn() -> StepperBuilder<'static> + Sync,
) -> Vec<u8> {
    let what = format!("{what}, {strategy:?}, {ranks} ranks, groups of {shard_size}");
    let folder = tempfile::tempdir().unwrap();
    let [alone, together] = ["alone", "together"].map(|name| folder.path().join(name));
    in_process(ranks, |comm| {
        let builder = builder().strategy(strategy).shard_size(NonZeroU32::new(shard_size).unwrap());
        let mut stepper = builder.unused(Unused::StepZero).record(true).host(comm)?;
        passes(&mut stepper, steps)?;
        checkpoint::save_with(&stepper, &extras(), &alone)?;
        let before = Outcome::of(&stepper)?;
        // What other ranks bring of their own does not matter.
        let own = if stepper.rank() == 0 { extras() } else { Extras::default() };
        checkpoint::save_together_with(&stepper, &own, &together)?;
        assert!(together.exists(), "{what}: no rank returns before the file is there");
        let after = Outcome::of(&stepper)?;
        after.assert_same(&before, &what);
        assert_eq!(after.grads, before.grads, "{what}");
        passes(&mut stepper, 1)?;
        let recording = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recording), [], "{what}");
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{what}: {error}"));
    let file = fs::read(&together).unwrap();
    assert!(file == fs::read(&alone).unwrap(), "{what}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "{what}: no partial file is left");
    file
}

#[test]
fn ranks_that_write_together_write_the_file_that_rank_0_would() {
    let strategies = [Strategy::Zero, Strategy::Fsdp];
    let sharings = strategies.into_iter().flat_map(|strategy| {
        [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (6, 3), (4, 1)].map(|(ranks, size)| (strategy, ranks, size))
    });
    for (k, sharing) in sharings.enumerate() {
        let precision = [
            Precision::F32,
            LOW,
            Precision { param: DType::BF16, master: Master::Remainder16, ..Precision::F32 },
            Precision { param: DType::BF16, moments: Moments::BF16, ..Precision::F32 },
        ];
        for precision in [precision[k % 4], precision[(k + 1) % 4]] {
            assert_same_file(sharing, 2, &format!("{precision:?}"), || {
                let builder = Stepper::builder(layout(), AdamW::default()).precision(precision);
                builder.ema(0.9).bucket_cap_bytes(20_000)
            });
        }
    }
}

#[test]
fn scalars_and_reports_that_are_longer_than_a_message_arrive() {
    // As many tensors for as few gradients as there can be: a report takes several exchanges.
    static LAYOUT: std::sync::LazyLock<Layout> = std::sync::LazyLock::new(|| support::layout(&[1; 60]));
    let precision = Precision { param: DType::BF16, grad: DType::BF16, ..Precision::F32 };
    for strategy in [Strategy::Zero, Strategy::Fsdp] {
        assert_same_file((strategy, 8, 8), 1, "many", || {
            let adam = Adam { amsgrad: true, ..Adam::default() };
            Stepper::builder(&LAYOUT, adam).precision(precision).ema(0.5)
        });
        assert_same_file((strategy, 2, 2), 3, "nadam", || Stepper::builder(layout(), NAdam::default()));
    }
}

#[test]
fn ranks_that_share_nothing_out_save_as_ever_and_states_in_the_hosts_memory_are_written_too() {
    assert_same_file((Strategy::Zero, 1, 1), 1, "one", || Stepper::builder(layout(), AdamW::default()));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    in_process(2, |comm| {
        let stepper = Stepper::host(layout(), AdamW::default(), comm)?;
        checkpoint::save_together_with(&stepper, &extras(), &path)
    })
    .unwrap();
    let mut stepper = Stepper::host(layout(), AdamW::default(), Solo::default()).unwrap();
    assert_eq!(checkpoint::load(&mut stepper, &path).unwrap(), extras());
    for strategy in [Strategy::Zero, Strategy::Fsdp] {
        assert_same_file((strategy, 3, 3), 2, "offloaded", || {
            Stepper::builder(layout(), AdamW::default()).precision(LOW).offload(OffloadPolicy::default())
        });
    }
}

/// The checkpoint has rank 0's parameters, which the next pass would give to all ranks.
#[test]
fn parameters_that_only_rank_0_has_yet_are_those_that_are_saved() {
    let file =
        assert_same_file((Strategy::Zero, 3, 3), 0, "zeros", || Stepper::builder(layout(), AdamW::default()));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    in_process(3, |comm| {
        let mut stepper = Stepper::builder(layout(), AdamW::default()).strategy(Strategy::Zero).host(comm)?;
        if stepper.rank() > 0 {
            stepper.fill_params(|_, values| values.fill(7.0))?;
        }
        checkpoint::save_together_with(&stepper, &extras(), &path)
    })
    .unwrap();
    assert!(fs::read(&path).unwrap() == file);
}

#[test]
fn a_file_written_together_goes_into_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let builder = |strategy| {
        Stepper::builder(layout(), AdamW::default()).ema(0.9).strategy(strategy).bucket_cap_bytes(20_000)
    };
    fs::write(&path, b"old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o440)).unwrap();
    let saved = in_process(4, |comm| {
        let mut stepper = builder(Strategy::Fsdp).host(comm)?;
        passes(&mut stepper, 2)?;
        checkpoint::save_together_with(&stepper, &extras(), &path)?;
        Outcome::of(&stepper)
    })
    .unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o440, "as the file had that it replaced");
    for (strategy, ranks) in [(Strategy::Zero, 3), (Strategy::Fsdp, 2), (Strategy::Replicated, 1)] {
        let loaded = in_process(ranks, |comm| {
            let mut stepper = builder(strategy).host(comm)?;
            assert_eq!(checkpoint::load(&mut stepper, &path)?, extras());
            Outcome::of(&stepper)
        });
        for outcome in loaded.unwrap() {
            (0..LENS.len())
                .for_each(|k| outcome.assert_same_param(k, &saved[0], k, &format!("{strategy:?}")));
        }
    }
}

/// Asserts that the folder has only one file, with this content.
fn assert_only(path: &Path, content: &[u8], what: &str) {
    assert_eq!(fs::read(path).unwrap(), content, "{what}");
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "{what}: no partial file is left");
}

#[test]
fn what_one_rank_cannot_do_is_an_error_on_all_and_the_old_file_stays() {
    let [here, there] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    for (strategy, ranks, shard_size) in SHARINGS {
        let what = format!("{strategy:?}, {ranks}, {shard_size}");
        let paths = [here.path().join("a"), there.path().join("a")];
        paths.iter().for_each(|path| fs::write(path, b"old").unwrap());
        let ends = in_process(ranks, |comm| {
            let rank = comm.rank();
            let builder = Stepper::builder(layout(), AdamW::default()).strategy(strategy);
            let mut stepper = builder.shard_size(NonZeroU32::new(shard_size).unwrap()).host(comm)?;
            let together = |extras: &Extras, path: &Path| {
                checkpoint::save_together_with(&stepper, extras, path).unwrap_err().to_string()
            };
            // Rank 1 is on another file system.
            let elsewhere = together(&extras(), &paths[usize::from(rank == 1)]);
            // Rank 0 cannot create the file.
            let no_folder = together(&extras(), &here.path().join("missing/a"));
            let scalars = [("param.x".to_owned(), Scalar::U64(1))].into();
            let reserved = together(&Extras { scalars, ..Extras::default() }, &paths[0]);
            passes(&mut stepper, 1)?;
            Ok((elsewhere, no_folder, reserved))
        });
        for (rank, (elsewhere, no_folder, reserved)) in ends.unwrap().into_iter().enumerate() {
            assert!(elsewhere.contains("rank 0 writes it, and it is not here"), "{rank}: {elsewhere}");
            assert_eq!(elsewhere.contains("rank 1: "), rank != 1, "{what}: {elsewhere}");
            assert!(no_folder.contains("missing"), "{what}: {no_folder}");
            assert!(reserved.contains("param.x"), "{what}: {reserved}");
        }
        paths.iter().for_each(|path| assert_only(path, b"old", &what));
    }
}

/// After the first message of rank 0, rank 1's file is on a full disk.
struct FullDisk<'f> {
    inner: InProcess,
    folder: &'f Path,
}

impl Collective for FullDisk<'static> {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn supports(&self, kind: CollectiveKind) -> bool {
        self.inner.supports(kind)
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        self.inner.duplicate()
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        self.inner.enqueue(call)?;
        if self.inner.rank() == 1 && call.kind == CollectiveKind::Broadcast {
            let mut files = fs::read_dir(self.folder).unwrap().map(|entry| entry.unwrap().path());
            if let Some(partial) = files.find(|path| path.to_string_lossy().ends_with(".instep-partial")) {
                fs::remove_file(&partial).unwrap();
                std::os::unix::fs::symlink("/dev/full", &partial).unwrap();
            }
        }
        Ok(())
    }

    fn abort(&self, cause: &Error) {
        self.inner.abort(cause);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_disk_that_is_full_for_one_rank_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap().keep();
    let path = folder.join("a");
    fs::write(&path, b"old").unwrap();
    let leaked: &'static Path = Box::leak(folder.clone().into_boxed_path());
    let ends = in_process(2, |inner| {
        let comm = FullDisk { inner, folder: leaked };
        let builder = Stepper::builder(layout(), AdamW::default()).strategy(Strategy::Fsdp);
        let mut stepper = builder.host(comm)?;
        let refused = checkpoint::save_together_with(&stepper, &extras(), &path).unwrap_err();
        passes(&mut stepper, 1)?;
        Ok(refused)
    })
    .unwrap();
    assert!(matches!(&ends[0], Error::Checkpoint(refusal) if refusal.thing == "rank 1"), "{}", ends[0]);
    assert!(matches!(ends[1], Error::File { kind: std::io::ErrorKind::StorageFull, .. }), "{}", ends[1]);
    assert_only(&path, b"old", "a full disk");
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_rank_that_is_lost_in_any_call_of_a_save_leaves_a_whole_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let save = |(strategy, ranks, shard_size): (Strategy, u32, u32), at, ending| {
        let begun = AtomicUsize::new(0);
        let made = AtomicUsize::new(0);
        let ends = in_process(ranks, |comm| {
            let comm = Failing::new(comm, at, ending);
            let (rank, calls) = (comm.rank(), Arc::clone(&comm.calls));
            let builder = Stepper::builder(layout(), AdamW::default()).strategy(strategy);
            let mut stepper = builder.shard_size(NonZeroU32::new(shard_size).unwrap()).host(comm)?;
            // Rank 1 may fail before another rank has seen the end of what comes before the save.
            let before = passes(&mut stepper, 1).and_then(|()| {
                // Both together wait for all calls of the pass.
                stepper.status()?;
                stepper.gather(layout().id("p0")?, &mut vec![0.0; LENS[0]])
            });
            if rank == 1 {
                begun.store(calls.load(SeqCst), SeqCst);
            }
            let end = before.and_then(|()| checkpoint::save_together_with(&stepper, &extras(), &path));
            if rank == 1 {
                made.store(calls.load(SeqCst), SeqCst);
            }
            Ok(end)
        });
        (ends.unwrap(), begun.into_inner()..made.into_inner())
    };
    for sharing in SHARINGS {
        let (ends, calls) = save(sharing, usize::MAX, Ending::Errs);
        assert!(ends.iter().all(Result::is_ok) && calls.len() >= 4, "{calls:?}, {ends:?}");
        let new = fs::read(&path).unwrap();
        for at in calls.clone() {
            for ending in [Ending::Errs, Ending::Panics] {
                let what = format!("{sharing:?}, call {at} of {calls:?}, {ending:?}");
                fs::write(&path, b"old").unwrap();
                let (ends, _) = save(sharing, at, ending);
                assert!(ends[1].is_err(), "{what}");
                let is_last = at + 1 == calls.end;
                assert!(is_last || ends.iter().all(Result::is_err), "{what}: {ends:?}");
                // In the last call, rank 0 says that the file is there. It may have heard of rank 1's end before.
                let is_new = is_last && fs::read(&path).unwrap() != b"old";
                assert_only(&path, if is_new { &new } else { b"old" }, &what);
            }
        }
    }
}
