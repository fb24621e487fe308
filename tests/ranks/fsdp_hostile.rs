//! Ranks shard parameters while the trainer makes mistakes: abandoned passes, frozen buckets, lost ranks, masters in
//! files.
//!
//! The tests assert that no caller reads a part that this rank does not have.

use std::io::Cursor;
use std::num::NonZeroU32;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use instep::checkpoint::{self, Export};
use instep::{
    AdamW, Clip, DType, Error, Gradients, Layout, Master, Mode, ParamId, Precision, Result, Sgd, Stepper,
    StepperBuilder, Strategy, Unused, in_process,
};

use crate::ranks::zero::{bucket_of, offloading};

const LEN: usize = 3000;
const BUCKETS: u32 = 4;

fn layout() -> Layout {
    let add = |layout: instep::LayoutBuilder, k| layout.param(format!("p{k}"), LEN);
    (0..BUCKETS).fold(Layout::builder(), add).build().unwrap()
}

fn builder(layout: &Layout, offloads: bool) -> StepperBuilder<'_> {
    offloading(Stepper::builder(layout, Sgd { lr: 1.0, ..Sgd::default() }), offloads)
        .strategy(Strategy::Fsdp)
        .bucket_cap_bytes(1)
        .deadline(Duration::from_secs(20))
        .record(true)
}

/// Returns each mode, in place and on the host.
fn modes() -> impl Iterator<Item = (Mode, bool)> {
    let modes = [Mode::Sequential, Mode::Eager, Mode::Normed].into_iter();
    modes.flat_map(|mode| [(mode, false), (mode, true)])
}

fn fill(stepper: &mut Stepper) -> Result<()> {
    let ids: Vec<ParamId> = stepper.layout().ids().collect();
    ids.into_iter().enumerate().try_for_each(|(k, id)| stepper.write(id, &[k as f32 + 1.0; LEN]))
}

fn assert_no_race(stepper: &mut Stepper) {
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), []);
}

/// Backward goes through the frozen buckets after it has begun to hand over, as in a training of adapters only.
#[test]
fn a_frozen_bucket_is_unsharded_at_any_moment_of_a_pass() {
    let layout = layout();
    for (mode, offloads) in modes() {
        in_process(2, |comm| {
            let mut stepper = builder(&layout, offloads).mode(mode).host(comm)?;
            fill(&mut stepper)?;
            let ids: Vec<ParamId> = layout.ids().collect();
            for frozen in [0, 1, 3] {
                stepper.set_frozen(ids[frozen], true)?;
            }
            for step in 0..3 {
                let mut pass = stepper.begin()?;
                for (k, id) in ids.iter().enumerate().rev() {
                    let bucket = bucket_of(&pass, *id)?;
                    pass.unshard(bucket)?;
                    let expected = if k == 2 { 3.0 - step as f32 } else { k as f32 + 1.0 };
                    assert!(pass.view::<f32>(*id)?.iter().all(|x| *x == expected), "{mode:?} p{k}");
                    if k == 2 {
                        pass.grads().write(*id, &[1.0; LEN])?;
                        pass.grad_ready(*id)?;
                    } else {
                        pass.reshard(bucket)?;
                    }
                }
                pass.finish()?;
            }
            assert_no_race(&mut stepper);
            stepper.close()
        })
        .unwrap();
    }
}

/// One rank launches a bucket at its hand-over, the other one at the end of the pass.
#[test]
fn ranks_that_launch_at_different_moments_unshard_in_their_own_order() {
    let layout = layout();
    let [by_bucket, by_all] = [Clip::PerBucket(0.5), Clip::Global(0.5)];
    let each = [(Mode::Eager, by_bucket), (Mode::Normed, by_bucket), (Mode::Normed, by_all)].into_iter();
    let each = each.flat_map(|(mode, clip)| [(mode, clip, false), (mode, clip, true)]);
    for (mode, clip, offloads) in each {
        in_process(2, |comm| {
            let is_odd = comm.rank() == 1;
            let mut stepper =
                builder(&layout, offloads).unused(Unused::StepZero).mode(mode).clip(clip).host(comm)?;
            fill(&mut stepper)?;
            for _ in 0..3 {
                let mut pass = stepper.begin()?;
                for (k, id) in layout.ids().enumerate().rev() {
                    let bucket = bucket_of(&pass, id)?;
                    pass.unshard(bucket)?;
                    pass.view::<f32>(id)?;
                    if !(is_odd && k == 3) {
                        pass.grads().write(id, &[1.0; LEN])?;
                        pass.grad_ready(id)?;
                    }
                }
                pass.finish()?;
            }
            stepper.status()?;
            assert_no_race(&mut stepper);
            stepper.close()
        })
        .unwrap_or_else(|error| panic!("{mode:?} {clip:?}: {error}"));
    }
}

