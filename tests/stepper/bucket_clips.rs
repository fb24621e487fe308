//! Each bucket is clipped by its own norm: the bits are those of the bucket's own stepper with the exact clip, in every
//! mode.
//!
//! The reference is a stepper whose layout is one bucket, with norms and coefficients computed here. The plan decides
//! which parameters a bucket has.

use instep::abi::InstepControl;
use instep::op::Memory;
use instep::optim::Custom;
use instep::{
    Clip, Device, Divisor, Error, Layout, LossScaler, Mode, ParamId, Result, SegmentAction, Solo, Stepper,
    StepperBuilder, Unused, in_process,
};

use crate::stepper::several_optimizers::Descent;
use crate::support::device::cuda;
use crate::support::reference::{clip_coefficient, norm};
use crate::support::waits::{assert_each_is_missed, middle_passes};
use crate::support::{
    MODES, Optim, Options, Outcome, Presummed, assert_same_bits, few_optimizers, layout, one_per_state_count,
    paint, paint_gradient, paint_params, painted, pass,
};

const LENGTHS: [usize; 9] = [300, 5, 0, 2049, 40, 700, 17, 900, 260];
const MAX_NORM: f64 = 3.0;
const STEPS: usize = 5;

fn options(mode: Mode) -> Options {
    Options { mode, cap: Some(2000), world_size: 3, ..Options::default() }
}

fn clipping<'a>(options: &Options, layout: &'a Layout, optim: Optim) -> StepperBuilder<'a> {
    options.builder(layout, optim).clip(Clip::PerBucket(MAX_NORM))
}

/// Returns the parameters of each bucket with elements, by their places in the layout.
fn params_of_buckets<D: Device>(stepper: &Stepper<D>) -> Vec<Vec<usize>> {
    let plan = stepper.plan();
    let params = plan.buckets().iter().map(|bucket| {
        let mut params: Vec<usize> = plan.segments_of(bucket).iter().map(|s| s.param as usize).collect();
        params.sort_unstable();
        params
    });
    let buckets: Vec<Vec<usize>> = params.filter(|params| !params.is_empty()).collect();
    assert!(buckets.len() >= 4 && buckets.iter().any(|params| params.len() > 1), "{buckets:?}");
    buckets
}

/// The actions of both sides of a comparison.
#[derive(Clone, Debug)]
struct Case {
    options: Options,
    optim: Optim,
}

impl Case {
    fn is_frozen(step: usize, param: usize) -> bool {
        param == 5 && step % 3 == 1
    }

    fn is_used(step: usize, rank: usize, param: usize) -> bool {
        let is_unused = (step == 1 && param == 3 && rank != 1) || (step == 2 && param == 7);
        !is_unused && !Case::is_frozen(step, param)
    }

    /// Returns the values on one rank after all passes; `params` are the layout's parameters, by their places in the
    /// complete layout. With uneven inputs each rank has one batch less than the rank before it.
    fn train(&self, stepper: &mut Stepper, params: &[usize], rank: usize) -> Result<Vec<f64>> {
        let ids: Vec<ParamId> = stepper.layout().ids().collect();
        for (id, &param) in ids.iter().zip(params) {
            let values: Vec<f32> = (0..LENGTHS[param]).map(|k| paint(param, k)).collect();
            stepper.write(*id, &values)?;
        }
        let batches = if self.options.uneven.is_some() { STEPS - rank } else { STEPS };
        let mut clips = Vec::new();
        for step in 0..STEPS {
            for (id, &param) in ids.iter().zip(params) {
                stepper.set_frozen(*id, Case::is_frozen(step, param))?;
            }
            if step >= batches {
                assert!(stepper.join()?, "rank 0 has data");
            } else {
                pass(stepper, &self.options, |at, values| {
                    let (param, factor) = (params[at], 4.0 * (rank + 1) as f32);
                    let values = values.iter_mut().enumerate();
                    values.for_each(|(k, g)| *g = paint_gradient(step, param, k) * factor);
                    Case::is_used(step, rank, param)
                })?;
            }
            clips.push(stepper.status()?.clip);
        }
        Ok(clips)
    }

