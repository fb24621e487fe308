//! Ranks that step shards: the bytes of each, the calls that they make, full tensors from all shards, and checkpoints
//! for other numbers of ranks.
//!
//! A tensor that cannot be sharded is refused by name, before any call.

use crate::support::Presummed;
use std::num::NonZeroU32;
use std::ops::Range;

use instep::checkpoint;
use instep::collective::CollectiveKind;
use instep::hazard::Traced;
use instep::op::{Action, Memory, Op, Phase, Stream};
use instep::optim::{Custom, ParamStep, StepParam};
use instep::{
    Adam, AdamW, Clip, DType, Error, InProcess, Layout, Master, Mode, Moments, Precision, Result,
    SegmentAction, Sgd, Stepper, StepperBuilder, Strategy, Unused, in_process,
};

use crate::ranks::zero::{LENS, gradient, layout, offloading};
use crate::support::Outcome;
use crate::support::waits::{assert_each_is_missed, middle_passes};

struct Own;

impl StepParam for Own {
    fn name(&self) -> &str {
        "own"
    }

    fn step_param(&self, _: ParamStep<'_>) -> Result<()> {
        Ok(())
    }
}

/// Returns the bytes of one memory of each rank.
fn bytes(sizes: &[(Memory, u64)], memory: Memory) -> u64 {
    sizes.iter().find(|(known, _)| *known == memory).map_or(0, |(_, bytes)| *bytes)
}

#[test]
fn a_rank_keeps_states_masters_and_averages_of_its_shard_alone() {
    let low = Precision {
        param: DType::BF16,
        grad: DType::BF16,
        master: Master::F32,
        moments: Moments::EightBit,
        ..Precision::F32
    };
    let sizes = |ranks: u32, strategy| {
        in_process(ranks, |comm| {
            let layout = layout();
            let builder =
                Stepper::builder(layout, AdamW::default()).precision(low).ema(0.9).strategy(strategy);
            let stepper = builder.unused(Unused::StepZero).bucket_cap_bytes(20_000).host(comm)?;
            let kept: u64 = (0..LENS.len())
                .map(|param| stepper.plan().shard_of(param))
                .map(|kept| kept.end - kept.start)
                .sum();
            Ok((stepper.memory(), stepper.plan().arena_len(), kept))
        })
        .unwrap()
    };
    for ranks in [1, 2, 5, 8] {
        let (whole, shards) = (sizes(ranks, Strategy::Replicated), sizes(ranks, Strategy::Zero));
        let elements: u64 = LENS.iter().sum::<usize>() as u64;
        assert_eq!(
            shards.iter().map(|(_, _, kept)| kept).sum::<u64>(),
            elements,
            "each element has one keeper"
        );
        for (sizes, len, _) in &shards {
            assert_eq!(*len, whole[0].1, "padding does not grow without counts of ranks");
            for memory in [Memory::Master, Memory::State(0), Memory::State(1), Memory::Scales(0), Memory::Ema]
            {
                let all = bytes(&whole[0].0, memory);
                assert_eq!(bytes(sizes, memory) * u64::from(ranks), all, "{memory:?}, {ranks} ranks");
            }
            for memory in [Memory::Params, Memory::Grads] {
                assert_eq!(bytes(sizes, memory), bytes(&whole[0].0, memory), "{memory:?}, {ranks} ranks");
            }
        }
    }
}

/// Returns the collectives between the begins of two passes, with their streams.
fn calls(list: &[Traced]) -> Vec<(Stream, CollectiveKind)> {
    let middle = &list[middle_passes(list)];
    let begins =
        |entry: &&Traced| matches!(entry, Traced::Op(Op { action: Action::Control(Phase::Begin), .. }));
    let passes = middle.iter().filter(begins).count();
    let mut calls: Vec<_> = middle
        .iter()
        .filter_map(|entry| match entry {
            Traced::Op(Op { stream, action: Action::Collective { kind, .. } }) => Some((*stream, *kind)),
            _ => None,
        })
        .collect();
    assert_eq!(calls.len() % passes, 0, "every pass makes the same calls");
    calls.truncate(calls.len() / passes);
    calls
}

