//! Each micro-batch of a pass is summed over ranks: the bits of one sum, the calls, the bytes, and refusals.
//!
//! `zero.rs` has the training and the comparison; its gradients are dyadic, so the order of sums changes no bit.
//! `stepper/accumulation.rs` has passes that add up on each rank.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};

use instep::collective::CollectiveKind;
use instep::hazard::Traced;
use instep::op::{Action, Group, Memory, Op};
use instep::overlap::{BucketSum, SumHooked};
use instep::{
    Accumulation, Adam, AdamW, Clip, DType, Divisor, Error, Gradients, Layout, LossScale, LossScaler, Mode,
    Precision, Result, Sgd, Stepper, StepperBuilder, Strategy, Unused, bf16, in_process,
};

use crate::ranks::zero::{
    Course, WAYS, assert_same_bits_each_way, assert_same_bits_in_groups, bucket_of, gradient, layout,
};
use crate::support::MODES;
use crate::support::waits::{assert_each_is_missed, middle_passes};

const SHARED: [Strategy; 2] = [Strategy::Zero, Strategy::Fsdp];

fn of(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).unwrap()
}

fn summed(layout: &Layout) -> StepperBuilder<'_> {
    let sgd = Sgd { lr: 1.0, ..Sgd::default() };
    Stepper::builder(layout, sgd).strategy(Strategy::Zero).accumulation(Accumulation::Summed)
}

#[test]
fn summed_micro_batches_have_the_bits_of_one_sum() {
    let ways: Vec<_> = WAYS.into_iter().filter(|(strategy, _)| *strategy != Strategy::Replicated).collect();
    for (k, (ranks, micro_batches)) in [(1, 2), (2, 3), (3, 2), (4, 4), (8, 2)].into_iter().enumerate() {
        for unused in [Unused::Skip, Unused::StepZero] {
            let course = Course {
                leaves_out: true,
                freezes: k % 2 == 0,
                micro_batches,
                summed: true,
                ..Course::default()
            };
            let (mode, gradients) = (MODES[k % 3], [Gradients::Keep, Gradients::Zero][k % 2]);
            let what = format!("{mode:?}, {unused:?}, {gradients:?}");
            assert_same_bits_each_way(ranks, course, &what, &ways, || {
                Stepper::builder(layout(), Adam { amsgrad: true, ..Adam::default() })
                    .mode(mode)
                    .unused(unused)
                    .gradients(gradients)
                    .bucket_cap_bytes(20_000)
            });
        }
    }
}

#[test]
fn groups_sum_each_micro_batch_among_neighbours_to_the_same_bits() {
    for ((ranks, shard_size), mode) in
        [(4, 2), (6, 3), (6, 2), (3, 1)].into_iter().zip(MODES.into_iter().cycle())
    {
        let course =
            Course { leaves_out: true, freezes: true, micro_batches: 3, summed: true, ..Course::default() };
        assert_same_bits_in_groups((ranks, Some(of(shard_size))), course, &format!("{mode:?}"), || {
            Stepper::builder(layout(), AdamW::default()).mode(mode).bucket_cap_bytes(20_000)
        });
    }
}

#[test]
fn decisions_are_taken_by_the_sum_of_all_micro_batches() {
    let scaler = LossScaler { initial_scale: 1024.0, growth_interval: 2, ..LossScaler::default() };
    let course =
        Course { overflows: true, leaves_out: true, micro_batches: 2, summed: true, ..Course::default() };
    for mode in [Mode::Sequential, Mode::Normed] {
        assert_same_bits_in_groups((4, Some(of(2))), course, "loss scale", || {
            let builder = Stepper::builder(layout(), AdamW::default()).mode(mode).clip(Clip::Global(0.5));
            builder.loss_scale(LossScale::Dynamic(scaler)).bucket_cap_bytes(20_000)
        });
    }
    let finite = Course { overflows: false, ..course };
    assert_same_bits_in_groups((3, None), finite, "each bucket", || {
        Stepper::builder(layout(), AdamW::default()).clip(Clip::PerBucket(0.25)).bucket_cap_bytes(20_000)
    });
}

