//! Dynamic loss scaling against the policy of `torch.amp.GradScaler`, written again: scales, skips, and all bits that
//! stay.
//!
//! A small generator decides which passes overflow, so ranks agree on it without communication. Scales are read through
//! the trainer's own calls, because a trainer multiplies the loss by them.

use instep::cuda::CudaDevice;
use instep::{
    Clip, Collective, Device, Divisor, Error, Layout, LossScaler, Mode, ParamId, Result, ScalerState, Sgd,
    Solo, Status, Stepper, Strategy, in_process,
};

use crate::support::device::cuda;
use crate::support::{
    Optim, Options, Outcome, Presummed, few_optimizers, layout, one_per_state_count, paint_gradient,
    paint_params, pass,
};

pub(super) const MODES: [Mode; 2] = [Mode::Sequential, Mode::Normed];
pub(super) const LENGTHS: [usize; 3] = [300, 5, 2049];

/// The factors round, and random runs reach the interval.
pub(super) const SCALER: LossScaler =
    LossScaler { initial_scale: 1024.0, growth_factor: 1.7, backoff_factor: 0.3, growth_interval: 3 };

/// The values that GradScaler would have after each pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Torch {
    pub scale: f32,
    pub good: u32,
}

impl Torch {
    pub(super) fn update(&mut self, scaler: &LossScaler, found_inf: bool) {
        if found_inf {
            self.scale = (f64::from(self.scale) * scaler.backoff_factor) as f32;
            self.good = 0;
        } else {
            self.good += 1;
            if self.good == scaler.growth_interval {
                self.scale = (f64::from(self.scale) * scaler.growth_factor) as f32;
                self.good = 0;
            }
        }
    }

    fn state(&self) -> ScalerState {
        ScalerState { scale: self.scale.into(), growth_tracker: self.good }
    }
}

pub(super) fn options(mode: Mode) -> Options {
    Options { mode, cap: Some(1), ..Options::default() }
}

pub(super) fn open(
    layout: &Layout,
    optim: Optim,
    mode: Mode,
    comm: impl Collective + 'static,
) -> Result<Stepper> {
    let mut stepper = options(mode).builder(layout, optim).loss_scale(SCALER).host(comm)?;
    paint_params(&mut stepper);
    Ok(stepper)
}

/// Makes one pass at the stepper's scale; `bad` becomes one element of one parameter.
pub(super) fn scaled_pass<D: Device>(stepper: &mut Stepper<D>, step: usize, bad: Option<f32>) -> Result<f64> {
    let layout = stepper.layout().clone();
    let mut pass = stepper.begin()?;
    let scale = pass.loss_scale()?;
    for (param, id) in layout.ids().enumerate().collect::<Vec<_>>().into_iter().rev() {
        let len = layout.parameter(id)?.len as usize;
        let mut gradient: Vec<f32> =
            (0..len).map(|k| paint_gradient(step, param, k) * scale as f32).collect();
        if let Some(bad) = bad.filter(|_| param == step % LENGTHS.len()) {
            gradient[step % len] = bad;
        }
        pass.write(id.grad(), &gradient)?;
        pass.grad_ready(id)?;
    }
    assert_eq!(pass.loss_scale()?, scale, "a pass has one scale");
    pass.finish()?;
    Ok(scale)
}

