//! Ranks that step shards, or step in the host's memory, have the bits of ranks that step everything in place: states,
//! gradients, decisions and counts.
//!
//! Gradients are small dyadic numbers, so every sum over ranks is exact. Shapes are uneven: shards begin inside
//! parameters, and some parameters and shards are empty.

use std::num::NonZeroU32;
use std::sync::LazyLock;

use instep::{
    Accumulation, Adam, AdamW, Clip, DType, Divisor, Error, Gradients, Lamb, Layout, LossScale, LossScaler,
    Master, Mode, Moments, OffloadPolicy, ParamId, Precision, Result, Sgd, Stepper, StepperBuilder, Strategy,
    Unused, bf16, in_process,
};

use crate::support::{self, MODES, Outcome, assert_same_bits, optimizers, paint};

pub(crate) const LENS: [usize; 6] = [17 * 257, 17, 64 * 312, 1, 0, 700];

pub(crate) fn layout() -> &'static Layout {
    static LAYOUT: LazyLock<Layout> = LazyLock::new(|| support::layout(&LENS));
    &LAYOUT
}

/// Returns multiples of 1/64 below 2: sums of eight are exact in f32, and in f16 and bf16 the sums have enough bits
/// too.
pub(crate) fn gradient(step: usize, rank: usize, param: usize, element: usize) -> f32 {
    let n = (step * 31 + rank * 57 + param * 17 + element * 13) % 251;
    (n as f32 - 125.0) / 64.0
}

/// The events of a training's passes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Course {
    /// In odd passes p1 is unused on all ranks, and p3 on odd ranks.
    pub(crate) leaves_out: bool,
    /// p5 is frozen from the second pass to the fourth.
    pub(crate) freezes: bool,
    /// The third pass has an infinite gradient on the last rank.
    pub(crate) overflows: bool,
    /// Odd ranks have no data after three passes.
    pub(crate) joins: bool,
    pub(crate) micro_batches: u32,
    /// Sharded ranks sum each micro-batch.
    pub(crate) summed: bool,
    /// Parameters are stored in bf16.
    pub(crate) reads_bf16: bool,
}

impl Course {
    fn leaves_out(&self, step: usize, rank: usize, param: usize) -> bool {
        self.leaves_out && step % 2 == 1 && (param == 1 || param == 3 && rank % 2 == 1)
    }
}

const STEPS: usize = 5;

pub(crate) fn bucket_of(stepper: &Stepper, id: ParamId) -> Result<u32> {
    Ok(stepper.plan().segment_of(stepper.layout().index(id)?).bucket)
}

/// Reads all parameters as a forward does, one bucket ahead, and reshards some buckets. Does nothing on ranks that have
/// all parameters.
fn walk(stepper: &mut Stepper, step: usize, reads_bf16: bool) -> Result<()> {
    let layout = stepper.layout().clone();
    let buckets = stepper.plan().buckets().len() as u32;
    for id in layout.ids() {
        let bucket = bucket_of(stepper, id)?;
        stepper.unshard(bucket)?;
        stepper.unshard(bucket.saturating_sub(1))?;
        if reads_bf16 {
            stepper.view::<bf16>(id).map(drop)?
        } else {
            stepper.view::<f32>(id).map(drop)?
        }
        if (bucket as usize + step).is_multiple_of(2) {
            stepper.reshard(bucket)?;
            let again = (bucket + 1) % buckets;
            stepper.unshard(again)?;
        }
    }
    Ok(())
}