/// Each sum is rounded, and so is each addition. The sums of these values need more than the 8 bits of bf16.
#[test]
fn sums_of_sixteen_bits_are_rounded_after_each_addition() {
    let layout = Layout::builder().param("w", 700).build().unwrap();
    let w = layout.id("w").unwrap();
    let value =
        |micro_batch: usize, rank: usize, k: usize| bf16::from_f32(gradient(micro_batch, rank, 0, k) * 1.5);
    for strategy in SHARED {
        let grads = in_process(3, |comm| {
            let rank = comm.rank() as usize;
            let precision = Precision { grad: DType::BF16, ..Precision::F32 };
            let mut stepper = summed(&layout).strategy(strategy).precision(precision).host(comm)?;
            let mut pass = stepper.begin_accumulating(of(4))?;
            for micro_batch in 0..4 {
                let values: Vec<f32> = (0..700).map(|k| value(micro_batch, rank, k).to_f32()).collect();
                pass.grads().write(w, &values)?;
                if micro_batch < 3 {
                    pass.next_micro_batch()?;
                }
            }
            pass.finish()?;
            let mut grads = vec![0.0; 700];
            stepper.gather(w.grad(), &mut grads)?;
            Ok(grads)
        });
        let sum = |micro_batch, k| {
            bf16::from_f32((0..3).map(|rank| value(micro_batch, rank, k).to_f32()).sum::<f32>())
        };
        let expected: Vec<f32> =
            (0..700).map(|k| (1..4).fold(sum(0, k), |total, m| total + sum(m, k)).to_f32()).collect();
        let exact = |k| (0..4).flat_map(|m| (0..3).map(move |r| value(m, r, k).to_f32())).sum::<f32>();
        assert!(
            (0..700).any(|k| bf16::from_f32(exact(k)).to_f32() != expected[k]),
            "nothing is rounded twice"
        );
        for rank in grads.unwrap() {
            assert_eq!(rank, expected, "{strategy:?}");
        }
    }
}

fn collectives(list: &[Traced], kind: CollectiveKind, group: Group) -> usize {
    let is_it = |entry: &&Traced| {
        matches!(entry, Traced::Op(Op { action: Action::Collective { kind: of, group: among, .. }, .. })
            if (*of, *among) == (kind, group))
    };
    list.iter().filter(is_it).count()
}

#[test]
fn each_micro_batch_has_a_sum_among_neighbours_and_replicas_have_one_and_every_wait_is_needed() {
    const PASSES: usize = 5;
    const MICRO_BATCHES: usize = 3;
    for (mode, strategy) in MODES.into_iter().flat_map(|mode| SHARED.map(|strategy| (mode, strategy))) {
        for (ranks, shard_size) in [(3, 3), (4, 2)] {
            let one = |comm| {
                let builder = summed(layout()).mode(mode).strategy(strategy).shard_size(of(shard_size));
                let mut stepper = builder.bucket_cap_bytes(1000).record(true).host(comm)?;
                for step in 0..PASSES {
                    let mut pass = stepper.begin_accumulating(of(MICRO_BATCHES as u32))?;
                    for micro_batch in 0..MICRO_BATCHES {
                        for (param, id) in layout().ids().enumerate().rev() {
                            let bucket = bucket_of(&pass, id)?;
                            pass.unshard(bucket)?;
                            pass.view::<f32>(id)?;
                            pass.grads().get_mut(id)?.fill(gradient(step, micro_batch, param, 0));
                            pass.grad_ready(id)?;
                        }
                        if micro_batch + 1 < MICRO_BATCHES {
                            pass.next_micro_batch()?;
                        }
                    }
                    pass.finish()?;
                }
                let recording = stepper.take_recording().unwrap();
                let (list, what) = (&recording.list, format!("{mode:?}, {strategy:?} of {shard_size}"));
                assert_eq!(stepper.check(&recording), [], "{what}");
                assert_each_is_missed(stepper.plan(), 0, list, middle_passes(list), 8, &what);
                let buckets = stepper.plan().buckets();
                let (all, full) = (buckets.len(), buckets.iter().filter(|bucket| bucket.len > 0).count());
                assert!(full > 2);
                // An empty bucket is summed once a pass, as without micro-batches.
                let sums = PASSES * (all + (MICRO_BATCHES - 1) * full);
                let count = |kind, group| collectives(list, kind, group);
                assert_eq!(count(CollectiveKind::ReduceScatter, Group::Shards), sums, "{what}");
                let of_replicas = if ranks > shard_size { PASSES * all } else { 0 };
                assert_eq!(count(CollectiveKind::AllReduce, Group::Replicas), of_replicas, "{what}");
                assert_eq!(count(CollectiveKind::AllReduce, Group::World), PASSES * full, "{what}: counts");
                let gathers = if strategy == Strategy::Fsdp { MICRO_BATCHES } else { 1 };
                assert_eq!(
                    count(CollectiveKind::AllGather, Group::Shards),
                    PASSES * gathers * full,
                    "{what}"
                );
                Ok(())
            };
            in_process(ranks, one).unwrap();
        }
    }
}

