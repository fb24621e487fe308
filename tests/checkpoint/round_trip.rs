//! One stepper saves a checkpoint, and another with other buckets, mode or ranks loads it and trains on.
//!
//! Each result has the bits of the uninterrupted run. The tests use files or bytes only.

use std::fs;
use std::io::Cursor;
use std::path::Path;
use std::time::{Duration, SystemTime};

use instep::checkpoint::{self, Extras, Scalar};
use instep::{AdamW, Error, InProcess, Layout, Mode, Result, Solo, Stepper, in_process};
use safetensors::{Dtype, SafeTensors};

use crate::support::{self, MODES, Optim, Options, Outcome, few_optimizers, layout, painted};

const LENGTHS: [usize; 5] = [300, 0, 17, 2049, 40];

/// A parameter that is never used, so its count stays zero.
const UNUSED: usize = 2;

/// A parameter that is frozen after the first pass, so its count stays one.
const FROZEN: usize = 4;

fn options(mode: Mode, cap: u64) -> Options {
    Options { mode, cap: Some(cap), ..Options::default() }
}

/// Makes the passes `from..to`, with parameters whose counts differ.
fn train(stepper: &mut Stepper, options: &Options, from: usize, to: usize) {
    let frozen = stepper.layout().id("p4").unwrap();
    let gradient = painted(options);
    // Each rank has gradients of its own.
    let rank = stepper.rank() as usize;
    for step in from..to {
        stepper.set_frozen(frozen, step > 0).unwrap();
        support::pass(stepper, options, |param, values| {
            let used = param != UNUSED && (param != FROZEN || step == 0);
            used && gradient(step + 100 * rank, param, values)
        })
        .unwrap();
    }
}

