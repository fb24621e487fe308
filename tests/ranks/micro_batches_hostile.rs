//! Trainers sum micro-batches in unusual ways, and ranks leave in the middle of a pass.
//!
//! The reference adds up on each rank, without shards. Gradients are dyadic, so the bits are equal.

use std::num::NonZeroU32;
use std::time::Duration;

use instep::{
    Accumulation, Adam, Error, InProcess, Layout, Mode, OffloadPolicy, ParamId, Result, Sgd, Stepper,
    StepperBuilder, Strategy, Unused, in_process,
};

use crate::ranks::zero::bucket_of;
use crate::support::MODES;

fn of(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).unwrap()
}

fn layout() -> Layout {
    let layout = Layout::builder().param("a", 700).param("tied", 257).uses(2).param("empty", 0);
    layout.param("own", 50).local().param("c", 1000).build().unwrap()
}

fn gradient(micro_batch: usize, rank: u32, param: usize, element: usize) -> f32 {
    ((micro_batch * 31 + rank as usize * 57 + param * 17 + element * 13) % 251) as f32 / 64.0 - 1.5
}

fn length(layout: &Layout, id: ParamId) -> Result<usize> {
    Ok(layout.parameter(id)?.len as usize)
}

/// Parameters as bits, with their step counts.
type End = Vec<(Vec<u32>, u64)>;

/// Makes passes of one to four micro-batches. A whole bucket is frozen in the middle. A parameter has no gradient in
/// the second micro-batches. Some written gradients are not handed over, or less often than they are used.
fn train(
    ranks: u32,
    unused: Unused,
    build: impl Fn(StepperBuilder<'_>) -> StepperBuilder<'_> + Sync,
) -> Vec<End> {
    let layout = layout();
    let ids: Vec<ParamId> = layout.ids().collect();
    let trained = in_process(ranks, |comm: InProcess| {
        let rank = comm.rank();
        let builder = Stepper::builder(&layout, Adam::default()).bucket_cap_bytes(1500).unused(unused);
        let mut stepper = build(builder.record(true)).host(comm)?;
        stepper.fill_params(|_, values| values.fill(0.25))?;
        for (step, micro_batches) in [3, 1, 2, 4, 2].into_iter().enumerate() {
            match step {
                2 => [0, 4].into_iter().try_for_each(|k| stepper.set_frozen(ids[k], true))?,
                3 => stepper.set_frozen(ids[0], false)?,
                4 => stepper.set_frozen(ids[4], false)?,
                _ => {}
            }
            stepper.begin_accumulating(of(micro_batches))?.detach();
            for m in 0..micro_batches as usize {
                for (param, id) in ids.iter().copied().enumerate().rev() {
                    if stepper.is_frozen(id)? || param == 0 && m == 1 {
                        continue;
                    }
                    if (step + m) % 2 == 0 {
                        let bucket = bucket_of(&stepper, id)?;
                        stepper.unshard(bucket)?;
                        stepper.view::<f32>(id)?;
                    }
                    let mut values: Vec<f32> =
                        (0..length(&layout, id)?).map(|k| gradient(step * 7 + m, rank, param, k)).collect();
                    if !stepper.is_first(id)? {
                        let mut before = vec![0.0; values.len()];
                        stepper.read(id.grad(), &mut before)?;
                        values.iter_mut().zip(before).for_each(|(value, before)| *value += before);
                    }
                    stepper.write(id.grad(), &values)?;
                    let hand_overs = match (param, m % 2) {
                        (1, 0) => 2,
                        (4, 1) => 0,
                        _ => 1,
                    };
                    (0..hand_overs).try_for_each(|_| stepper.grad_ready(id))?;
                }
                if m + 1 < micro_batches as usize {
                    stepper.next_micro_batch()?;
                }
            }
            stepper.finish()?;
        }
        let mut end = Vec::new();
        for id in &ids {
            let mut values = vec![0.0; length(&layout, *id)?];
            stepper.gather(*id, &mut values)?;
            end.push((values.iter().map(|value| value.to_bits()).collect(), stepper.step_count(*id)?));
        }
        let recording = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recording), []);
        stepper.close()?;
        Ok(end)
    });
    trained.unwrap()
}