fn bytes(memory: &[(Memory, u64)], which: Memory) -> u64 {
    memory.iter().find(|(known, _)| *known == which).map_or(0, |(_, bytes)| *bytes)
}

#[test]
fn a_rank_holds_sums_of_its_shard_and_between_micro_batches_no_whole_gradient() {
    #[cfg(target_os = "linux")]
    crate::ranks::fsdp::without_huge_pages();
    const ELEMENTS: usize = 1 << 20;
    let layout = Layout::builder().param("a", ELEMENTS).param("b", ELEMENTS).build().unwrap();
    in_process(4, |comm| {
        let build = || summed(&layout).strategy(Strategy::Fsdp).unused(Unused::StepZero).bucket_cap_bytes(1);
        let foreseen = build().forecast(comm.rank(), 4, |_, _| 1)?.memory();
        let mut stepper = build().gradients(Gradients::Release).host(comm)?;
        assert_eq!(stepper.memory(), foreseen);
        assert_eq!(bytes(&foreseen, Memory::Sums), 2 * 4 * ELEMENTS as u64 / 4);
        let mut pass = stepper.begin_accumulating(of(2))?;
        let mut written = Vec::new();
        for id in layout.ids().rev() {
            pass.grads().get_mut(id)?.fill(1.0);
            written.push(pass.view::<f32>(id.grad())?.as_ptr());
            pass.grad_ready(id)?;
        }
        pass.next_micro_batch()?;
        for id in layout.ids() {
            assert!(pass.is_first(id)?);
            assert!(matches!(pass.view::<f32>(id.grad()), Err(Error::Order(_))));
            // A slice comes after the sum.
            pass.grads().get_mut(id)?;
        }
        #[cfg(target_os = "linux")]
        for address in written {
            // SAFETY: the stepper's own memory, which nothing writes now.
            let values = unsafe { std::slice::from_raw_parts(address, ELEMENTS) };
            assert!(crate::ranks::fsdp::resident(values) <= 2 * 4096, "whole gradients are still there");
        }
        for id in layout.ids() {
            pass.grads().get_mut(id)?.fill(0.5);
        }
        pass.finish()?;
        let mut values = vec![0.0; ELEMENTS];
        for id in layout.ids() {
            stepper.gather(id, &mut values)?;
            assert!(values.iter().all(|value| *value == -1.5));
        }
        stepper.close()
    })
    .unwrap();
}

