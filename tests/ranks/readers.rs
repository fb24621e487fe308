//! Every way to read a tensor gives the same value, wherever its bytes are: in a shard or full, on the device or on the
//! host.
//!
//! Values follow only from a formula. Gradients and learning rate are dyadic, so every value is exact in f32.

use std::io::Cursor;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use instep::checkpoint::{self, Export};
use instep::{
    DType, Error, Layout, Master, Moments, OffloadPolicy, ParamId, Precision, Result, Sgd, Solo, Stepper,
    Strategy, bf16, in_process,
};

/// Shards begin inside parameters, at a quantum and before the first element; one parameter is local.
const LENS: [usize; 5] = [1024, 17, 700, 1, 300];
const LOCAL: usize = 4;

const PRECISIONS: [Precision; 7] = [
    Precision::F32,
    Precision { moments: Moments::BF16, ..Precision::F32 },
    Precision { param: DType::BF16, ..Precision::F32 },
    Precision { param: DType::BF16, grad: DType::BF16, master: Master::F32, ..Precision::F32 },
    Precision { param: DType::BF16, master: Master::F32, moments: Moments::EightBit, ..Precision::F32 },
    Precision { param: DType::BF16, master: Master::Remainder16, ..Precision::F32 },
    Precision { param: DType::BF16, master: Master::Remainder8, ..Precision::F32 },
];

/// The calls before the readers: passes, then optionally a write that no pass has broadcast yet.
#[derive(Clone, Copy, Debug)]
struct Course {
    passes: usize,
    writes_last: bool,
}

const COURSES: [Course; 3] = [
    Course { passes: 0, writes_last: true },
    Course { passes: 3, writes_last: false },
    Course { passes: 3, writes_last: true },
];

/// The buckets that are unsharded when the readers run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Unsharded {
    None,
    First,
    All,
}

/// A row of the table: where a tensor's bytes may be.
#[derive(Clone, Copy, Debug)]
struct Row {
    strategy: Strategy,
    offloads: bool,
    precision: Precision,
    course: Course,
    unsharded: Unsharded,
}

fn rows() -> impl Iterator<Item = Row> {
    let strategies = [Strategy::Replicated, Strategy::Zero, Strategy::Fsdp];
    strategies.into_iter().flat_map(|strategy| {
        let unsharded = [Unsharded::None, Unsharded::First, Unsharded::All];
        let unsharded =
            unsharded.into_iter().filter(move |u| strategy == Strategy::Fsdp || *u == Unsharded::None);
        unsharded.flat_map(move |unsharded| {
            [false, true].into_iter().flat_map(move |offloads| {
                PRECISIONS.into_iter().flat_map(move |precision| {
                    COURSES.map(|course| Row { strategy, offloads, precision, course, unsharded })
                })
            })
        })
    })
}

/// Returns multiples of 1/8 from -4 to 4, exact in bf16, and different for neighbours.
fn start(param: usize, element: usize) -> f32 {
    ((element * 7 + param * 13) % 65) as f32 / 8.0 - 4.0
}

/// Returns a gradient; if all tensors are f32, it is a value that bf16 cannot hold.
fn gradient(precision: Precision) -> f32 {
    let is_full = precision.param == DType::F32 || precision.master != Master::None;
    if is_full && precision.moments != Moments::BF16 && precision.grad == DType::F32 {
        0.25 + 1.0 / 1024.0
    } else {
        0.25
    }
}

/// Returns the parameter's value: SGD with momentum 0.5 and lr 1 moves by g, 1.5 g and 1.75 g.
fn expected(row: Row, param: usize, element: usize) -> f32 {
    let moved = if row.course.writes_last { 0.0 } else { [0.0, 1.0, 2.5, 4.25][row.course.passes] };
    let written = if row.course.writes_last { 1.0 } else { 0.0 };
    start(param, element) + written - moved * gradient(row.precision)
}