pub(crate) fn bytes_of(stepper: &Stepper, extras: &Extras) -> Vec<u8> {
    let mut bytes = Vec::new();
    checkpoint::write_with(stepper, extras, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_checkpoint_goes_on_in_any_buckets_and_mode_with_the_bits_of_the_uninterrupted_run() {
    let layout = layout(&LENGTHS);
    for optim in few_optimizers() {
        let written = options(Mode::Eager, 1500);
        let mut whole = support::open(&layout, optim, &written);
        train(&mut whole, &written, 0, 3);
        let (bytes, halfway) = (bytes_of(&whole, &Extras::default()), Outcome::of(&whole).unwrap());
        assert_eq!(halfway.step_counts, [3, 0, 0, 3, 1], "the counts differ, but for what is empty");
        train(&mut whole, &written, 3, 6);
        let end = Outcome::of(&whole).unwrap();
        for (mode, cap) in MODES.into_iter().zip([1, 1 << 20, 5000]) {
            let what = format!("{optim:?} {mode:?} {cap}");
            let options = options(mode, cap);
            let mut stepper = options.stepper(&layout, optim, Solo::default()).unwrap();
            checkpoint::read(&mut stepper, Cursor::new(&bytes)).unwrap();
            Outcome::of(&stepper).unwrap().assert_same(&halfway, &what);
            assert_eq!(bytes_of(&stepper, &Extras::default()), bytes, "{what}: saved again");
            train(&mut stepper, &options, 3, 6);
            Outcome::of(&stepper).unwrap().assert_same(&end, &what);
        }
    }
}

/// Runs one rank: it loads a checkpoint if there is one, trains, and saves if it is asked to.
fn rank(
    comm: InProcess,
    (layout, optim): (&Layout, Optim),
    options: &Options,
    load: Option<&Path>,
    steps: [usize; 2],
    save_after: Option<(usize, &Path)>,
) -> Result<Outcome> {
    let mut stepper = options.stepper(layout, optim, comm)?;
    match load {
        Some(path) => assert_eq!(checkpoint::load(&mut stepper, path).unwrap(), Extras::default()),
        None => support::paint_params(&mut stepper),
    }
    let [mut from, to] = steps;
    if let Some((step, path)) = save_after {
        train(&mut stepper, options, from, step);
        from = step;
        checkpoint::save(&stepper, path).unwrap();
    }
    train(&mut stepper, options, from, to);
    Outcome::of(&stepper)
}

#[test]
fn two_ranks_go_on_with_the_bits_of_two_that_were_not_interrupted() {
    let (layout, folder) = (layout(&LENGTHS), tempfile::tempdir().unwrap());
    let path = &folder.path().join("last.safetensors");
    for optim in few_optimizers() {
        let subject = (&layout, optim);
        let written = options(Mode::Eager, 1500);
        let whole =
            in_process(2, |comm| rank(comm, subject, &written, None, [0, 6], Some((3, path)))).unwrap();
        for (mode, cap) in [(Mode::Sequential, 1 << 20), (Mode::Normed, 1)] {
            let options = options(mode, cap);
            let resumed =
                in_process(2, |comm| rank(comm, subject, &options, Some(path), [3, 6], None)).unwrap();
            for (whole, resumed) in whole.iter().zip(&resumed) {
                resumed.assert_same(whole, &format!("{optim:?} {mode:?}"));
            }
        }
        let options = options(Mode::Eager, 5000);
        let one = rank_alone(subject, &options, path);
        let three = in_process(3, |comm| rank(comm, subject, &options, Some(path), [3, 3], None)).unwrap();
        three.iter().for_each(|three| three.assert_same(&one, "three ranks and one, loaded"));
        let three = in_process(3, |comm| rank(comm, subject, &options, Some(path), [3, 5], None)).unwrap();
        three.iter().for_each(|rank| rank.assert_same(&three[0], "three ranks, trained on"));
    }
    assert_eq!(names(folder.path()), ["last.safetensors"]);
}

fn rank_alone((layout, optim): (&Layout, Optim), options: &Options, path: &Path) -> Outcome {
    let mut stepper = options.stepper(layout, optim, Solo::default()).unwrap();
    checkpoint::load(&mut stepper, path).unwrap();
    Outcome::of(&stepper).unwrap()
}

#[test]
fn shapes_are_kept_in_the_file_and_any_shape_of_as_many_elements_is_read() {
    let flat = Layout::builder().param("matrix", 6).param("scalar", 1).build().unwrap();
    let shaped = Layout::builder().param("matrix", 6).shape([2, 3]).param("scalar", 1).shape([]);
    let shaped = shaped.build().unwrap();
    assert_eq!(shaped.fingerprint(), flat.fingerprint());
    let save = |layout: &Layout| {
        let mut stepper = Stepper::builder(layout, AdamW::default()).ema(0.5).host(Solo::default()).unwrap();
        let mut pass = stepper.begin().unwrap();
        pass.write(layout.id("matrix").unwrap().grad(), &[1.0, -2.0, 3.0, 4.0, 5.0, -6.0]).unwrap();
        pass.finish().unwrap();
        (bytes_of(&stepper, &Extras::default()), stepper)
    };
    let files = [&flat, &shaped].map(|layout| save(layout).0);
    let shape = |file: usize, key: &str| {
        SafeTensors::deserialize(&files[file]).unwrap().tensor(key).unwrap().shape().to_vec()
    };
    for key in ["param.matrix", "state.matrix.exp_avg", "ema.matrix"] {
        assert_eq!((shape(0, key), shape(1, key)), (vec![6], vec![2, 3]), "{key}");
    }
    assert_eq!((shape(0, "param.scalar"), shape(1, "param.scalar")), (vec![1], vec![]));
    for layout in [&flat, &shaped] {
        let (saved, mut stepper) = save(layout);
        for file in &files {
            checkpoint::read(&mut stepper, Cursor::new(file)).unwrap();
            assert_eq!(bytes_of(&stepper, &Extras::default()), saved);
        }
    }
}

#[test]
fn the_file_is_what_the_safetensors_crate_reads_and_its_tensors_are_aligned() {
    let layout = Layout::builder().param("a.b", 3).param("empty", 0).build().unwrap();
    let mut stepper = support::open(&layout, few_optimizers()[3], &Options::default());
    let state = [1.0, f32::NAN, -0.0];
    stepper.write(layout.id("a.b").unwrap().state("max_exp_avg_sq"), &state).unwrap();
    stepper.set_step_count(layout.id("a.b").unwrap(), (1 << 62) + 1).unwrap();
    let extras = Extras {
        scalars: [
            ("random.seed".to_owned(), Scalar::U64(u64::MAX)),
            ("random.draw".into(), Scalar::F64(0.1)),
        ]
        .into(),
        metadata: [("note".to_owned(), "\"quoted\"\n".to_owned())].into(),
    };
    let bytes = bytes_of(&stepper, &extras);
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut names: Vec<&str> = file.names();
    names.sort_unstable();
    let of = |name: &str| {
        let states = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"];
        states.map(|state| format!("state.{name}.{state}"))
    };
    let mut expected: Vec<String> = ["crc32", "param.a.b", "param.empty"].map(String::from).to_vec();
    expected.extend(["random.draw", "random.seed", "schedule.step"].map(String::from));
    expected.extend(of("a.b").into_iter().chain(of("empty")));
    assert_eq!(names, expected);
    let step = file.tensor("state.a.b.step").unwrap();
    assert_eq!((step.dtype(), step.shape()), (Dtype::U64, &[][..]));
    assert_eq!(step.data(), ((1u64 << 62) + 1).to_le_bytes());
    let kept = file.tensor("state.a.b.max_exp_avg_sq").unwrap();
    assert_eq!(kept.data(), state.map(f32::to_le_bytes).concat());
    for (name, tensor) in file.tensors() {
        let offset = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert_eq!(offset % (tensor.dtype().bitsize() / 8), 0, "{name} lies at {offset}");
    }
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["note"], "\"quoted\"\n");

    assert_eq!(checkpoint::read(&mut stepper, Cursor::new(&bytes)).unwrap(), extras);
}

#[test]
fn names_that_checkpoints_use_themselves_are_refused_and_the_file_stays() {
    let (folder, layout) = (tempfile::tempdir().unwrap(), layout(&[4]));
    let path = folder.path().join("last");
    let stepper = support::open(&layout, few_optimizers()[2], &Options::default());
    checkpoint::save(&stepper, &path).unwrap();
    let before = fs::read(&path).unwrap();
    for name in ["crc32", "param.x", "state.p0.step", "ema.x", "__metadata__"] {
        let extras = Extras { scalars: [(name.to_owned(), Scalar::U64(1))].into(), ..Extras::default() };
        let refused = checkpoint::save_with(&stepper, &extras, &path);
        assert!(matches!(refused, Err(Error::Config { field: "scalars", .. })), "{name}: {refused:?}");
    }
    let extras =
        Extras { metadata: [("instep.checkpoint".to_owned(), "2".to_owned())].into(), ..Extras::default() };
    assert!(matches!(
        checkpoint::save_with(&stepper, &extras, &path),
        Err(Error::Config { field: "metadata", .. })
    ));
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(names(folder.path()), ["last"]);
}

#[test]
fn only_rank_0_writes() {
    let (folder, layout) = (tempfile::tempdir().unwrap(), layout(&[4]));
    let saved = in_process(3, |comm| {
        let rank = instep::Collective::rank(&comm);
        let stepper = Options::default().stepper(&layout, few_optimizers()[0], comm)?;
        checkpoint::save(&stepper, folder.path().join(rank.to_string()))
    });
    saved.unwrap();
    assert_eq!(names(folder.path()), ["0"]);
}

#[test]
fn what_killed_runs_have_left_is_removed_and_what_may_be_alive_is_not() {
    let (folder, layout) = (tempfile::tempdir().unwrap(), layout(&[4]));
    let leave = |name: &str, hours: u64| {
        let file = fs::File::create(folder.path().join(name)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600)).unwrap();
    };
    let (same, other, old) = (
        ".last.0123456789abcdef.instep-partial",
        ".other.0123456789abcdef.instep-partial",
        ".old.0123456789abcdef.instep-partial",
    );
    let foreign = [
        ".last.0123.instep-partial",
        "last.0123456789abcdef.instep-partial",
        ".0123456789abcdef.instep-partial",
        ".last.instep-partial",
    ];
    leave(same, 0);
    leave(other, 23);
    leave(old, 25);
    foreign.iter().for_each(|name| leave(name, 100));
    let stepper = support::open(&layout, few_optimizers()[2], &Options::default());
    checkpoint::save(&stepper, folder.path().join("last")).unwrap();
    let mut expected = [&[other, "last"][..], &foreign].concat();
    expected.sort_unstable();
    assert_eq!(names(folder.path()), expected);
}