#[test]
fn a_gradient_of_any_micro_batch_is_one_of_the_pass() {
    let layout =
        Layout::builder().param("first", 300).param("last", 300).param("never", 300).build().unwrap();
    let [first, last, never] = ["first", "last", "never"].map(|name| layout.id(name).unwrap());
    for strategy in SHARED {
        let ends = in_process(2, |comm| {
            let mut stepper = summed(&layout).strategy(strategy).bucket_cap_bytes(1).host(comm)?;
            for _ in 0..2 {
                let mut pass = stepper.begin_accumulating(of(2))?;
                pass.grads().write(first, &[1.0; 300])?; // handed over by the next call
                pass.next_micro_batch()?;
                pass.grads().write(last, &[2.0; 300])?;
                pass.finish()?;
            }
            let end = |id| -> Result<(f32, u64)> {
                let mut values = [0.0; 300];
                stepper.gather(id, &mut values)?;
                Ok((values[299], stepper.step_count(id)?))
            };
            Ok([end(first)?, end(last)?, end(never)?])
        });
        assert_eq!(ends.unwrap(), [[(-2.0, 2), (-4.0, 2), (0.0, 0)]; 2], "{strategy:?}");
    }
    in_process(2, |comm| {
        let mut stepper = summed(&layout).unused(Unused::Refuse).host(comm)?;
        let mut pass = stepper.begin_accumulating(of(2))?;
        for id in [first, never] {
            pass.grads().write(id, &[1.0; 300])?;
        }
        pass.next_micro_batch()?;
        assert!(matches!(pass.grad_ready(first), Err(Error::Order(_))), "not written in this micro-batch");
        let forgotten = Stepper::finish(&mut pass).unwrap_err().to_string();
        assert!(forgotten.contains("`last`"), "{forgotten}");
        pass.grads().write(last, &[1.0; 300])?;
        pass.finish()
    })
    .unwrap();
}

#[test]
fn an_abandoned_micro_batch_leaves_nothing_in_the_next_pass() {
    let layout = Layout::builder().param("a", 300).param("b", 300).build().unwrap();
    for (mode, strategy) in MODES.into_iter().flat_map(|mode| SHARED.map(|strategy| (mode, strategy))) {
        let ends = in_process(2, |comm| {
            let mut stepper = summed(&layout).mode(mode).strategy(strategy).bucket_cap_bytes(1).host(comm)?;
            for micro_batches in [2, 1, 3] {
                let mut pass = stepper.begin_accumulating(of(3))?;
                for k in 0..micro_batches {
                    for id in layout.ids().rev() {
                        pass.grads().write(id, &[8.0; 300])?;
                        if k < 2 {
                            pass.grad_ready(id)?;
                        }
                    }
                    if k < 2 {
                        pass.next_micro_batch()?;
                    }
                }
                assert_eq!(pass.abandon()?.stepped_buckets, [0u32; 0], "{mode:?}");
                // Sums that were left over would show only in a pass that has sums to add to.
                for micro_batches in [2, 1] {
                    let mut pass = stepper.begin_accumulating(of(micro_batches))?;
                    for left in (0..micro_batches).rev() {
                        for id in layout.ids() {
                            pass.grads().write(id, &[0.5; 300])?;
                        }
                        if left > 0 {
                            pass.next_micro_batch()?;
                        }
                    }
                    pass.finish()?;
                }
            }
            let mut ends = [0.0; 2];
            for (id, end) in layout.ids().zip(&mut ends) {
                let mut values = [0.0; 300];
                stepper.gather(id, &mut values)?;
                assert!(values.iter().all(|value| *value == values[0]), "{values:?}");
                *end = values[0];
            }
            Ok(ends)
        });
        assert_eq!(ends.unwrap(), [[-4.5; 2]; 2], "{mode:?}, {strategy:?}");
    }
}