    fn assert_buckets_train_as_if_alone(&self) {
        let (what, ranks) = (format!("{self:?}"), self.options.world_size);
        let whole = layout(&LENGTHS);
        let together = in_process(ranks, |comm| {
            let rank = comm.rank() as usize;
            let mut stepper = clipping(&self.options, &whole, self.optim).record(true).host(comm)?;
            let clips = self.train(&mut stepper, &(0..LENGTHS.len()).collect::<Vec<_>>(), rank)?;
            assert_eq!(clips, [1.0; STEPS], "no coefficient is the pass's own");
            let recording = stepper.take_recording().unwrap();
            assert_eq!(stepper.check(&recording), [], "{what}");
            Ok::<_, Error>((Outcome::of(&stepper)?, params_of_buckets(&stepper)))
        });
        let together = together.unwrap();
        let mut clipped = 0;
        for params in &together[0].1 {
            let one = params
                .iter()
                .fold(Layout::builder(), |builder, k| builder.param(format!("p{k}"), LENGTHS[*k]));
            let one = one.build().unwrap();
            if params.iter().all(|param| LENGTHS[*param] == 0) {
                continue;
            }
            let exact =
                Options { mode: Mode::Normed, cap: None, max_norm: Some(MAX_NORM), ..self.options.clone() };
            let alone = in_process(ranks, |comm| {
                let rank = comm.rank() as usize;
                let mut stepper = exact.stepper(&one, self.optim, comm)?;
                assert_eq!(stepper.plan().buckets().len(), 1);
                let clips = self.train(&mut stepper, params, rank)?;
                Ok::<_, Error>((Outcome::of(&stepper)?, clips))
            });
            for ((outcome, _), (alone, clips)) in together.iter().zip(alone.unwrap()) {
                for (at, &param) in params.iter().enumerate() {
                    outcome.assert_same_param(param, &alone, at, &what);
                }
                clipped += clips.iter().filter(|clip| **clip < 1.0).count();
            }
        }
        assert!(clipped > STEPS, "{clipped} of {what}");
    }
}

#[test]
fn each_bucket_has_the_bits_of_a_stepper_of_its_own_that_clips_exactly() {
    let divisors = [None, Some(Divisor::WorldSize), Some(Divisor::ContributingRanks)];
    for (m, mode) in MODES.into_iter().enumerate() {
        for (d, uneven) in divisors.into_iter().enumerate() {
            for world_size in 1..=3 {
                let unused = [Unused::Skip, Unused::StepZero][(m + d + world_size as usize) % 2];
                let options = Options { uneven, unused, world_size, ..options(mode) };
                let optim = few_optimizers()[(m + 2 * d + world_size as usize) % 4];
                Case { options, optim }.assert_buckets_train_as_if_alone();
            }
        }
    }
}

/// Returns whole numbers, whose squares any sum adds exactly, so the norm is known without the library.
fn whole(step: usize, param: usize, k: usize) -> f32 {
    ((k * 7 + param * 3 + step) % 23) as f32 - 11.0
}

const AVERAGED: usize = 6;
const OWN: usize = 4;