/// Returns whether a pass overflows, and how: the first pass always does, because it would create the first moment.
pub(super) fn overflow(seed: u64, step: usize) -> Option<f32> {
    let mixed = (seed * 31 + step as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
    let bad = [f32::INFINITY, f32::NAN, f32::NEG_INFINITY, -f32::NAN];
    (step == 0 || mixed < 5).then_some(bad[mixed as usize % 4])
}

#[test]
fn scales_follow_grad_scaler_and_a_skipped_pass_keeps_every_bit_on_every_rank() {
    let layout = layout(&LENGTHS);
    for ranks in 1..=4 {
        for (mode, optim) in
            MODES.into_iter().flat_map(|mode| one_per_state_count().map(|optim| (mode, optim)))
        {
            let run = in_process(ranks, |comm| {
                let rank = comm.rank() as usize;
                let mut stepper = open(&layout, optim, mode, comm)?;
                let mut torch = Torch { scale: SCALER.initial_scale as f32, good: 0 };
                let (mut skipped, mut grown) = (0, 0);
                for step in 0..24 {
                    let what = format!("{optim:?}, {mode:?}, rank {rank} of {ranks}, step {step}");
                    let bad = overflow(u64::from(ranks), step);
                    // The first pass gives every rank the same parameters, so what it left is what stays.
                    let before = if step > 0 { Some(Outcome::of(&stepper)?) } else { None };
                    let mine = bad.filter(|_| step % ranks as usize == rank);
                    let scale = scaled_pass(&mut stepper, step, mine)?;
                    assert_eq!(scale, f64::from(torch.scale), "{what}");
                    torch.update(&SCALER, bad.is_some());
                    let after = Outcome::of(&stepper)?;
                    assert_eq!(
                        (after.status.skipped, after.status.loss_scale),
                        (bad.is_some(), scale),
                        "{what}"
                    );
                    assert_eq!(stepper.scaler_state()?, torch.state(), "{what}");
                    if bad.is_some() {
                        skipped += 1;
                        match before {
                            Some(before) => after.assert_same(&before, &what),
                            None => {
                                let states = after.states.iter().flatten().flatten();
                                assert!(states.clone().all(|x| x.to_bits() == 0), "{what}");
                                assert_eq!(after.step_counts, [0; 3], "{what}");
                            }
                        }
                    }
                    grown += u32::from(f64::from(torch.scale) > scale);
                    if step % 7 == 3 {
                        // Given up before anything was decided.
                        stepper.begin()?.abandon()?;
                        assert_eq!(stepper.scaler_state()?, torch.state(), "{what}");
                    }
                }
                Ok::<_, Error>((skipped, grown))
            });
            for (skipped, grown) in run.unwrap() {
                assert!(skipped > 2 && grown > 0, "{skipped} skipped, {grown} grown");
            }
        }
    }
}

#[test]
fn a_gpu_scales_as_the_host_does() {
    let layout = layout(&LENGTHS);
    for mode in MODES {
        let optim = few_optimizers()[1];
        let mut host = open(&layout, optim, mode, Solo::default()).unwrap();
        let builder = options(mode).builder(&layout, optim).loss_scale(SCALER);
        // SAFETY: the stream outlives the stepper, or is the stand-in's, which is a number.
        let mut gpu = unsafe { builder.cuda(Solo::default(), &cuda()).unwrap() };
        paint_params(&mut gpu);
        let mut place = None;
        for step in 0..16 {
            let bad = overflow(9, step);
            let scales =
                (scaled_pass(&mut host, step, bad).unwrap(), scaled_pass(&mut gpu, step, bad).unwrap());
            assert_eq!(scales.0, scales.1, "{mode:?}, step {step}");
            assert_eq!(gpu.scaler_state().unwrap(), host.scaler_state().unwrap(), "{mode:?}");
            place = Some(asked(&mut gpu, place));
            host.begin().unwrap().finish().unwrap();
        }
        let (host, gpu) = (Outcome::of(&host).unwrap(), Outcome::of(&gpu).unwrap());
        gpu.assert_same(&host, &format!("{mode:?}"));
        assert_eq!(gpu.status, host.status);
    }
}

/// Makes a pass without gradients, in which the trainer's stream reads the scale itself; the address never moves.
fn asked(gpu: &mut Stepper<CudaDevice>, before: Option<u64>) -> u64 {
    let pass = gpu.begin().unwrap();
    let place = pass.loss_scale_ptr().unwrap().0;
    pass.finish().unwrap();
    assert!(place != 0 && before.is_none_or(|before| before == place));
    place
}

#[test]
fn a_recorded_gpu_has_no_hazard_while_its_stream_reads_the_scale() {
    let layout = layout(&LENGTHS);
    for mode in MODES {
        let builder = options(mode).builder(&layout, few_optimizers()[1]).loss_scale(SCALER).record(true);
        // SAFETY: as above.
        let mut gpu = unsafe { builder.cuda(Solo::default(), &cuda()).unwrap() };
        for _ in 0..5 {
            asked(&mut gpu, None);
        }
        let recording = gpu.take_recording().unwrap();
        assert_eq!(gpu.check(&recording), [], "{mode:?}");
    }
}

#[test]
fn a_scale_that_would_leave_f32_is_not_taken() {
    let layout = layout(&[3]);
    let optim = few_optimizers()[0];
    for (exponent, bad, last) in [(124, None, 125), (-125, Some(f32::INFINITY), -126)] {
        let scaler =
            LossScaler { initial_scale: 2f64.powi(exponent), growth_interval: 1, ..LossScaler::default() };
        let builder = options(Mode::Normed).builder(&layout, optim).loss_scale(scaler);
        let mut stepper = builder.host(Presummed(2)).unwrap();
        for expected in [exponent, last, last] {
            let scale = f64::from(2f32.powi(expected));
            let mut pass = stepper.begin().unwrap();
            assert_eq!(pass.loss_scale().unwrap(), scale);
            pass.write(layout.id("p0").unwrap().grad(), &[bad.unwrap_or(1.0); 3]).unwrap();
            crate::support::finish(pass).unwrap();
        }
        let expected = ScalerState { scale: 2f64.powi(last), growth_tracker: 0 };
        assert_eq!(stepper.scaler_state().unwrap(), expected);
    }
}

#[test]
fn ranks_without_data_decide_as_the_others_and_nobody_learns_from_a_pass_without_any() {
    let layout = layout(&LENGTHS);
    for (mode, divisor) in MODES.into_iter().zip([Divisor::WorldSize, Divisor::ContributingRanks]) {
        let states = in_process(3, |comm| {
            let batches = [5, 2, 3][comm.rank() as usize];
            let options = Options { uneven: Some(divisor), ..options(mode) };
            let builder = options.builder(&layout, few_optimizers()[1]).loss_scale(SCALER);
            let mut stepper = builder.host(comm)?;
            for step in 0..batches {
                scaled_pass(&mut stepper, step, (step == 4).then_some(f32::NAN))?;
            }
            while stepper.join()? {}
            stepper.scaler_state()
        });
        let mut torch = Torch { scale: SCALER.initial_scale as f32, good: 0 };
        (0..5).for_each(|step| torch.update(&SCALER, step == 4));
        assert_eq!(states.unwrap(), [torch.state(); 3], "{mode:?}");
    }
}

#[test]
fn a_loaded_scaler_goes_on_where_it_was_saved() {
    let layout = layout(&LENGTHS);
    let optim = few_optimizers()[0];
    let mut whole = open(&layout, optim, Mode::Normed, Solo::default()).unwrap();
    for step in 0..7 {
        scaled_pass(&mut whole, step, overflow(3, step)).unwrap();
    }
    let saved = whole.scaler_state().unwrap();
    let mut loaded = open(&layout, optim, Mode::Normed, Solo::default()).unwrap();
    loaded.set_scaler_state(saved).unwrap();
    for step in 7..20 {
        let scale = scaled_pass(&mut whole, step, overflow(3, step)).unwrap();
        assert_eq!(scaled_pass(&mut loaded, step, overflow(3, step)).unwrap(), scale);
    }
    assert_eq!(loaded.scaler_state().unwrap(), whole.scaler_state().unwrap());
}

#[test]
fn ranks_whose_scalers_differ_learn_of_it() {
    let layout = layout(&LENGTHS);
    let differ = |load: bool| {
        in_process(2, |comm| {
            let own = f64::from(comm.rank() + 1) * 2.0;
            let scaler = if load { SCALER } else { LossScaler { growth_factor: own, ..SCALER } };
            let builder = options(Mode::Normed).builder(&layout, few_optimizers()[0]).loss_scale(scaler);
            let mut stepper = builder.host(comm)?;
            if load {
                stepper.set_scaler_state(ScalerState { scale: own, growth_tracker: 0 })?;
            }
            scaled_pass(&mut stepper, 0, None)?;
            stepper.status().map(drop)
        })
    };
    for load in [false, true] {
        let error = differ(load).unwrap_err();
        assert!(matches!(error.cause(), Error::Mismatch { .. } | Error::PeerLost { .. }), "{error}");
    }
}

#[track_caller]
pub(super) fn assert_refused<T>(outcome: Result<T>, field: &str) {
    match outcome {
        Err(Error::Config { field: named, .. }) => assert_eq!(named, field),
        Err(other) => panic!("`{field}` is refused as {other:?}"),
        Ok(_) => panic!("`{field}` is accepted"),
    }
}

#[test]
fn scalers_out_of_range_and_in_the_wrong_company_are_refused_by_name() {
    let layout = layout(&[3]);
    let build = |mode, scaler| {
        let builder = options(mode).builder(&layout, few_optimizers()[0]).loss_scale(scaler);
        builder.host(Presummed(4))
    };
    assert_refused(build(Mode::Eager, SCALER), "loss_scale");
    for bad in [f64::NAN, 0.0, -1.0, f64::INFINITY, 1.0 + f64::EPSILON, 2f64.powi(125)] {
        assert_refused(build(Mode::Normed, LossScaler { initial_scale: bad, ..SCALER }), "initial_scale");
    }
    for bad in [f64::NAN, 1.0, f64::INFINITY] {
        assert_refused(build(Mode::Normed, LossScaler { growth_factor: bad, ..SCALER }), "growth_factor");
    }
    for bad in [f64::NAN, 0.0, 1.0] {
        assert_refused(build(Mode::Normed, LossScaler { backoff_factor: bad, ..SCALER }), "backoff_factor");
    }
    assert_refused(build(Mode::Normed, LossScaler { growth_interval: 0, ..SCALER }), "growth_interval");

    let mut constant = options(Mode::Normed).builder(&layout, few_optimizers()[0]).loss_scale(2.0);
    constant = constant.skip_nonfinite(true);
    let mut stepper = constant.host(Solo::default()).unwrap();
    assert_eq!(stepper.begin().unwrap().loss_scale().unwrap(), 2.0);
    assert_refused(stepper.scaler_state(), "loss_scale");
    assert_refused(stepper.set_scaler_state(SCALER_STATE), "loss_scale");
    let mut dynamic = build(Mode::Normed, SCALER).unwrap();
    assert_refused(dynamic.set_scaler_state(ScalerState { scale: 0.1, ..SCALER_STATE }), "scale");
}

const SCALER_STATE: ScalerState = ScalerState { scale: 2.0, growth_tracker: 0 };

#[test]
fn the_latest_status_is_there_on_the_host_without_waiting_and_counts_abandoned_passes() {
    for mode in crate::support::MODES {
        let options = Options { mode, loss_scale: 4.0, ..Options::default() };
        let layout = layout(&LENGTHS);
        let mut stepper = options.stepper(&layout, few_optimizers()[1], Solo::default()).unwrap();
        assert_eq!(stepper.latest_status(), None);
        for step in 0..5 {
            let gradient = |param: usize, values: &mut [f32]| {
                values.iter_mut().enumerate().for_each(|(k, g)| *g = paint_gradient(step, param, k));
                true
            };
            pass(&mut stepper, &options, gradient).unwrap();
            let waited = stepper.status().unwrap();
            assert_eq!((waited.pass, waited.loss_scale), (2 * step as u64 + 1, 4.0), "{mode:?}");
            assert_eq!(stepper.latest_status(), Some(waited), "{mode:?}");
            stepper.begin().unwrap().abandon().unwrap();
            // It publishes nothing, and is counted.
            let counted = Status { abandoned: step as u64 + 1, ..waited };
            assert_eq!(stepper.latest_status(), Some(counted), "{mode:?}");
        }
    }
}

/// The largest mean of these sums is finite in f32 like the sums, and overflows when the loss scale is divided out.
#[test]
fn a_pass_that_is_skipped_because_a_mean_overflows_names_its_bucket() {
    let layout = layout(&[5, 300, 7]);
    let ids: Vec<ParamId> = layout.ids().collect();
    let culprit = |stepper: &Stepper, id| Some(stepper.plan().segment_of(layout.index(id).unwrap()).bucket);
    for mode in [Mode::Sequential, Mode::Normed] {
        for (uneven, clip) in [(false, None), (true, None), (false, Some(1.0)), (true, Some(1.0))] {
            let mut builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() }).mode(mode);
            builder = builder.skip_nonfinite(true).loss_scale(2f64.powi(-40)).bucket_cap_bytes(1);
            if uneven {
                builder = builder.uneven_inputs(Divisor::ContributingRanks);
            }
            if let Some(max_norm) = clip {
                builder = builder.clip(Clip::Global(max_norm));
            }
            let mut stepper = builder.host(Solo::default()).unwrap();
            for large in [Some(0), Some(1), Some(2), None] {
                let mut pass = stepper.begin().unwrap();
                for (k, id) in ids.iter().enumerate() {
                    let value = if large == Some(k) { 1e30 } else { 1e-20 };
                    pass.grads().get_mut(*id).unwrap().fill(value);
                }
                pass.finish().unwrap();
                let status = stepper.status().unwrap();
                let what = format!("{mode:?}, uneven {uneven}, clip {clip:?}, {large:?}: {status:?}");
                // A clip is decided on the f64 norm, so it makes such a mean finite and the pass is stepped.
                let is_skipped = large.is_some() && clip.is_none();
                assert_eq!(status.skipped, is_skipped, "{what}");
                let named = large.filter(|_| is_skipped).and_then(|k| culprit(&stepper, ids[k]));
                assert_eq!(status.first_nonfinite_bucket, named, "{what}");
            }
        }
    }
}

