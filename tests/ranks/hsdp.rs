//! Groups of ranks shard tensors, with replicas in the other groups: the bits of ranks without shards, the calls in
//! each group, the bytes on each rank, and refusals.
//!
//! `zero.rs` has the training and the comparison. Checkpoints and failures of such ranks are in `zero_shares.rs` and
//! `zero_failures.rs`.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use instep::collective::CollectiveKind;
use instep::hazard::Traced;
use instep::op::{Action, Group, Op};
use instep::{
    AdamW, Clip, Collective, DType, Divisor, Error, InProcess, Lamb, LossScale, LossScaler, Master, Mode,
    Precision, Result, Sgd, Stepper, StepperBuilder, Strategy, TensorId, Unused, in_process,
};

use crate::ranks::zero::{
    Course, LENS, WAYS, assert_same, assert_same_bits_in_groups, bucket_of, gradient, layout,
};
use crate::support::MODES;
use crate::support::waits::{assert_each_is_missed, middle_passes};

fn of(ranks: u32) -> NonZeroU32 {
    NonZeroU32::new(ranks).unwrap()
}

fn adamw() -> StepperBuilder<'static> {
    Stepper::builder(layout(), AdamW::default()).bucket_cap_bytes(20_000)
}

#[test]
fn groups_have_the_bits_of_whole_steps() {
    let sizes = [(1, 1), (2, 1), (3, 1), (3, 3), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4)];
    for (k, (ranks, shard_size)) in sizes.into_iter().enumerate() {
        let course = Course { leaves_out: true, freezes: k % 2 == 0, ..Course::default() };
        let (mode, ranks) = (MODES[k % 3], (ranks, Some(of(shard_size))));
        assert_same_bits_in_groups(ranks, course, &format!("{mode:?}"), || adamw().mode(mode));
        let lamb = Lamb { lr: 0.25, weight_decay: 0.0625, ..Lamb::default() };
        assert_same_bits_in_groups(ranks, course, &format!("lamb, {mode:?}"), || {
            let sgd = Sgd { momentum: 0.5, ..Sgd::default() };
            let ids: Vec<_> = layout().ids().collect();
            Stepper::builder(layout(), lamb).optimizer_for(&[ids[1], ids[5]], sgd).mode(mode)
        });
    }
}