#[test]
fn a_lost_rank_leaves_no_parameter_that_reads_as_if_it_had_come() {
    let layout = layout();
    for offloads in [false, true] {
        lose_a_rank(&layout, offloads);
    }
}

fn lose_a_rank(layout: &Layout, offloads: bool) {
    // The group's error is the lost rank's, also if an assertion of the other one fails.
    let survived = AtomicBool::new(false);
    let outcome = in_process(2, |comm| {
        let is_lost = comm.rank() == 1;
        let mut stepper = builder(layout, offloads).host(comm)?;
        fill(&mut stepper)?;
        let id = layout.id("p0")?;
        let bucket = bucket_of(&stepper, id)?;
        stepper.status()?;
        if is_lost {
            return Err(Error::Hook("the power is out".into()));
        }
        stepper.unshard(bucket)?;
        assert!(stepper.status().and_then(|_| stepper.view::<f32>(id).map(drop)).is_err());
        stepper.rescue()?;
        let read = stepper.view::<f32>(id).map(<[f32]>::to_vec);
        assert!(read.is_err(), "{:?}", &read.unwrap()[LEN / 2 - 10..LEN / 2 + 100]);
        assert!(stepper.unshard(bucket).is_err());
        stepper.reshard(bucket)?;
        survived.store(true, SeqCst);
        Ok(())
    });
    assert!(survived.into_inner());
    assert_eq!(outcome.map(drop), Err(Error::Hook("the power is out".into())));
}

#[test]
fn a_pass_that_is_given_up_gives_its_buckets_up() {
    let layout = layout();
    for (mode, offloads) in modes() {
        in_process(2, |comm| {
            let most = NonZeroU32::new(2).unwrap();
            let mut stepper = builder(&layout, offloads).mode(mode).max_unsharded(most).host(comm)?;
            fill(&mut stepper)?;
            let ids: Vec<ParamId> = layout.ids().collect();
            for round in 0..2 {
                let mut pass = stepper.begin()?;
                for id in [ids[3], ids[2]] {
                    let bucket = bucket_of(&pass, id)?;
                    pass.unshard(bucket)?;
                    pass.view::<f32>(id)?;
                }
                match round {
                    0 => drop(pass.abandon()?),
                    _ => drop(pass),
                }
                assert!(stepper.view::<f32>(ids[3]).is_err());
                for id in [ids[0], ids[1]] {
                    let bucket = bucket_of(&stepper, id)?;
                    stepper.unshard(bucket)?;
                    stepper.view::<f32>(id)?;
                }
                for bucket in 0..BUCKETS {
                    stepper.reshard(bucket)?;
                }
            }
            assert_no_race(&mut stepper);
            stepper.close()
        })
        .unwrap();
    }
}

/// The test follows `docs/sharding.md`.
#[test]
fn buckets_are_resharded_between_micro_batches_and_launched_by_the_last_one() {
    let layout = layout();
    for (mode, offloads) in modes() {
        in_process(2, |comm| {
            let most = NonZeroU32::MIN;
            let mut stepper = builder(&layout, offloads).mode(mode).max_unsharded(most).host(comm)?;
            fill(&mut stepper)?;
            let mut pass = stepper.begin_accumulating(NonZeroU32::new(2).unwrap())?;
            for is_last in [false, true] {
                for id in layout.ids().rev() {
                    let bucket = bucket_of(&pass, id)?;
                    pass.unshard(bucket)?;
                    pass.view::<f32>(id)?;
                    pass.grads().add(id, &[1.0; LEN])?;
                    pass.grad_ready(id)?;
                    if !is_last {
                        let other = (bucket + 1) % BUCKETS;
                        assert!(matches!(pass.unshard(other), Err(Error::Order(_))), "it is still whole");
                        pass.reshard(bucket)?;
                    }
                }
                if !is_last {
                    pass.next_micro_batch()?;
                }
            }
            pass.finish()?;
            let mut values = vec![0.0; LEN];
            for (k, id) in layout.ids().enumerate() {
                stepper.gather(id, &mut values)?;
                assert_eq!(values, [k as f32 + 1.0 - 2.0; LEN], "{mode:?} p{k}");
            }
            assert_no_race(&mut stepper);
            stepper.close()
        })
        .unwrap();
    }
}