#[test]
fn odd_hand_overs_in_passes_of_any_length_have_the_bits_of_whole_steps() {
    for (mode, unused) in MODES.into_iter().flat_map(|mode| [(mode, Unused::Skip), (mode, Unused::StepZero)])
    {
        for (ranks, shard_size) in [(1, 1), (2, 2), (3, 3), (4, 2), (2, 1)] {
            let whole = train(ranks, unused, |builder| builder.mode(mode));
            for (strategy, offloads) in [Strategy::Zero, Strategy::Fsdp]
                .into_iter()
                .flat_map(|strategy| [(strategy, false), (strategy, true)])
            {
                let summed = train(ranks, unused, |builder| {
                    let builder = builder.mode(mode).strategy(strategy).shard_size(of(shard_size));
                    let builder = builder.accumulation(Accumulation::Summed);
                    if offloads { builder.offload(OffloadPolicy::default()) } else { builder }
                });
                assert!(
                    summed == whole,
                    "{mode:?}, {unused:?}, {ranks} ranks in groups of {shard_size}, {strategy:?}, offload {offloads}"
                );
            }
        }
    }
}

/// Rank 1 drops its pass and leaves, abandons the pass by itself, or returns an error in the second micro-batch.
#[test]
fn a_rank_that_leaves_a_pass_between_micro_batches_ends_all_of_them() {
    let layout = layout();
    for (leaves, strategy) in (0..3).flat_map(|way| [(way, Strategy::Zero), (way, Strategy::Fsdp)]) {
        let told = in_process(3, |comm: InProcess| {
            let rank = comm.rank();
            let builder =
                Stepper::builder(&layout, Adam::default()).strategy(strategy).bucket_cap_bytes(1500);
            let builder = builder.accumulation(Accumulation::Summed).deadline(Duration::from_secs(20));
            let mut stepper = builder.host(comm)?;
            let train = |stepper: &mut Stepper| -> Result<()> {
                for _ in 0..2 {
                    let mut pass = stepper.begin_accumulating(of(3))?;
                    for m in 0..3 {
                        for id in layout.ids().rev() {
                            pass.grads().write(id, &vec![1.0; length(&layout, id)?])?;
                        }
                        match (rank == 1 && m == 1, leaves) {
                            (true, 0) => return Ok(()),
                            (true, 1) => return pass.abandon().map(drop),
                            (true, _) => return Err(Error::order("trainer", "is ill", "none")),
                            (false, _) if m < 2 => pass.next_micro_batch()?,
                            (false, _) => Stepper::finish(&mut pass)?,
                        }
                    }
                }
                stepper.status().map(drop)
            };
            let outcome = train(&mut stepper);
            if rank == 1 {
                return Ok(String::new());
            }
            let told = outcome.unwrap_err().to_string();
            stepper.rescue()?;
            assert_eq!(stepper.step_count(layout.id("a")?)?, 0, "nothing was stepped");
            Ok(told)
        });
        for (rank, told) in told.unwrap().iter().enumerate().filter(|(rank, _)| *rank != 1) {
            assert!(told.contains("poisoned") && told.contains("rank 1"), "rank {rank}, {leaves}: {told}");
        }
    }
}

#[test]
fn whole_buckets_are_handed_over_in_each_micro_batch_and_unused_parameters_named_in_the_last() {
    let layout = layout();
    let [a, tied, own, c] = ["a", "tied", "own", "c"].map(|name| layout.id(name).unwrap());
    for (strategy, mode) in [(Strategy::Zero, Mode::Eager), (Strategy::Fsdp, Mode::Normed)] {
        in_process(2, |comm: InProcess| {
            let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() }).mode(mode);
            let builder =
                builder.strategy(strategy).accumulation(Accumulation::Summed).unused(Unused::Refuse);
            let mut stepper = builder.bucket_cap_bytes(1500).record(true).host(comm)?;
            for _ in 0..2 {
                let mut pass = stepper.begin_accumulating(of(2))?;
                let plan = pass.plan().clone();
                for (k, bucket) in (0..).zip(plan.buckets()).filter(|(_, bucket)| bucket.len > 0) {
                    pass.bucket_mut::<f32>(k)?.fill(1.0);
                    pass.bucket_ready(k)?;
                    assert!(matches!(pass.bucket_mut::<f32>(k), Err(Error::Order(_))), "{bucket:?}");
                }
                assert!(matches!(pass.set_unused(&[a]), Err(Error::Order(_))), "not in the last one");
                pass.next_micro_batch()?;
                pass.set_unused(&[a])?;
                for id in [tied, own, c] {
                    pass.grads().write(id, &vec![0.5; length(&layout, id)?])?;
                }
                pass.finish()?;
            }
            for (id, end) in [(a, 0.0), (tied, -3.0), (c, -3.0)] {
                let mut values = vec![0.5; length(&layout, id)?];
                stepper.gather(id, &mut values)?;
                assert!(
                    values.iter().all(|value| *value == end),
                    "{strategy:?}: {} and not {end}",
                    values[0]
                );
            }
            assert_eq!((stepper.step_count(a)?, stepper.step_count(c)?), (0, 2));
            let recording = stepper.take_recording().unwrap();
            assert_eq!(stepper.check(&recording), []);
            Ok(())
        })
        .unwrap();
    }
}