#[test]
fn every_mode_steps_what_was_multiplied_by_hand_with_each_buckets_coefficient() {
    let mut builder = Layout::builder();
    for (k, len) in LENGTHS.iter().enumerate() {
        builder = builder.param(format!("p{k}"), *len);
        if k == AVERAGED {
            builder = builder.action(SegmentAction::Average);
        }
    }
    let layout = builder.build().unwrap();
    let own = [layout.id(&format!("p{OWN}")).unwrap()];
    for (mode, optim) in MODES.into_iter().flat_map(|mode| one_per_state_count().map(|optim| (mode, optim))) {
        let options = options(mode);
        let plain = Options { world_size: 1, ..Options::default() };
        let with_own = |builder: StepperBuilder<'_>| {
            builder.optimizer_for(&own, Custom::new(Descent)).host(Solo::default())
        };
        let builder = clipping(&options, &layout, optim).optimizer_for(&own, Custom::new(Descent));
        let mut clipped = builder.host(Presummed(3)).unwrap();
        let mut by_hand = with_own(plain.builder(&layout, optim)).unwrap();
        paint_params(&mut clipped);
        paint_params(&mut by_hand);
        let buckets = params_of_buckets(&clipped);
        let mut coefficients = Vec::new();
        for step in 0..STEPS {
            for stepper in [&mut clipped, &mut by_hand] {
                let id = layout.ids().nth(5).unwrap();
                stepper.set_frozen(id, Case::is_frozen(step, 5)).unwrap();
            }
            let mut factors = [0.0; LENGTHS.len()];
            for params in &buckets {
                let measured = params.iter().filter(|p| **p != AVERAGED && Case::is_used(step, 0, **p));
                let values =
                    measured.flat_map(|&p| (0..LENGTHS[p]).map(move |k| f64::from(whole(step, p, k))));
                let clip = clip_coefficient(1.0 / 3.0 * norm(values), MAX_NORM);
                coefficients.push(clip);
                params.iter().for_each(|p| factors[*p] = (1.0 / 3.0 * clip) as f32);
            }
            factors[AVERAGED] = (1.0f64 / 3.0) as f32;
            let feed = |factors: [f32; LENGTHS.len()]| {
                move |param: usize, values: &mut [f32]| {
                    let values = values.iter_mut().enumerate();
                    values.for_each(|(k, g)| *g = whole(step, param, k) * factors[param]);
                    Case::is_used(step, 0, param)
                }
            };
            pass(&mut clipped, &options, feed([1.0; LENGTHS.len()])).unwrap();
            pass(&mut by_hand, &plain, feed(factors)).unwrap();
            let (ours, theirs) = (Outcome::of(&clipped).unwrap(), Outcome::of(&by_hand).unwrap());
            ours.assert_same(&theirs, &format!("{optim:?} {mode:?}, step {step}"));
            assert_same_bits(
                &ours.grads[AVERAGED],
                &theirs.grads[AVERAGED],
                "what is averaged is not clipped",
            );
            assert_eq!((ours.status.norm, ours.status.clip), (None, 1.0), "{mode:?}");
        }
        let most = coefficients.iter().filter(|clip| **clip < 1.0).count();
        assert!(most > coefficients.len() / 2, "{coefficients:?}");
    }
}

#[test]
fn every_wait_of_a_recorded_run_is_missed_when_deleted() {
    for mode in MODES {
        let options = Options { record: true, unused: Unused::StepZero, ..options(mode) };
        let (layout, optim) = (layout(&LENGTHS), few_optimizers()[2]);
        let mut stepper = clipping(&options, &layout, optim).host(Presummed(3)).unwrap();
        for step in 0..6 {
            let ids: Vec<ParamId> = layout.ids().collect();
            let mut pass = stepper.begin().unwrap();
            ids.iter().for_each(|id| assert!(pass.params().get(*id).unwrap().iter().all(|p| p.is_finite())));
            for (param, id) in ids.iter().enumerate().rev() {
                pass.grads().get_mut(*id).unwrap().fill(paint_gradient(step, param, 0));
                pass.grad_ready(*id).unwrap();
            }
            pass.finish().unwrap();
        }
        let list = stepper.take_recording().unwrap().list;
        let what = format!("{mode:?}");
        assert_each_is_missed(stepper.plan(), 2, &list, middle_passes(&list), 12, &what);
    }
}

#[test]
fn a_gpu_and_rebuilt_buckets_clip_with_the_hosts_bits() {
    let uneven = [None, Some(Divisor::WorldSize), Some(Divisor::ContributingRanks)];
    for (mode, uneven) in MODES.into_iter().flat_map(|mode| uneven.map(|uneven| (mode, uneven))) {
        let options = Options { uneven, world_size: if uneven.is_some() { 1 } else { 3 }, ..options(mode) };
        let (layout, optim) = (layout(&LENGTHS), few_optimizers()[3]);
        let mut host = clipping(&options, &layout, optim).host(Presummed(options.world_size)).unwrap();
        let builder = clipping(&options, &layout, optim);
        // SAFETY: the stream outlives the stepper, or is the stand-in's, which is a number.
        let mut gpu = unsafe { builder.cuda(Presummed(options.world_size), &cuda()).unwrap() };
        train_rebuilding(&mut host, &options);
        train_rebuilding(&mut gpu, &options);
        let (host, gpu) = (Outcome::of(&host).unwrap(), Outcome::of(&gpu).unwrap());
        gpu.assert_same(&host, &format!("{mode:?} {uneven:?}"));
        assert_eq!(gpu.status, host.status);
        // One of many buckets to the others: what is taken for the norm matters.
        let mut global = Options { max_norm: Some(MAX_NORM), mode: Mode::Normed, ..options.clone() }
            .stepper(&layout, optim, Presummed(options.world_size))
            .unwrap();
        train_rebuilding(&mut global, &options);
        assert_ne!(Outcome::of(&global).unwrap().params, host.params);
    }
}