/// Trains, asserts that there is no race, and returns the outcome with the decisions of each pass.
fn train(mut stepper: Stepper, course: Course) -> Result<(Outcome, Vec<String>)> {
    let layout = stepper.layout().clone();
    let (rank, ranks) = (stepper.rank() as usize, stepper.world_size() as usize);
    for (param, id) in layout.ids().enumerate() {
        let values: Vec<f32> = (0..LENS[param]).map(|k| paint(param, k)).collect();
        stepper.write(id, &values)?;
    }
    let mut decisions = Vec::new();
    for step in 0..STEPS {
        let frozen = layout.id("p5")?;
        if course.freezes && (step == 1 || step == 4) {
            stepper.set_frozen(frozen, step == 1)?;
        }
        if course.joins && step >= 3 && rank % 2 == 1 {
            assert!(stepper.join()?);
            decisions.push(format!("{:?}", stepper.status()?));
            continue;
        }
        let micro_batches = NonZeroU32::new(course.micro_batches.max(1)).unwrap();
        walk(&mut stepper, step, course.reads_bf16)?;
        let mut pass = stepper.begin_accumulating(micro_batches)?;
        for micro_batch in 0..micro_batches.get() as usize {
            walk(&mut pass, step + micro_batch, course.reads_bf16)?;
            for (param, id) in layout.ids().enumerate().rev() {
                if pass.is_frozen(frozen)? && !course.reads_bf16 {
                    match pass.view::<f32>(frozen) {
                        Err(Error::Order(refusal)) => {
                            assert!(refusal.wrong.contains("not unsharded"), "{refusal}")
                        }
                        read => drop(read?),
                    }
                }
                if course.leaves_out(step + micro_batch, rank, param) || pass.is_frozen(id)? {
                    continue;
                }
                let mut values: Vec<f32> =
                    (0..LENS[param]).map(|k| gradient(step + 7 * micro_batch, rank, param, k)).collect();
                if course.overflows && step == 2 && rank + 1 == ranks && param == 2 {
                    values[9000] = f32::INFINITY;
                }
                pass.grads().add(id, &values)?;
                pass.grad_ready(id)?;
            }
            if micro_batch + 1 < micro_batches.get() as usize {
                pass.next_micro_batch()?;
            }
        }
        pass.finish()?;
        decisions.push(format!("{:?}", stepper.status()?));
    }
    if course.joins {
        assert!(!stepper.join()?);
    }
    let outcome = Outcome::of(&stepper)?;
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), [], "{course:?}");
    stepper.close()?;
    Ok((outcome, decisions))
}

/// What ranks shard, and whether steps run on the host; each is compared with [`Strategy::Replicated`] without offload.
pub(crate) const WAYS: [(Strategy, bool); 5] = [
    (Strategy::Zero, false),
    (Strategy::Fsdp, false),
    (Strategy::Replicated, true),
    (Strategy::Zero, true),
    (Strategy::Fsdp, true),
];