#[test]
fn a_pass_makes_one_reduce_scatter_and_one_all_gather_per_bucket_and_every_wait_is_needed() {
    use CollectiveKind::{AllGather, AllReduce, Max32, Min32, ReduceScatter, Sum64};
    for (mode, unused, clips) in [
        (Mode::Eager, Unused::StepZero, false),
        (Mode::Eager, Unused::Skip, false),
        (Mode::Normed, Unused::StepZero, true),
        (Mode::Sequential, Unused::Skip, true),
    ] {
        let lists = in_process(3, |comm| {
            let layout = layout();
            let builder = Stepper::builder(layout, AdamW::default()).mode(mode).unused(unused).record(true);
            let builder = if clips { builder.clip(Clip::Global(1.0)) } else { builder };
            let mut stepper = builder.strategy(Strategy::Zero).bucket_cap_bytes(1000).host(comm)?;
            for step in 0..5 {
                let mut pass = stepper.begin()?;
                for (param, id) in layout.ids().enumerate().rev() {
                    pass.view::<f32>(id)?;
                    pass.grads().get_mut(id)?.fill(gradient(step, 0, param, 0));
                    pass.grad_ready(id)?;
                }
                pass.finish()?;
            }
            let recording = stepper.take_recording().unwrap();
            let what = format!("{mode:?}, {unused:?}");
            assert_each_is_missed(
                stepper.plan(),
                2,
                &recording.list,
                middle_passes(&recording.list),
                8,
                &what,
            );
            let buckets = stepper.plan().buckets().len();
            Ok((recording.list, buckets))
        })
        .unwrap();
        for (list, buckets) in lists {
            let calls = calls(&list);
            let count = |stream, kind| calls.iter().filter(|call| **call == (stream, kind)).count();
            assert!(buckets > 2);
            assert_eq!(count(Stream::Reduce, ReduceScatter), buckets, "{calls:?}");
            assert_eq!(count(Stream::Gather, AllGather), buckets, "{calls:?}");
            // The counts of ranks of one bucket, which the last shard does not hold.
            assert_eq!(count(Stream::Reduce, AllReduce), if unused == Unused::Skip { buckets } else { 0 });
            let decisions = [Sum64, Max32].map(|kind| count(Stream::Reduce, kind));
            assert_eq!(decisions, [usize::from(clips); 2], "{calls:?}");
            assert_eq!(count(Stream::Gather, Min32), 1, "{calls:?}");
        }
    }
}