#[test]
fn a_local_parameter_adds_up_on_its_rank() {
    let layout = Layout::builder().param("w", 300).param("own", 300).local().build().unwrap();
    let [w, own] = ["w", "own"].map(|name| layout.id(name).unwrap());
    for mode in MODES {
        let ends = in_process(2, |comm| {
            let rank = comm.rank() as f32;
            let mut stepper = summed(&layout).mode(mode).host(comm)?;
            let mut pass = stepper.begin_accumulating(of(3))?;
            for k in 0..3 {
                assert_eq!((pass.is_first(w)?, pass.is_first(own)?), (true, k == 0));
                pass.grads().add(w, &[1.0; 300])?;
                pass.grads().add(own, &[1.0 + rank; 300])?;
                if k < 2 {
                    pass.next_micro_batch()?;
                }
            }
            pass.finish()?;
            Ok((stepper.view::<f32>(w)?[0], stepper.view::<f32>(own)?[299]))
        });
        assert_eq!(ends.unwrap(), [(-3.0, -3.0), (-3.0, -6.0)], "{mode:?}");
    }
}

#[test]
fn a_hook_after_a_sum_sees_each_micro_batch_or_with_groups_the_whole_pass() {
    let layout = Layout::builder().param("w", 300).build().unwrap();
    let w = layout.id("w").unwrap();
    for (shard_size, expected) in [(4, vec![4.0f32, 8.0]), (2, vec![12.0])] {
        let ends = in_process(4, |comm| {
            let seen = Arc::new(Mutex::new(Vec::<f32>::new()));
            let noted = Arc::clone(&seen);
            let comm = SumHooked::new(comm, move |sum: &mut BucketSum<'_>| {
                noted.lock().unwrap().extend(sum.values().first());
                Ok(())
            });
            let mut stepper = summed(&layout).shard_size(of(shard_size)).host(comm)?;
            let mut pass = stepper.begin_accumulating(of(2))?;
            for k in 0..2 {
                pass.grads().write(w, &[1.0 + k as f32; 300])?;
                if k == 0 {
                    pass.next_micro_batch()?;
                }
            }
            pass.finish()?;
            stepper.status()?;
            let seen = seen.lock().unwrap().clone();
            Ok((stepper.view::<f32>(w)?[299], seen))
        });
        let ends = ends.unwrap();
        assert!(ends.iter().all(|(end, _)| *end == -3.0), "{ends:?}");
        assert_eq!(ends[0].1, expected, "of {shard_size}");
    }
}

#[test]
fn what_sums_nothing_or_differs_between_ranks_is_refused() {
    let layout = Layout::builder().param("w", 600).build().unwrap();
    let refused =
        |builder: StepperBuilder<'_>| builder.host(instep::Solo::default()).unwrap_err().to_string();
    let whole = refused(summed(&layout).strategy(Strategy::Replicated));
    assert!(whole.contains("every rank has full gradients"), "{whole}");
    let uneven = refused(summed(&layout).uneven_inputs(Divisor::WorldSize));
    assert!(uneven.contains("how many micro-batches"), "{uneven}");

    let w = layout.id("w").unwrap();
    let told = |micro_batches: [u32; 2], accumulations: [Accumulation; 2]| {
        let told = in_process(2, |comm| {
            let rank = comm.rank() as usize;
            let mut stepper = summed(&layout).accumulation(accumulations[rank]).host(comm)?;
            let train = |stepper: &mut Stepper| {
                let mut pass = stepper.begin_accumulating(of(micro_batches[rank]))?;
                for k in 0..micro_batches[rank] {
                    pass.grads().write(w, &[1.0; 600])?;
                    if k + 1 < micro_batches[rank] {
                        pass.next_micro_batch()?;
                    }
                }
                pass.finish()
            };
            let outcome = train(&mut stepper).and_then(|()| stepper.status().map(drop));
            Ok(outcome.unwrap_err().to_string())
        });
        told.unwrap()
    };
    for told in told([2, 3], [Accumulation::Summed; 2]) {
        assert!(told.contains("how many micro-batches"), "{told}");
    }
    for told in told([1, 1], [Accumulation::Local, Accumulation::Summed]) {
        assert!(told.contains("accumulation: Summed"), "{told}");
    }
}