#[test]
fn a_view_is_the_stored_parameter_and_a_gather_is_its_master() {
    let layout = layout();
    for master in [Master::F32, Master::Remainder16] {
        in_process(2, |comm| {
            let precision = Precision { param: DType::BF16, master, ..Precision::default() };
            let mut stepper = builder(&layout, false).precision(precision).host(comm)?;
            let (id, value) = (layout.id("p0")?, 1.001);
            stepper.fill_params(|_, values| values.fill(value))?;
            let bucket = bucket_of(&stepper, id)?;
            stepper.unshard(bucket)?;
            assert!(stepper.view::<instep::bf16>(id)?.iter().all(|stored| f32::from(*stored) == 1.0));
            let mut values = vec![0.0; LEN];
            assert!(matches!(stepper.read(id, &mut values), Err(Error::Sharded { .. })));
            stepper.gather(id, &mut values)?;
            assert_eq!(values, [value; LEN]);
            Ok(())
        })
        .unwrap();
    }
}

/// Files of parameters, and a checkpoint, are written while some buckets are full.
#[test]
fn files_hold_whole_parameters_with_masters_and_buckets_unsharded() {
    let layout = layout();
    let f32 = Precision::default();
    let bf16 = |master| Precision { param: DType::BF16, master, ..f32 };
    for precision in [f32, bf16(Master::F32), bf16(Master::Remainder16), bf16(Master::None)] {
        let run = |(strategy, offloads)| {
            let folder = tempfile::tempdir().unwrap();
            let (path, written) = (folder.path().join("parameters"), Barrier::new(3));
            in_process(3, |comm| {
                let builder = Stepper::builder(&layout, AdamW::default()).precision(precision).ema(0.5);
                let builder = builder.gradients(Gradients::Zero).bucket_cap_bytes(1).strategy(strategy);
                let mut stepper = offloading(builder, offloads).host(comm)?;
                let ids: Vec<ParamId> = layout.ids().collect();
                for (param, id) in ids.iter().enumerate() {
                    let values: Vec<f32> = (0..LEN).map(|k| (k * (param + 1)) as f32 / 700.0).collect();
                    stepper.write(*id, &values)?;
                }
                let mut files = Vec::new();
                for round in 0..2 {
                    stepper.unshard(2)?;
                    for (averages, f32) in [(false, false), (false, true), (true, false)] {
                        checkpoint::export(&stepper, Export { averages, f32 }, &path)?;
                        written.wait();
                        files.push(std::fs::read(&path).unwrap());
                        written.wait();
                    }
                    let mut saved = Vec::new();
                    checkpoint::write(&stepper, &mut saved)?;
                    if round == 0 {
                        // Other values, and then those of the file again.
                        for id in &ids {
                            stepper.write(*id, &[9.0; LEN])?;
                        }
                        checkpoint::read(&mut stepper, Cursor::new(&saved))?;
                    } else {
                        checkpoint::import_params(&mut stepper, Cursor::new(&files[0]))?;
                    }
                    files.push(saved);
                    let mut pass = stepper.begin()?;
                    for id in &ids {
                        let bucket = bucket_of(&pass, *id)?;
                        pass.unshard(bucket)?;
                        pass.grads().write(*id, &[0.25; LEN])?;
                    }
                    pass.finish()?;
                }
                for id in &ids {
                    let mut values = vec![0.0; LEN];
                    stepper.gather(*id, &mut values)?;
                    files.push(bytemuck::cast_slice(&values).to_vec());
                }
                Ok(files)
            })
            .unwrap_or_else(|error| panic!("{precision:?} {strategy:?}: {error}"))
        };
        let whole = run((Strategy::Replicated, false));
        for way in [(Strategy::Fsdp, false), (Strategy::Fsdp, true), (Strategy::Replicated, true)] {
            let shared = run(way);
            for (k, (whole, shared)) in whole[1].iter().zip(&shared[1]).enumerate() {
                assert!(whole == shared, "{precision:?}, {way:?}, file {k}");
            }
        }
    }
}