#[test]
fn a_group_of_one_has_whole_tensors_to_read() {
    let layout = instep::Layout::builder().param("w", 700).build().unwrap();
    let id = layout.id("w").unwrap();
    for strategy in [Strategy::Zero, Strategy::Fsdp] {
        in_process(2, |comm| {
            let mut stepper = Stepper::builder(&layout, AdamW::default())
                .precision(Precision { param: DType::BF16, master: Master::F32, ..Precision::F32 })
                .strategy(strategy)
                .shard_size(of(1))
                .host(comm)?;
            let mut pass = stepper.begin()?;
            pass.write(id.grad(), &[1.0; 700])?;
            pass.finish()?;
            stepper.unshard(0)?;
            let mut values = [[0.0; 700]; 3];
            for (tensor, values) in
                [TensorId::from(id), id.state("exp_avg"), id.grad()].into_iter().zip(&mut values)
            {
                stepper.read(tensor, values)?;
                let mut gathered = [0.0; 700];
                stepper.gather(tensor, &mut gathered)?;
                assert_eq!(&gathered, values, "{strategy:?}");
            }
            assert_eq!(values[2], [2.0; 700], "{strategy:?}");
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn groups_decide_as_whole_steps_do() {
    let scaler = LossScaler { initial_scale: 1024.0, growth_interval: 2, ..LossScaler::default() };
    let course = Course { overflows: true, leaves_out: true, ..Course::default() };
    for (ranks, shard_size) in [(4, 2), (6, 3), (6, 2), (3, 1)] {
        let ranks = (ranks, Some(of(shard_size)));
        for mode in [Mode::Sequential, Mode::Normed] {
            assert_same_bits_in_groups(ranks, course, "clip and skip", || {
                adamw().mode(mode).clip(Clip::Global(0.5)).skip_nonfinite(true)
            });
            assert_same_bits_in_groups(ranks, course, "loss scale", || {
                adamw().mode(mode).clip(Clip::Global(0.5)).loss_scale(LossScale::Dynamic(scaler))
            });
        }
        let finite = Course { overflows: false, ..course };
        for mode in MODES {
            assert_same_bits_in_groups(ranks, finite, "each bucket", || {
                adamw().mode(mode).clip(Clip::PerBucket(0.25)).loss_scale(8.0)
            });
        }
        assert_same_bits_in_groups(ranks, finite, "previous norm", || adamw().clip(Clip::Previous(0.5)));
    }
}

#[test]
fn accumulated_uneven_and_copied_passes_of_groups_are_those_of_whole_steps() {
    for ((ranks, shard_size), mode) in [(4, 2), (6, 2), (6, 3)].into_iter().zip(MODES) {
        let ranks = (ranks, Some(of(shard_size)));
        let accumulated = Course { micro_batches: 2, freezes: true, ..Course::default() };
        assert_same(ranks, accumulated, "accumulated", &WAYS[..2], &|| {
            adamw().mode(mode).unused(Unused::StepZero).copy_params(DType::BF16).ema(0.9)
        });
        for divisor in [Divisor::WorldSize, Divisor::ContributingRanks] {
            let joined = Course { joins: true, leaves_out: true, ..Course::default() };
            assert_same_bits_in_groups(ranks, joined, &format!("{divisor:?}"), || {
                adamw().mode(mode).uneven_inputs(divisor)
            });
        }
    }
}

#[test]
fn a_bucket_is_reduced_among_neighbours_then_among_replicas_and_every_wait_is_needed() {
    for (strategy, mode) in
        [Strategy::Zero, Strategy::Fsdp].into_iter().flat_map(|strategy| MODES.map(|mode| (strategy, mode)))
    {
        let lists = in_process(6, |comm| {
            let rank = comm.rank();
            let builder = Stepper::builder(layout(), AdamW::default()).mode(mode).strategy(strategy);
            let mut stepper = builder.shard_size(of(3)).record(true).bucket_cap_bytes(1000).host(comm)?;
            for step in 0..5 {
                for id in layout().ids() {
                    let bucket = bucket_of(&stepper, id)?;
                    stepper.unshard(bucket)?;
                    stepper.view::<f32>(id)?;
                    stepper.reshard(bucket)?;
                }
                let mut pass = stepper.begin()?;
                for (param, id) in layout().ids().enumerate().rev() {
                    pass.grads().get_mut(id)?.fill(gradient(step, 0, param, 0));
                    pass.grad_ready(id)?;
                }
                pass.finish()?;
            }
            let recording = stepper.take_recording().unwrap();
            let plan = stepper.plan();
            assert_eq!(stepper.check(&recording), []);
            assert_eq!((plan.shards(), plan.replicas()), ((3, rank % 3), 2));
            let kept = plan.buckets().iter().map(|bucket| bucket.shard.clone()).collect::<Vec<_>>();
            if strategy == Strategy::Zero {
                let range = middle_passes(&recording.list);
                assert_each_is_missed(plan, 2, &recording.list, range, 8, &format!("{mode:?}"));
            }
            Ok((recording.list, kept))
        });
        let lists = lists.unwrap();
        assert!(
            (0..3).all(|rank| lists[rank].1 == lists[rank + 3].1 && lists[rank].1 != lists[(rank + 1) % 3].1)
        );
        for (list, buckets) in lists {
            let calls: Vec<(CollectiveKind, Group)> = list.iter().filter_map(collective).collect();
            let count = |kind, group| calls.iter().filter(|call| **call == (kind, group)).count();
            assert_eq!(count(CollectiveKind::ReduceScatter, Group::Shards), 5 * buckets.len());
            assert_eq!(count(CollectiveKind::AllReduce, Group::Replicas), 5 * buckets.len());
            let reduced = calls.windows(2).filter(|pair| pair[0].0 == CollectiveKind::ReduceScatter);
            assert!({ reduced }.all(|pair| pair[1] == (CollectiveKind::AllReduce, Group::Replicas)));
            assert!(count(CollectiveKind::AllGather, Group::Shards) >= 5 * buckets.len());
            // Counts of ranks are of the whole world.
            assert_eq!(count(CollectiveKind::AllReduce, Group::World), 5 * buckets.len());
        }
    }
}

fn collective(entry: &Traced) -> Option<(CollectiveKind, Group)> {
    match entry {
        Traced::Op(Op { action: Action::Collective { kind, group, .. }, .. }) => Some((*kind, *group)),
        _ => None,
    }
}

/// A rank of a group keeps as much as a rank without further groups, and gathers full tensors from its neighbours.
#[test]
fn a_rank_keeps_what_a_rank_of_its_group_alone_would_keep() {
    for strategy in [Strategy::Zero, Strategy::Fsdp] {
        let run = |ranks: u32| {
            in_process(ranks, |comm| {
                let builder = adamw().unused(Unused::StepZero).strategy(strategy);
                let mut stepper = builder.shard_size(of(2)).host(comm)?;
                for (param, id) in layout().ids().enumerate() {
                    stepper.write(id, &vec![1.0; LENS[param]])?;
                }
                let mut pass = stepper.begin()?;
                for id in layout().ids() {
                    pass.grads().get_mut(id)?.fill(0.5);
                }
                pass.finish()?;
                let (id, mut moments) = (layout().id("p0")?, vec![0.0; LENS[0]]);
                stepper.gather(id.state("exp_avg"), &mut moments)?;
                let mut sums = vec![0.0; LENS[0]];
                stepper.gather(id.grad(), &mut sums)?;
                Ok((stepper.memory(), moments, sums))
            })
            .unwrap()
        };
        let (alone, groups) = (run(2), run(6));
        for (rank, (memory, moments, sums)) in groups.iter().enumerate() {
            assert_eq!((memory, moments), (&alone[rank % 2].0, &alone[0].1), "rank {rank}, {strategy:?}");
            assert!(sums.iter().all(|sum| *sum == 3.0));
        }
    }
}

/// A collective that passes on all calls, but makes no groups.
struct WithoutGroups(InProcess);

impl Collective for WithoutGroups {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn world_size(&self) -> u32 {
        self.0.world_size()
    }

    fn supports(&self, _: CollectiveKind) -> bool {
        true
    }

    fn duplicate(&self) -> Result<std::sync::Arc<dyn Collective>> {
        self.0.duplicate()
    }

    fn enqueue(&self, call: &mut instep::collective::Call<'_>) -> Result<()> {
        self.0.enqueue(call)
    }

    fn abort(&self, cause: &Error) {
        self.0.abort(cause);
    }
}

#[test]
fn groups_that_cannot_be_are_refused_by_name() {
    let refusals = in_process(4, |comm| {
        let zero = |ranks| adamw().strategy(Strategy::Zero).shard_size(of(ranks));
        let told = [
            zero(3).host(comm.split()).unwrap_err(),
            zero(8).host(comm.split()).unwrap_err(),
            adamw().shard_size(of(2)).host(comm.split()).unwrap_err(),
            zero(2).host(WithoutGroups(comm)).unwrap_err(),
        ];
        Ok(told.map(|error| error.to_string()))
    });
    let words = ["shard_size = 3", "shard_size = 8", "use Strategy::Zero", "cannot make groups"];
    for told in refusals.unwrap() {
        for (told, word) in told.iter().zip(words) {
            assert!(told.contains(word), "{told}");
        }
    }
}

#[test]
fn ranks_of_different_groups_or_of_different_values_are_told() {
    let errors = in_process(4, |comm| {
        let shard_size = if comm.rank() == 3 { 4 } else { 2 };
        let mut stepper = adamw().strategy(Strategy::Zero).shard_size(of(shard_size)).host(comm)?;
        stepper.begin()?.finish()?;
        stepper.status().map(drop)
    });
    let told = errors.unwrap_err().to_string();
    // Rank 3 meets one of the pairs, whichever comes first.
    let pair = told.contains("[0, 1]") || told.contains("[2, 3]");
    assert!(told.contains("the ranks of a group") && told.contains("[0, 1, 2, 3]") && pair, "{told}");
    // Neighbours have written the same, and the other group's ranks something else.
    let written = in_process(4, |comm| {
        let of_group = (comm.rank() / 2) as f32;
        let mut stepper = adamw().strategy(Strategy::Fsdp).shard_size(of(2)).host(comm)?;
        let id = layout().id("p5")?;
        stepper.write(id, &[of_group; LENS[5]])?;
        let mut pass = stepper.begin()?;
        pass.grads().get_mut(id)?.fill(1.0);
        let end = pass.finish().and_then(|()| stepper.status().map(drop));
        Ok(end.unwrap_err().to_string())
    });
    for told in written.unwrap() {
        assert!(told.contains("loaded"), "{told}");
    }
}

/// A pass waits for ranks on three communicators: two ranks that waited on different ones would both wait for their
/// deadlines.
#[test]
fn ranks_that_differ_in_what_they_wrote_or_froze_are_told_before_any_deadline() {
    for strategy in [Strategy::Zero, Strategy::Fsdp] {
        for (freezes, who) in [[2, 3].as_slice(), &[0, 1], &[3], &[0], &[1, 2]]
            .into_iter()
            .flat_map(|who| [(false, who), (true, who)])
        {
            if freezes && strategy == Strategy::Fsdp {
                continue;
            }
            let since = Instant::now();
            let ends = in_process(4, |comm| {
                let differs = who.contains(&comm.rank());
                let builder = Stepper::builder(layout(), AdamW::default()).bucket_cap_bytes(1);
                let builder =
                    if freezes { builder.uneven_inputs(Divisor::ContributingRanks) } else { builder };
                let mut stepper = builder.strategy(strategy).shard_size(of(2)).host(comm)?;
                let (id, other) = (layout().id("p5")?, layout().id("p0")?);
                for differs in [false, differs] {
                    match freezes {
                        true => stepper.set_frozen(id, differs)?,
                        false if differs => stepper.write(id, &[1.0; LENS[5]])?,
                        false => {}
                    }
                    let mut pass = stepper.begin()?;
                    pass.grads().get_mut(other)?.fill(1.0);
                    let end = pass.finish().and_then(|()| stepper.status().map(drop));
                    if let Err(error) = end {
                        return Ok(error);
                    }
                }
                Ok(Error::Hook("no rank has noticed".into()))
            });
            // A rank may meet the failure in its first pass still.
            let what = format!("{strategy:?}, freezes {freezes}, {who:?}: {ends:?}");
            let errors = ends.unwrap_or_else(|error| vec![error]);
            assert!(errors.iter().all(|error| matches!(error.cause(), Error::Mismatch { .. })), "{what}");
            assert!(since.elapsed() < Duration::from_secs(50), "a deadline ended it, {what}");
        }
    }
}
