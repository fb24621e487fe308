//! Local parameters and empty ones, beside shards, groups and offload: the bits of ranks without them, and no race.
//!
//! Gradients are those of `zero.rs`, so every sum over ranks is exact.

use std::num::NonZeroU32;
use std::time::Duration;

use instep::{
    AdamW, Clip, Divisor, Lamb, Layout, LayoutBuilder, Mode, Result, Stepper, StepperBuilder, Strategy,
    Unused, in_process,
};

use crate::ranks::zero::{WAYS, bucket_of, gradient, offloading};
use crate::support::{MODES, Outcome, paint};

/// Name, length, and whether it is local.
type Param = (&'static str, usize, bool);

const MIXED: &[Param] = &[
    ("a", 700, false),
    ("own_empty", 0, true),
    ("own", 700, true),
    ("empty", 0, false),
    ("c", 776, false),
    ("own_first", 1, true),
    ("d", 300, false),
];

fn layout(params: &[Param]) -> Layout {
    let add = |layout: LayoutBuilder, (name, len, is_own): &Param| {
        let layout = layout.param(*name, *len);
        if *is_own { layout.local() } else { layout }
    };
    params.iter().fold(Layout::builder(), add).build().unwrap()
}

#[derive(Clone, Copy, Debug, Default)]
struct Course {
    names_unused: bool,
    freezes: bool,
    abandons: bool,
    joins: bool,
    accumulates: bool,
}

fn train(mut stepper: Stepper, course: Course) -> Result<Outcome> {
    let layout = stepper.layout().clone();
    let ids: Vec<_> = layout.ids().collect();
    let len = |param: usize| layout.parameter(ids[param]).unwrap().len as usize;
    let (rank, last) = (stepper.rank() as usize, ids.len() - 1);
    for (param, id) in ids.iter().enumerate() {
        stepper.write(*id, &(0..len(param)).map(|k| paint(param, k)).collect::<Vec<_>>())?;
    }
    for step in 0..6 {
        if course.freezes && step > 0 {
            stepper.set_frozen(ids[2 % ids.len()], step % 2 == 1)?;
            stepper.set_frozen(ids[last], step % 3 == 1)?;
        }
        if course.joins && step >= 3 && rank % 2 == 1 {
            assert!(stepper.join()?);
            continue;
        }
        for id in &ids {
            let bucket = bucket_of(&stepper, *id)?;
            stepper.unshard(bucket)?;
            stepper.view::<f32>(*id)?;
            if step % 2 == 0 {
                stepper.reshard(bucket)?;
            }
        }
        let micro_batches = if course.accumulates { 2 } else { 1 };
        let mut pass = stepper.begin_accumulating(NonZeroU32::new(micro_batches).unwrap())?;
        for micro_batch in 0..micro_batches {
            let is_last = micro_batch + 1 == micro_batches;
            if course.names_unused && is_last && step % 2 == 1 {
                pass.set_unused(&[ids[0], ids[2 % ids.len()]])?;
            }
            for (place, (param, id)) in ids.iter().enumerate().rev().enumerate() {
                let is_unused = step % 2 == 1 && (param == 0 || param == 2);
                if pass.is_frozen(*id)? || course.names_unused && is_unused && is_last {
                    continue;
                }
                let bucket = bucket_of(&pass, *id)?;
                // Refused where the bucket has launched.
                let _ = pass.unshard(bucket);
                let values: Vec<f32> = (0..len(param))
                    .map(|k| gradient(step + 7 * micro_batch as usize, rank, param, k))
                    .collect();
                pass.grads().add(*id, &values)?;
                pass.grad_ready(*id)?;
                if course.abandons && step == 2 && place == 3 && is_last {
                    break;
                }
            }
            if !is_last {
                pass.next_micro_batch()?;
            }
        }
        if course.abandons && step == 2 {
            pass.abandon()?;
            continue;
        }
        pass.finish()?;
    }
    if course.joins {
        assert!(!stepper.join()?);
    }
    let outcome = Outcome::of(&stepper)?;
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), [], "{course:?}");
    stepper.close()?;
    Ok(outcome)
}

/// The number of ranks, and the number of ranks that shard tensors.
const SIZES: [(u32, u32); 5] = [(1, 1), (2, 2), (2, 1), (4, 2), (3, 3)];

fn assert_same(
    params: &[Param],
    course: Course,
    what: &str,
    builder: impl Fn(&Layout) -> StepperBuilder<'_> + Sync,
) {
    let layout = layout(params);
    for (ranks, shard_size) in SIZES {
        let run = |(strategy, offloads)| {
            let one = |comm| {
                let builder = offloading(builder(&layout).record(true).strategy(strategy), offloads);
                let builder = match strategy {
                    Strategy::Replicated => builder,
                    _ => builder.shard_size(NonZeroU32::new(shard_size).unwrap()),
                };
                train(builder.deadline(Duration::from_secs(20)).host(comm)?, course)
            };
            let what = format!("{what}, {strategy:?}, offload {offloads}, {ranks} by {shard_size}");
            in_process(ranks, one).unwrap_or_else(|error| panic!("{what}, {course:?}: {error}"))
        };
        let plain = run((Strategy::Replicated, false));
        for way in WAYS.into_iter().filter(|way| !course.joins || way.0 != Strategy::Fsdp) {
            for (rank, (plain, outcome)) in plain.iter().zip(run(way)).enumerate() {
                let what = format!("{what}, {way:?}, rank {rank} of {ranks} by {shard_size}, {course:?}");
                outcome.assert_same(plain, &what);
                assert_eq!(
                    (outcome.status.norm, outcome.status.clip),
                    (plain.status.norm, plain.status.clip),
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn local_and_empty_parameters_beside_shards_have_the_bits_of_plain_ranks() {
    for mode in MODES {
        for cap in [1, 20_000] {
            for course in [
                Course { freezes: true, ..Course::default() },
                Course { names_unused: true, ..Course::default() },
                Course { abandons: true, accumulates: true, ..Course::default() },
                Course { joins: true, freezes: true, ..Course::default() },
            ] {
                let what = format!("{mode:?}, cap {cap}");
                assert_same(MIXED, course, &what, |layout| {
                    let builder = if course.freezes || course.abandons {
                        Stepper::builder(layout, AdamW::default())
                    } else {
                        Stepper::builder(layout, Lamb::default())
                    };
                    let builder = builder.mode(mode).bucket_cap_bytes(cap);
                    let builder = if mode == Mode::Eager { builder } else { builder.clip(Clip::Global(0.5)) };
                    if course.joins {
                        builder.uneven_inputs(Divisor::ContributingRanks)
                    } else if course.names_unused {
                        builder.unused(Unused::StepZero)
                    } else {
                        builder
                    }
                });
            }
        }
    }
}

#[test]
fn layouts_of_nothing_but_empty_or_local_parameters_train() {
    let layouts: [&[Param]; 4] = [
        &[("a", 0, false), ("b", 0, false)],
        &[("own", 5, true), ("own_empty", 0, true)],
        &[("a", 0, false), ("own", 5, true)],
        &[("own_empty", 0, true)],
    ];
    for params in layouts {
        for mode in MODES {
            assert_same(params, Course::default(), &format!("{params:?}, {mode:?}"), |layout| {
                Stepper::builder(layout, Lamb::default()).mode(mode).bucket_cap_bytes(1)
            });
        }
    }
}