/// Returns the momentum, which a write of the parameter does not change.
fn momentum(row: Row) -> f32 {
    [0.0, 1.0, 1.5, 1.75][row.course.passes] * gradient(row.precision)
}

fn layout() -> Layout {
    let named = |builder: instep::LayoutBuilder, (k, len): (usize, &usize)| {
        let builder = builder.param(format!("p{k}"), *len);
        if k == LOCAL { builder.local() } else { builder }
    };
    LENS.iter().enumerate().fold(Layout::builder(), named).build().unwrap()
}

fn write_all(stepper: &mut Stepper, plus: f32) -> Result<()> {
    for (param, id) in stepper.layout().clone().ids().enumerate() {
        let values: Vec<f32> = (0..LENS[param]).map(|k| start(param, k) + plus).collect();
        stepper.write(id, &values)?;
    }
    Ok(())
}

fn pass(stepper: &mut Stepper, gradient: f32) -> Result<()> {
    let layout = stepper.layout().clone();
    let mut pass = stepper.begin()?;
    for (param, id) in layout.ids().enumerate().rev() {
        pass.write(id.grad(), &vec![gradient; LENS[param]])?;
    }
    pass.finish()
}

fn open(layout: &Layout, row: Row, comm: instep::InProcess) -> Result<Stepper> {
    let sgd = Sgd { lr: 1.0, momentum: 0.5, ..Sgd::default() };
    let mut builder = Stepper::builder(layout, sgd).strategy(row.strategy).precision(row.precision);
    if row.offloads {
        builder = builder.offload(OffloadPolicy::default());
    }
    let mut stepper =
        builder.bucket_cap_bytes(2048).deadline(Duration::from_secs(60)).record(true).host(comm)?;
    write_all(&mut stepper, 0.0)?;
    for _ in 0..row.course.passes {
        pass(&mut stepper, gradient(row.precision))?;
    }
    if row.course.writes_last {
        write_all(&mut stepper, 1.0)?;
    }
    Ok(stepper)
}

/// Compares f32 values with the formula, parameter by parameter.
fn assert_params(
    row: Row,
    reader: &str,
    mut read: impl FnMut(ParamId, &mut [f32]) -> Result<()>,
    layout: &Layout,
) {
    for (param, id) in layout.ids().enumerate() {
        let mut got = vec![f32::NAN; LENS[param]];
        read(id, &mut got).unwrap_or_else(|error| panic!("{reader}, {row:?}: {error}"));
        let wrong = got.iter().enumerate().find(|(k, got)| **got != expected(row, param, *k));
        if let Some((k, got)) = wrong {
            panic!("{reader}, p{param}[{k}] is {got} and not {}, {row:?}", expected(row, param, k));
        }
    }
}

/// Compares a checkpoint's parameters and states, through a stepper that keeps all tensors in f32.
fn assert_checkpoint(row: Row, reader: &str, bytes: Vec<u8>, layout: &Layout) {
    let sgd = Sgd { lr: 1.0, momentum: 0.5, ..Sgd::default() };
    let mut plain = Stepper::builder(layout, sgd).host(Solo::default()).unwrap();
    checkpoint::read(&mut plain, Cursor::new(bytes))
        .unwrap_or_else(|error| panic!("{reader}, {row:?}: {error}"));
    assert_params(row, reader, |id, into| plain.read(id, into), layout);
    assert_moments(row, reader, |id, into| plain.read(id.state("momentum_buffer"), into), layout);
}

fn assert_moments(
    row: Row,
    reader: &str,
    mut read: impl FnMut(ParamId, &mut [f32]) -> Result<()>,
    layout: &Layout,
) {
    // A block of equal values is coded exactly.
    let wanted = momentum(row);
    for (param, id) in layout.ids().enumerate() {
        let mut got = vec![f32::NAN; LENS[param]];
        read(id, &mut got).unwrap_or_else(|error| panic!("{reader}, {row:?}: {error}"));
        assert!(got.iter().all(|got| *got == wanted), "{reader}, momentum of p{param}: {got:?}, {row:?}");
    }
}