#[test]
fn ranks_that_share_states_out_name_the_bucket_whose_mean_overflows() {
    let layout = layout(&[700, 900, 1100]);
    let ids: Vec<ParamId> = layout.ids().collect();
    for strategy in [Strategy::Replicated, Strategy::Zero, Strategy::Fsdp] {
        let statuses = in_process(3, |comm| {
            let builder = Stepper::builder(&layout, Sgd::default()).mode(Mode::Normed).strategy(strategy);
            let builder = builder.skip_nonfinite(true).loss_scale(2f64.powi(-40)).bucket_cap_bytes(1);
            let mut stepper = builder.host(comm)?;
            let mut pass = stepper.begin()?;
            for (k, id) in ids.iter().enumerate() {
                let len = layout.parameter(*id)?.len as usize;
                // In the shard of one rank.
                let mut values = vec![1e-20; len];
                values[len - 1] = if k == 1 { 1e30 } else { 1e-20 };
                pass.write(id.grad(), &values)?;
            }
            pass.finish()?;
            let bucket = stepper.plan().segment_of(1).bucket;
            Ok((stepper.status()?, bucket))
        })
        .unwrap();
        for (status, bucket) in statuses {
            assert_eq!((status.skipped, status.first_nonfinite_bucket), (true, Some(bucket)), "{strategy:?}");
        }
    }
}
