//! LAMB on ranks that step shards: norms of full parameters scale its change, and ranks add them up in the step.
//!
//! `zero.rs` has the training and the comparison with steps of full parameters. Buckets contain other optimizers beside
//! LAMB, several optimizers step one parameter, and norms may be infinite.

use instep::collective::CollectiveKind;
use instep::hazard::Traced;
use instep::op::{Action, Op, Stream};
use instep::{
    AdamW, Clip, DType, Error, Gradients, Lamb, LossScale, LossScaler, Master, Mode, Moments, ParamId,
    Precision, Result, Sgd, Stepper, StepperBuilder, Strategy, in_process,
};

use crate::ranks::zero::{Course, LENS, WAYS, assert_same_bits_each_way, bucket_of, gradient, layout};
use crate::support::waits::{assert_each_is_missed, middle_passes};
use crate::support::{MODES, assert_same_bits, paint};

fn ids() -> Vec<ParamId> {
    layout().ids().collect()
}

fn lamb() -> Lamb {
    Lamb { lr: 0.25, weight_decay: 0.0625, ..Lamb::default() }
}

/// Returns a builder with LAMB for all but two parameters, which an optimizer without norms steps in the same buckets.
fn mixed() -> StepperBuilder<'static> {
    let ids = ids();
    let others = Sgd { momentum: 0.5, ..Sgd::default() };
    Stepper::builder(layout(), lamb()).optimizer_for(&[ids[1], ids[5]], others)
}

#[test]
fn lamb_steps_shards_to_the_bits_of_whole_steps_with_one_to_eight_ranks() {
    for ranks in 1..=8 {
        let mode = MODES[ranks as usize % 3];
        let course = Course { leaves_out: true, freezes: ranks % 2 == 0, ..Course::default() };
        assert_same_bits_each_way(ranks, course, &format!("{mode:?}"), &WAYS, || {
            Stepper::builder(layout(), lamb()).mode(mode).bucket_cap_bytes(30_000)
        });
        assert_same_bits_each_way(ranks, course, &format!("mixed, {mode:?}"), &WAYS, || mixed().mode(mode));
    }
}

#[test]
fn lamb_decides_and_scales_as_whole_steps_do() {
    let scaler = LossScaler { initial_scale: 1024.0, growth_interval: 2, ..LossScaler::default() };
    let course = Course { overflows: true, leaves_out: true, ..Course::default() };
    for mode in MODES {
        // Without a decision an infinite gradient is stepped, as IEEE says.
        assert_same_bits_each_way(3, course, "stepped", &WAYS, || {
            mixed().mode(mode).bucket_cap_bytes(20_000)
        });
        let finite = Course { overflows: false, micro_batches: 2, ..Course::default() };
        assert_same_bits_each_way(2, finite, "each bucket", &WAYS, || {
            mixed().mode(mode).clip(Clip::PerBucket(0.25)).bucket_cap_bytes(20_000)
        });
    }
    for mode in [Mode::Sequential, Mode::Normed] {
        assert_same_bits_each_way(4, course, "clip, skip and scale", &WAYS, || {
            mixed().mode(mode).clip(Clip::Global(0.5)).loss_scale(LossScale::Dynamic(scaler))
        });
    }
    let joined = Course { joins: true, leaves_out: true, ..Course::default() };
    assert_same_bits_each_way(4, joined, "uneven", &WAYS, || {
        mixed().uneven_inputs(instep::Divisor::ContributingRanks)
    });
}

#[test]
fn parameters_with_several_optimizers_stop_at_each_lamb() {
    for gradients in [Gradients::Keep, Gradients::Average] {
        for mode in MODES {
            assert_same_bits_each_way(
                3,
                Course::default(),
                &format!("{mode:?}, {gradients:?}"),
                &WAYS[..2],
                || {
                    let ids = ids();
                    let twice = mixed().optimizer_for(&[ids[0], ids[3]], lamb()).then_for(&[ids[0]], lamb());
                    let then = twice.then_for(&[ids[5]], lamb()).then_for(&[ids[3]], AdamW::default());
                    then.gradients(gradients).copy_params(DType::BF16).ema(0.75).mode(mode)
                },
            );
        }
    }
}

#[test]
fn lamb_in_low_precision_steps_shards_to_the_same_bits() {
    let of = |param, master, moments| Precision { param, master, moments, ..Precision::F32 };
    for precision in [
        of(DType::BF16, Master::F32, Moments::EightBit),
        of(DType::BF16, Master::Remainder16, Moments::BF16),
        of(DType::F32, Master::None, Moments::EightBit),
    ] {
        for (gradients, strategy) in [(Gradients::Release, Strategy::Zero), (Gradients::Zero, Strategy::Fsdp)]
        {
            let run = |strategy, gradients| {
                in_process(3, |comm| {
                    let builder = mixed().precision(precision).strategy(strategy).gradients(gradients);
                    let mut stepper = builder.bucket_cap_bytes(20_000).host(comm)?;
                    fill(&stepper.layout().clone(), |id, values| stepper.write(id, &values))?;
                    for step in 0..4 {
                        pass(&mut stepper, step)?;
                    }
                    gathered(&stepper)
                })
                .unwrap()
            };
            let (whole, shared) = (run(Strategy::Replicated, Gradients::Keep), run(strategy, gradients));
            for (rank, (ours, theirs)) in shared.iter().zip(&whole).enumerate() {
                for (param, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
                    assert_same_bits(ours, theirs, &format!("p{param} of rank {rank}, {precision:?}"));
                }
            }
        }
    }
}