/// Compares the values of a file of parameters only.
fn assert_export(row: Row, reader: &str, path: &Path, layout: &Layout, is_rounded: bool) {
    let mut plain = Stepper::builder(layout, Sgd::default()).host(Solo::default()).unwrap();
    checkpoint::import_params(&mut plain, std::fs::File::open(path).unwrap()).unwrap();
    if !is_rounded {
        return assert_params(row, reader, |id, into| plain.read(id, into), layout);
    }
    for (param, id) in layout.ids().enumerate() {
        let mut got = vec![f32::NAN; LENS[param]];
        plain.read(id, &mut got).unwrap();
        for (k, got) in got.iter().enumerate() {
            let rounded = bf16::from_f32(expected(row, param, k)).to_f32();
            assert_eq!(*got, rounded, "{reader}, p{param}[{k}], {row:?}");
        }
    }
}

/// Runs every reader on one row. Returns the number of readers.
fn check(row: Row) -> usize {
    let layout = layout();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let counts = in_process(2, |comm| {
        let mut stepper = open(&layout, row, comm)?;
        let (mut readers, is_first) = (0, stepper.rank() == 0);
        let buckets = stepper.plan().buckets().len() as u32;
        match row.unsharded {
            Unsharded::None => {}
            Unsharded::First => stepper.unshard(0)?,
            Unsharded::All => (0..buckets).try_for_each(|bucket| stepper.unshard(bucket))?,
        }
        let is_f32 = row.precision.param == DType::F32;
        let is_whole = row.strategy != Strategy::Fsdp || row.unsharded == Unsharded::All;
        let is_sharded = row.strategy != Strategy::Replicated;
        if is_whole {
            match row.precision.master {
                // A master is shared out where states are.
                Master::F32 | Master::Remainder16 | Master::Remainder8 if is_sharded => {
                    let outcome = stepper.read(layout.id("p0")?, &mut [0.0; 1024]);
                    assert!(matches!(outcome, Err(Error::Sharded { .. })), "{outcome:?}, {row:?}");
                }
                _ => assert_params(row, "read", |id, into| stepper.read(id, into), &layout),
            }
            let view = |id: ParamId, into: &mut [f32]| {
                if is_f32 {
                    into.copy_from_slice(stepper.view::<f32>(id)?);
                } else {
                    let stored = stepper.view::<bf16>(id)?;
                    into.iter_mut().zip(stored).for_each(|(to, from)| *to = from.to_f32());
                }
                Ok(())
            };
            if is_f32 || row.precision.master == Master::None {
                assert_params(row, "view", view, &layout);
            } else {
                for (param, id) in layout.ids().enumerate() {
                    let mut got = vec![f32::NAN; LENS[param]];
                    view(id, &mut got)?;
                    let near = |(k, got): (usize, &f32)| (got - expected(row, param, k)).abs() <= 1.0 / 32.0;
                    assert!(got.iter().enumerate().all(near), "view, p{param}, {row:?}");
                }
            }
            readers += 2;
        }
        assert_params(row, "gather", |id, into| stepper.gather(id, into), &layout);
        assert_moments(row, "gather", |id, into| stepper.gather(id.state("momentum_buffer"), into), &layout);
        checkpoint::save(&stepper, path("save"))?;
        checkpoint::save_together(&stepper, path("save_together"))?;
        let mut written = Vec::new();
        checkpoint::write(&stepper, &mut written)?;
        checkpoint::export(&stepper, Export { f32: true, averages: false }, path("export_f32"))?;
        checkpoint::export(&stepper, Export::default(), path("export"))?;
        if is_first {
            for name in ["save", "save_together"] {
                assert_checkpoint(row, name, std::fs::read(path(name)).unwrap(), &layout);
            }
            assert_checkpoint(row, "write", written, &layout);
            assert_export(row, "export in f32", &path("export_f32"), &layout, false);
            // A remainder's parameter is the upper half of the value's bits, a master's is rounded.
            let is_remainder = matches!(row.precision.master, Master::Remainder16 | Master::Remainder8);
            if !is_remainder {
                assert_export(row, "export", &path("export"), &layout, !is_f32);
            }
        }
        let recording = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recording), [], "{row:?}");
        Ok(readers + 8)
    });
    counts.unwrap_or_else(|error| panic!("{row:?}: {error}"))[0]
}