#[test]
fn what_needs_whole_tensors_is_refused_by_name() {
    let refusals = in_process(2, |comm: InProcess| {
        let layout = Layout::builder().param("w", 600).param("b", 3).build()?;
        let averaged = Layout::builder().param("w", 600).action(SegmentAction::Average).build()?;
        let sgd = || Sgd::default();
        let zero = |builder: StepperBuilder<'_>, comm| {
            builder.strategy(Strategy::Zero).host(comm).unwrap_err().to_string()
        };
        let custom = Custom::new(Own);
        let told = [
            zero(Stepper::builder(&layout, custom), comm.split()),
            zero(Stepper::builder(&averaged, sgd()), comm.split()),
            Stepper::builder(&layout, sgd())
                .strategy(Strategy::Zero)
                .host(Presummed(2))
                .unwrap_err()
                .to_string(),
        ];
        let mut stepper =
            Stepper::builder(&layout, Adam::default()).strategy(Strategy::Zero).host(comm.split())?;
        let w = layout.id("w")?;
        let state = stepper.view::<f32>(w.state("exp_avg")).unwrap_err();
        let shard = stepper.plan().shard_of(0);
        assert_eq!(shard, if stepper.rank() == 0 { 0..256 } else { 256..600 });
        let Range { start: first, end } = shard;
        let tensor = "state of `w`".to_owned();
        assert_eq!(state, Error::Sharded { tensor, first, end, len: 600 });
        let read = stepper.read(w.grad(), &mut [0.0; 600]).unwrap_err();
        assert!(matches!(read, Error::Sharded { .. }), "{read}");
        assert!(matches!(stepper.rebuild_buckets(), Err(Error::Unsupported(_))));
        assert!(matches!(stepper.add_optimizer_for(&[w], sgd()), Err(Error::Unsupported(_))));
        Ok(told)
    })
    .unwrap();
    let words = ["optimizer `own`", "`w`: no rank has all of an averaged", "reduce-scatter"];
    for (told, word) in refusals[0].iter().zip(words) {
        assert!(told.contains(word), "{told}");
    }
}
/// A training that is saved with one number of ranks and one strategy continues with others to the same bits.
#[test]
fn a_checkpoint_goes_into_any_number_of_ranks_and_either_strategy() {
    let low = Precision {
        param: DType::BF16,
        master: Master::Remainder16,
        moments: Moments::EightBit,
        ..Precision::F32
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("last.safetensors");
    let layout = layout();
    for precision in [Precision::F32, low] {
        // The same sums for any number of ranks: rank 0 has them all, and the divisor is a factor of the loss.
        let passes = |stepper: &mut Stepper, from: usize| {
            let (rank, scale) = (stepper.rank(), stepper.world_size() as f32);
            for step in from..from + 3 {
                let mut pass = stepper.begin()?;
                for (param, id) in layout.ids().enumerate().rev() {
                    let value = |k| if rank == 0 { gradient(step, 0, param, k) * scale } else { 0.0 };
                    pass.write(id.grad(), &(0..LENS[param]).map(value).collect::<Vec<f32>>())?;
                }
                pass.finish()?;
            }
            Ok::<_, Error>(())
        };
        let open = |(strategy, shard_size, offloads): (Strategy, u32, bool), comm| {
            let builder = Stepper::builder(layout, AdamW::default()).precision(precision).ema(0.9);
            let builder = match NonZeroU32::new(shard_size) {
                Some(ranks) => builder.shard_size(ranks),
                None => builder,
            };
            offloading(builder, offloads).strategy(strategy).bucket_cap_bytes(20_000).host(comm)
        };
        let whole = in_process(1, |comm| {
            let mut stepper = open((Strategy::Replicated, 0, false), comm)?;
            passes(&mut stepper, 0)?;
            passes(&mut stepper, 3)?;
            Outcome::of(&stepper)
        })
        .unwrap();
        for (saved, loaded) in [
            ((4, (Strategy::Zero, 0, false)), (4, (Strategy::Zero, 0, false))),
            ((2, (Strategy::Zero, 0, false)), (8, (Strategy::Zero, 0, false))),
            ((8, (Strategy::Zero, 0, false)), (1, (Strategy::Replicated, 0, false))),
            ((1, (Strategy::Replicated, 0, false)), (4, (Strategy::Zero, 0, false))),
            ((3, (Strategy::Fsdp, 0, false)), (2, (Strategy::Replicated, 0, false))),
            ((2, (Strategy::Zero, 0, false)), (5, (Strategy::Fsdp, 0, false))),
            ((4, (Strategy::Fsdp, 0, false)), (1, (Strategy::Fsdp, 0, false))),
            ((4, (Strategy::Zero, 2, false)), (3, (Strategy::Fsdp, 0, false))),
            ((6, (Strategy::Fsdp, 3, false)), (4, (Strategy::Zero, 2, false))),
            ((1, (Strategy::Replicated, 0, false)), (4, (Strategy::Fsdp, 2, false))),
            ((4, (Strategy::Fsdp, 1, false)), (2, (Strategy::Replicated, 0, false))),
            ((3, (Strategy::Fsdp, 0, true)), (2, (Strategy::Zero, 0, false))),
            ((2, (Strategy::Replicated, 0, false)), (3, (Strategy::Fsdp, 0, true))),
            ((4, (Strategy::Zero, 2, true)), (3, (Strategy::Replicated, 0, true))),
            ((2, (Strategy::Replicated, 0, true)), (1, (Strategy::Zero, 0, true))),
        ] {
            in_process(saved.0, |comm| {
                let mut stepper = open(saved.1, comm)?;
                passes(&mut stepper, 0)?;
                checkpoint::save(&stepper, &path)
            })
            .unwrap();
            let ends = in_process(loaded.0, |comm| {
                let mut stepper = open(loaded.1, comm)?;
                checkpoint::load(&mut stepper, &path)?;
                passes(&mut stepper, 3)?;
                Outcome::of(&stepper)
            });
            for end in ends.unwrap() {
                end.assert_same(&whole[0], &format!("{saved:?} to {loaded:?}, {precision:?}"));
            }
        }
    }
}