/// Each of three ranks finds an infinity in its shard of one parameter. The norm is then infinite, and the ratio 1.
#[test]
fn infinities_on_several_ranks_are_no_finite_norm_together() {
    for infinite in [1, 2, 3] {
        let run = |strategy| {
            in_process(3, |comm| {
                let mut stepper =
                    Stepper::builder(layout(), lamb()).strategy(strategy).bucket_cap_bytes(1).host(comm)?;
                fill(&stepper.layout().clone(), |id, mut values| {
                    let part = values.len() / 3;
                    if part > 256 {
                        (0..infinite).for_each(|rank| values[rank * part + 1] = f32::INFINITY);
                    }
                    stepper.write(id, &values)
                })?;
                (0..3).try_for_each(|step| pass(&mut stepper, step))?;
                gathered(&stepper)
            })
            .unwrap()
        };
        let whole = run(Strategy::Replicated);
        assert!(whole[0][2].iter().any(|x| x.is_finite()));
        for strategy in [Strategy::Zero, Strategy::Fsdp] {
            for (param, (ours, theirs)) in run(strategy)[1].iter().zip(&whole[1]).enumerate() {
                assert_same_bits(ours, theirs, &format!("p{param}, {infinite} infinite, {strategy:?}"));
            }
        }
    }
}

fn fill(layout: &instep::Layout, mut write: impl FnMut(ParamId, Vec<f32>) -> Result<()>) -> Result<()> {
    layout
        .ids()
        .enumerate()
        .try_for_each(|(param, id)| write(id, (0..LENS[param]).map(|k| paint(param, k)).collect()))
}

fn pass(stepper: &mut Stepper, step: usize) -> Result<()> {
    let rank = stepper.rank() as usize;
    let mut pass = stepper.begin()?;
    for (param, id) in layout().ids().enumerate().rev() {
        pass.write(
            id.grad(),
            &(0..LENS[param]).map(|k| gradient(step, rank, param, k)).collect::<Vec<f32>>(),
        )?;
        pass.grad_ready(id)?;
    }
    pass.finish()
}

fn gathered(stepper: &Stepper) -> Result<Vec<Vec<f32>>> {
    let one = |(param, id): (usize, ParamId)| {
        let mut values = vec![0.0; LENS[param]];
        stepper.gather(id, &mut values)?;
        Ok(values)
    };
    layout().ids().enumerate().map(one).collect()
}

#[test]
fn a_step_shares_norms_once_per_bucket_and_every_wait_is_needed() {
    for (strategy, mode) in
        [Strategy::Zero, Strategy::Fsdp].into_iter().flat_map(|strategy| MODES.map(|mode| (strategy, mode)))
    {
        let lists = in_process(3, |comm| {
            let builder = Stepper::builder(layout(), lamb()).strategy(strategy).mode(mode).record(true);
            let mut stepper = builder.bucket_cap_bytes(1000).host(comm)?;
            for step in 0..5 {
                for id in layout().ids() {
                    let bucket = bucket_of(&stepper, id)?;
                    stepper.unshard(bucket)?;
                    stepper.view::<f32>(id)?;
                    stepper.reshard(bucket)?;
                }
                pass(&mut stepper, step)?;
            }
            let recording = stepper.take_recording().unwrap();
            assert_eq!(stepper.check(&recording), []);
            // Which bytes a rank's trainer shares with its own steps is up to its shards, if parameters are shared out.
            if strategy == Strategy::Zero {
                let (range, what) = (middle_passes(&recording.list), format!("{mode:?}"));
                assert_each_is_missed(stepper.plan(), 2, &recording.list, range, 8, &what);
            }
            Ok((recording.list, stepper.plan().buckets().len()))
        });
        for (list, buckets) in lists.unwrap() {
            let shared = list.iter().filter(|entry| {
                let Traced::Op(Op { stream, action: Action::Collective { kind, bucket, src, .. } }) = entry
                else {
                    return false;
                };
                let own = if strategy == Strategy::Zero { Stream::Gather } else { Stream::Reduce };
                (*stream, *kind, bucket.is_some()) == (own, CollectiveKind::Sum64, true)
                    && src.bytes() % 360 == 0
            });
            assert_eq!(shared.count(), 5 * buckets, "{strategy:?}, {mode:?}");
        }
    }
}

/// A collective that can sum gradients, but not the norms of LAMB.
struct WithoutSums(instep::InProcess);

impl instep::Collective for WithoutSums {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn world_size(&self) -> u32 {
        self.0.world_size()
    }

    fn supports(&self, kind: CollectiveKind) -> bool {
        kind != CollectiveKind::Sum64
    }

    fn enqueue(&self, call: &mut instep::collective::Call<'_>) -> Result<()> {
        instep::Collective::enqueue(&self.0, call)
    }

    fn abort(&self, cause: &Error) {
        instep::Collective::abort(&self.0, cause);
    }
}

#[test]
fn a_collective_that_cannot_add_norms_up_is_refused() {
    let refusals = in_process(2, |comm| {
        let builder = Stepper::builder(layout(), lamb()).strategy(Strategy::Zero);
        Ok(builder.host(WithoutSums(comm)).unwrap_err().to_string())
    });
    for told in refusals.unwrap() {
        assert!(told.contains("sum of whole numbers"), "{told}");
    }
}