#[test]
fn every_reader_finds_a_tensor_wherever_its_bytes_are() {
    let (mut count, mut readers) = (0, 0);
    for row in rows() {
        readers += check(row);
        count += 1;
    }
    println!("{count} rows, {readers} readings of all tensors");
    assert_eq!(count, 5 * 2 * PRECISIONS.len() * COURSES.len());
}

/// A rank is lost in the fourth pass: the other rank can still read the values after three passes.
#[test]
fn survivors_read_what_the_last_whole_pass_left_wherever_it_is() {
    let layout = layout();
    for row in rows().filter(|row| row.unsharded == Unsharded::None && row.course.passes > 0) {
        let row = Row { course: Course { writes_last: false, ..row.course }, ..row };
        let _ = in_process(2, |comm| {
            let mut stepper = open(&layout, row, comm)?;
            stepper.status()?;
            if stepper.rank() == 1 {
                return Err(Error::Hook("the power is out".into()));
            }
            let outcome =
                pass(&mut stepper, gradient(row.precision)).and_then(|()| stepper.status().map(drop));
            assert!(outcome.is_err(), "{row:?}");
            stepper.rescue()?;
            let own = layout.id(&format!("p{LOCAL}"))?;
            for (param, id) in layout.ids().enumerate() {
                let mut got = vec![f32::NAN; LENS[param]];
                let outcome = stepper.read(id, &mut got);
                let has_master = row.precision.master != Master::None;
                let is_lost = match row.strategy {
                    Strategy::Replicated => false,
                    Strategy::Zero => has_master,
                    Strategy::Fsdp => true,
                };
                if is_lost && id != own {
                    assert!(outcome.is_err(), "p{param}, {row:?}");
                    continue;
                }
                outcome.unwrap_or_else(|error| panic!("p{param}, {row:?}: {error}"));
                // The local one has no other rank to wait for, so it may have had its fourth step.
                let fourth = |k| expected(row, param, k) - 1.875 * gradient(row.precision);
                for (k, got) in got.iter().enumerate() {
                    let is_right = *got == expected(row, param, k) || id == own && *got == fourth(k);
                    assert!(is_right, "p{param}[{k}] is {got} and not {}, {row:?}", expected(row, param, k));
                }
            }
            Ok::<(), Error>(())
        });
    }
}

/// In groups of ranks too, every reader sees values that were written before the first pass.
#[test]
fn groups_of_ranks_write_together_what_the_host_keeps() {
    let layout = layout();
    let row = Row {
        strategy: Strategy::Fsdp,
        offloads: true,
        precision: PRECISIONS[5],
        course: COURSES[1],
        unsharded: Unsharded::None,
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("together");
    in_process(4, |comm| {
        let sgd = Sgd { lr: 1.0, momentum: 0.5, ..Sgd::default() };
        let builder = Stepper::builder(&layout, sgd).strategy(row.strategy).precision(row.precision);
        let builder = builder.offload(OffloadPolicy::default()).bucket_cap_bytes(2048);
        let mut stepper = builder.shard_size(NonZeroU32::new(2).unwrap()).host(comm)?;
        write_all(&mut stepper, 0.0)?;
        (0..3).try_for_each(|_| pass(&mut stepper, gradient(row.precision)))?;
        checkpoint::save_together(&stepper, &path)
    })
    .unwrap();
    assert_checkpoint(row, "save_together", std::fs::read(&path).unwrap(), &layout);
}