/// Makes three passes in an unusual order, then rebuilds the buckets, which are then more, and makes further passes.
fn train_rebuilding<D: Device>(stepper: &mut Stepper<D>, options: &Options) {
    paint_params(stepper);
    let paint = painted(options);
    let options = Options { order: Some(vec![3, 7, 5, 0, 8, 1, 6, 4, 2]), ..options.clone() };
    for step in 0..6 {
        if step == 3 {
            let before = stepper.plan().buckets().len();
            assert!(stepper.rebuild_buckets().unwrap());
            assert!(stepper.plan().buckets().len() > before);
        }
        pass(stepper, &options, |param, values| param != step && paint(step, param, values)).unwrap();
    }
}

#[test]
fn what_is_not_finite_stays_in_its_bucket_and_the_status_names_the_first() {
    let layout = layout(&LENGTHS);
    for mode in MODES {
        let options = options(mode);
        let fed = |bad: &[(usize, f32)]| {
            let mut stepper = clipping(&options, &layout, few_optimizers()[0]).host(Presummed(3)).unwrap();
            paint_params(&mut stepper);
            let start = Outcome::of(&stepper).unwrap();
            let paint = painted(&options);
            pass(&mut stepper, &options, |param, values| {
                let given = paint(0, param, values);
                bad.iter().filter(|(at, _)| *at == param).for_each(|(_, value)| values[1] = *value);
                given
            })
            .unwrap();
            let poisoned = Outcome::of(&stepper).unwrap();
            assert_eq!(stepper.latest_status(), Some(poisoned.status));
            pass(&mut stepper, &options, |param, values| paint(1, param, values)).unwrap();
            assert_eq!(stepper.status().unwrap().first_nonfinite_bucket, None, "{mode:?}: the pass after it");
            (start, poisoned, params_of_buckets(&stepper))
        };
        let (_, clean, buckets) = fed(&[]);
        assert_eq!(clean.status.first_nonfinite_bucket, None);
        let bucket_of = |param: usize| buckets.iter().position(|params| params.contains(&param)).unwrap();
        let (infinite, nan) = (7, 0);
        assert!(bucket_of(infinite) < bucket_of(nan));
        let (start, poisoned, _) = fed(&[(infinite, f32::NEG_INFINITY), (nan, f32::NAN)]);
        assert_eq!(poisoned.status.first_nonfinite_bucket, Some(bucket_of(infinite) as u32), "{mode:?}");
        let (_, later, _) = fed(&[(nan, f32::NAN)]);
        assert_eq!(later.status.first_nonfinite_bucket, Some(bucket_of(nan) as u32), "{mode:?}");
        for param in 0..LENGTHS.len() {
            if bucket_of(param) == bucket_of(nan) {
                // By a coefficient of NaN.
                assert!(poisoned.params[param].iter().all(|p| p.is_nan()), "{mode:?}, p{param}");
            } else if bucket_of(param) == bucket_of(infinite) {
                // By one of zero, which infinity alone withstands.
                for (k, (p, from)) in poisoned.params[param].iter().zip(&start.params[param]).enumerate() {
                    assert!(
                        if param == infinite && k == 1 { p.is_nan() } else { p == from },
                        "{mode:?}, p{param}"
                    );
                }
            } else {
                poisoned.assert_same_param(param, &clean, param, &format!("{mode:?}"));
            }
        }
    }
}