#[cfg(unix)]
#[test]
fn a_link_stays_a_link_and_a_file_keeps_its_permissions() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let (folder, layout) = (tempfile::tempdir().unwrap(), layout(&[4]));
    let stepper = support::open(&layout, few_optimizers()[2], &Options::default());
    let (file, link) = (folder.path().join("step-1"), folder.path().join("last"));
    fs::write(&file, b"older").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    symlink("step-1", &link).unwrap();
    checkpoint::save(&stepper, &link).unwrap();
    assert!(link.is_symlink());
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read(&file).unwrap(), bytes_of(&stepper, &Extras::default()));
    assert_eq!(names(folder.path()), ["last", "step-1"]);
}

#[test]
fn a_path_that_cannot_be_replaced_is_refused_by_name() {
    let (folder, layout) = (tempfile::tempdir().unwrap(), layout(&[4]));
    let stepper = support::open(&layout, few_optimizers()[2], &Options::default());
    fs::create_dir(folder.path().join("folder")).unwrap();
    for (path, word) in [
        ("folder", "regular file"),
        ("nowhere/last", "nowhere/last"),
        ("folder/..", "not the name of a file"),
    ] {
        let refused = checkpoint::save(&stepper, folder.path().join(path)).unwrap_err();
        assert!(matches!(refused, Error::Checkpoint { .. } | Error::File { .. }), "{refused:?}");
        assert!(refused.to_string().contains(word), "{refused}");
    }
    assert_eq!(names(folder.path()), ["folder"]);
    let mut stepper = stepper;
    for (path, word) in [("folder", "regular file"), ("nowhere", "nowhere")] {
        let refused = checkpoint::load(&mut stepper, folder.path().join(path)).unwrap_err().to_string();
        assert!(refused.contains(word), "{refused}");
    }
}

pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