/// Returns a builder with or without offload.
pub(crate) fn offloading(builder: StepperBuilder<'_>, offloads: bool) -> StepperBuilder<'_> {
    if offloads { builder.offload(OffloadPolicy::default()) } else { builder }
}

/// Asserts, for each strategy, that every rank's outcome is that of its replicated counterpart, gradients and decisions
/// included.
pub(crate) fn assert_same_bits_each_way(
    ranks: u32,
    course: Course,
    what: &str,
    ways: &[(Strategy, bool)],
    builder: impl Fn() -> StepperBuilder<'static> + Sync,
) {
    assert_same((ranks, None), course, what, ways, &builder);
}

/// Asserts the same with groups of ranks that shard tensors.
pub(crate) fn assert_same_bits_in_groups(
    ranks: (u32, Option<NonZeroU32>),
    course: Course,
    what: &str,
    builder: impl Fn() -> StepperBuilder<'static> + Sync,
) {
    let ways = WAYS.into_iter().filter(|(strategy, _)| *strategy != Strategy::Replicated);
    assert_same(ranks, course, what, &ways.collect::<Vec<_>>(), &builder);
}

/// Asserts the same for these strategies.
pub(crate) fn assert_same(
    (ranks, shard_size): (u32, Option<NonZeroU32>),
    course: Course,
    what: &str,
    ways: &[(Strategy, bool)],
    builder: &(dyn Fn() -> StepperBuilder<'static> + Sync),
) {
    let run = |(strategy, offloads)| {
        let builder = || match shard_size {
            Some(ranks) if strategy != Strategy::Replicated => builder().shard_size(ranks),
            _ => builder(),
        };
        let one = |comm| {
            let mut builder = offloading(builder().record(true).strategy(strategy), offloads);
            if course.summed && strategy != Strategy::Replicated {
                builder = builder.accumulation(Accumulation::Summed);
            }
            train(builder.host(comm)?, course)
        };
        let what = format!("{what}, {ranks} ranks, {strategy:?}, offload {offloads}");
        in_process(ranks, one).unwrap_or_else(|error| panic!("{what}: {error}"))
    };
    let whole = run((Strategy::Replicated, false));
    // A rank without data would not know what to unshard.
    let ways = ways.iter().filter(|(strategy, _)| !course.joins || *strategy != Strategy::Fsdp);
    for way in ways {
        for (rank, ((whole, decided), (outcome, shared))) in whole.iter().zip(&run(*way)).enumerate() {
            let what = format!("{what}, {way:?} of {shard_size:?}, rank {rank} of {ranks}, {course:?}");
            outcome.assert_same(whole, &what);
            assert_eq!(decided, shared, "{what}");
            // The gradients of a joined or skipped pass are the last ones, and sums like all others.
            for (param, (ours, theirs)) in outcome.grads.iter().zip(&whole.grads).enumerate() {
                assert_same_bits(ours, theirs, &format!("gradient of p{param}: {what}"));
            }
        }
    }
}

#[test]
fn shards_have_the_bits_of_whole_steps_with_one_to_eight_ranks() {
    for ranks in 1..=8 {
        let mode = MODES[ranks as usize % 3];
        let course = Course { leaves_out: true, ..Course::default() };
        assert_same_bits_each_way(ranks, course, &format!("{mode:?}"), &WAYS, || {
            Stepper::builder(layout(), Adam { amsgrad: true, ..Adam::default() })
                .mode(mode)
                .bucket_cap_bytes(30_000)
        });
    }
}

#[test]
fn every_optimizer_steps_shards_to_the_same_bits() {
    let mut seen = Vec::new();
    for optim in optimizers() {
        if seen.contains(&optim.descriptor.key()) {
            continue;
        }
        seen.push(optim.descriptor.key());
        assert_same_bits_each_way(3, Course::default(), &format!("{optim:?}"), &WAYS, || {
            optim.builder(layout())
        });
    }
    assert_eq!(seen.len(), instep::optim::ALL.len());
}

#[test]
fn clipping_skipping_and_loss_scaling_decide_as_whole_steps_do() {
    let scaler = LossScaler { initial_scale: 1024.0, growth_interval: 2, ..LossScaler::default() };
    let course = Course { overflows: true, leaves_out: true, ..Course::default() };
    let adamw = || Stepper::builder(layout(), AdamW::default()).bucket_cap_bytes(20_000);
    for mode in [Mode::Sequential, Mode::Normed] {
        assert_same_bits_each_way(4, course, "clip and skip", &WAYS, || {
            adamw().mode(mode).clip(Clip::Global(0.5)).skip_nonfinite(true)
        });
        assert_same_bits_each_way(3, course, "loss scale", &WAYS, || {
            adamw().mode(mode).clip(Clip::Global(0.5)).loss_scale(LossScale::Dynamic(scaler))
        });
    }
    for mode in MODES {
        let finite = Course { overflows: false, ..course };
        assert_same_bits_each_way(2, finite, "previous norm", &WAYS, || {
            adamw().mode(mode).clip(Clip::Previous(0.5))
        });
        assert_same_bits_each_way(3, finite, "each bucket", &WAYS, || {
            adamw().mode(mode).clip(Clip::PerBucket(0.25)).loss_scale(8.0)
        });
    }
}

#[test]
fn groups_that_are_clipped_apart_decide_as_whole_steps_do() {
    static LAYOUT: LazyLock<Layout> = LazyLock::new(|| support::grouped(&LENS));
    let scaler = LossScaler { initial_scale: 1024.0, growth_interval: 2, ..LossScaler::default() };
    let course = Course { overflows: true, leaves_out: true, freezes: true, ..Course::default() };
    for mode in [Mode::Sequential, Mode::Normed] {
        let clipped = |builder| support::with_group_clips(builder).mode(mode).bucket_cap_bytes(20_000);
        assert_same_bits_each_way(3, course, "groups, skip", &WAYS, || {
            clipped(Stepper::builder(&LAYOUT, AdamW::default())).skip_nonfinite(true)
        });
        assert_same_bits_each_way(2, course, "groups, loss scale", &WAYS, || {
            clipped(Stepper::builder(&LAYOUT, Lamb::default())).loss_scale(LossScale::Dynamic(scaler))
        });
        let joined = Course { overflows: false, freezes: false, joins: true, ..course };
        assert_same_bits_each_way(4, joined, "groups, uneven", &WAYS, || {
            clipped(Stepper::builder(&LAYOUT, Adam::default())).uneven_inputs(Divisor::ContributingRanks)
        });
    }
}

#[test]
fn unused_frozen_accumulated_and_joined_passes_are_those_of_whole_steps() {
    let course = Course { leaves_out: true, freezes: true, ..Course::default() };
    for (mode, unused) in MODES.into_iter().zip([Unused::Skip, Unused::StepZero, Unused::Skip]) {
        let builder = || {
            let sgd = Sgd { momentum: 0.9, weight_decay: 0.1, ..Sgd::default() };
            Stepper::builder(layout(), sgd).mode(mode).unused(unused).bucket_cap_bytes(20_000)
        };
        assert_same_bits_each_way(3, course, &format!("{mode:?}, {unused:?}"), &WAYS, builder);
        let accumulated = Course { leaves_out: false, micro_batches: 2, ..course };
        assert_same_bits_each_way(2, accumulated, &format!("{mode:?}, accumulated"), &WAYS, builder);
        for divisor in [Divisor::WorldSize, Divisor::ContributingRanks] {
            let joined = Course { joins: true, ..course };
            assert_same_bits_each_way(4, joined, &format!("{mode:?}, {divisor:?}"), &WAYS, || {
                builder().uneven_inputs(divisor)
            });
        }
    }
}

#[test]
fn copies_averages_and_gradient_policies_are_those_of_whole_steps() {
    for gradients in [Gradients::Zero, Gradients::Average] {
        for mode in MODES {
            let builder = || Stepper::builder(layout(), AdamW::default()).mode(mode).gradients(gradients);
            let what = format!("{gradients:?}");
            assert_same_bits_each_way(3, Course::default(), &what, &WAYS[..2], || {
                builder().copy_params(DType::BF16).ema(0.9).bucket_cap_bytes(20_000)
            });
            if gradients != Gradients::Average {
                assert_same_bits_each_way(2, Course::default(), &what, &WAYS[2..], || {
                    builder().ema(0.9).bucket_cap_bytes(20_000)
                });
            }
        }
    }
}

#[test]
fn steps_on_the_host_have_the_bits_of_steps_in_place_in_every_precision() {
    let low = Precision { param: DType::BF16, grad: DType::F32, ..Precision::F32 };
    for (k, (master, moments)) in [
        (Master::F32, Moments::F32),
        (Master::Remainder16, Moments::EightBit),
        (Master::None, Moments::BF16),
        (Master::F32, Moments::EightBit),
    ]
    .into_iter()
    .enumerate()
    {
        let precision = Precision { master, moments, ..low };
        let course = Course { leaves_out: true, freezes: true, reads_bf16: true, ..Course::default() };
        assert_same_bits_each_way(1 + k as u32, course, &format!("{precision:?}"), &WAYS[2..], || {
            Stepper::builder(layout(), AdamW::default())
                .mode(MODES[k % 3])
                .precision(precision)
                .bucket_cap_bytes(20_000)
        });
    }
}