#[test]
fn a_sum_that_overflows_when_the_loss_scale_is_divided_out_is_named_in_every_mode() {
    let layout = layout(&LENGTHS);
    for mode in MODES {
        let options = Options { loss_scale: 2f64.powi(-100), ..options(mode) };
        let builder = options.builder(&layout, few_optimizers()[0]).clip(Clip::PerBucket(1e300));
        let mut stepper = builder.host(Presummed(3)).unwrap();
        pass(&mut stepper, &options, |param, values| {
            values.fill(if param == 3 { 1e10 } else { 1.0 });
            true
        })
        .unwrap();
        let bucket = params_of_buckets(&stepper).iter().position(|params| params.contains(&3)).unwrap();
        assert_eq!(stepper.status().unwrap().first_nonfinite_bucket, Some(bucket as u32), "{mode:?}");
    }
}

#[test]
fn gradients_that_are_not_summed_over_ranks_are_not_clipped() {
    let layout = Layout::builder().param("summed", 300).param("own", 300).local().build().unwrap();
    let [summed, own] = [layout.id("summed").unwrap(), layout.id("own").unwrap()];
    for mode in MODES {
        let options = options(mode);
        let open = |clips: bool| {
            let builder = options.builder(&layout, few_optimizers()[1]);
            let builder = if clips { builder.clip(Clip::PerBucket(MAX_NORM)) } else { builder };
            let mut stepper = builder.host(Presummed(3)).unwrap();
            let paint = painted(&options);
            for step in 0..3 {
                pass(&mut stepper, &options, |param, values| paint(step, param, values)).unwrap();
            }
            let params = stepper.params();
            [summed, own].map(|id| params.get(id).unwrap().to_vec())
        };
        let (clipped, plain) = (open(true), open(false));
        assert_same_bits(&clipped[1], &plain[1], &format!("{mode:?}"));
        assert_ne!(clipped[0], plain[0], "{mode:?}");
    }
}

#[test]
fn it_costs_a_control_block_per_bucket_and_nothing_without_it() {
    let (layout, options) = (layout(&LENGTHS), options(Mode::Eager));
    let control_bytes = |builder: StepperBuilder<'_>| {
        let stepper = builder.host(Presummed(3)).unwrap();
        let memory = stepper.memory();
        let bytes = memory.iter().find(|(memory, _)| *memory == Memory::Control).unwrap().1;
        (bytes, stepper.plan().buckets().len() as u64)
    };
    let (without, buckets) = control_bytes(options.builder(&layout, few_optimizers()[0]));
    let (with, _) = control_bytes(clipping(&options, &layout, few_optimizers()[0]));
    assert_eq!(with - without, buckets * size_of::<InstepControl>() as u64);
}

#[test]
fn it_excludes_what_decides_on_all_buckets_and_norms_out_of_range() {
    let layout = layout(&[3]);
    for mode in MODES {
        let builder = |max_norm: f64| {
            Options { mode, ..Options::default() }
                .builder(&layout, few_optimizers()[0])
                .clip(Clip::PerBucket(max_norm))
        };
        assert!(builder(1.0).host(Solo::default()).is_ok());
        let refused = [
            (builder(0.0), "finite"),
            (builder(f64::NAN), "finite"),
            (builder(f64::INFINITY), "finite"),
            (builder(1.0).skip_nonfinite(true), "skip_nonfinite"),
            (builder(1.0).loss_scale(LossScaler::default()), "dynamic loss_scale"),
        ];
        for (builder, named) in refused {
            let error = builder.host(Solo::default()).unwrap_err().to_string();
            assert!(error.starts_with("clip = PerBucket(") && error.contains(named), "{error}");
        }
    }
}

#[test]
fn ranks_that_clip_differently_are_told_at_the_first_collective() {
    let layout = layout(&LENGTHS);
    let outcome = in_process(2, |comm| {
        let max_norm = f64::from(comm.rank() + 1);
        let options = Options { mode: Mode::Eager, ..Options::default() };
        let mut stepper =
            options.builder(&layout, few_optimizers()[0]).clip(Clip::PerBucket(max_norm)).host(comm)?;
        stepper.begin()?.finish()?;
        stepper.close()
    });
    let error = outcome.unwrap_err();
    assert!(matches!(error.cause(), Error::Mismatch { .. }), "{error}");
}
