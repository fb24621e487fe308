//! The caller has a loss scaler such as `torch.amp.GradScaler`: the stepper reads its scale and writes its flag.
//!
//! The scaler here is the reference for dynamic scaling. A stepper that keeps the same scaler itself gives the bits to
//! compare with.

use instep::cuda::Cuda;
use instep::hazard::{Traced, check};
use instep::op::{Action, Op, Stream};
use instep::{
    Clip, Device, Error, LossScale, Mode, Result, Sgd, Solo, Status, Stepper, StepperBuilder, in_process,
};

use super::loss_scaling::{
    LENGTHS, MODES, SCALER, Torch, assert_refused, open, options, overflow, scaled_pass,
};
use crate::support::device::cuda;
use crate::support::lent::{Ground, Tensor};
use crate::support::waits::middle_passes;
use crate::support::{Outcome, few_optimizers, layout, paint_gradient, paint_params};

/// The tensors of a scaler, and its actions between passes.
struct Scaler {
    scale: Tensor,
    found_inf: Tensor,
    torch: Torch,
}

impl Scaler {
    fn new(ground: &Ground) -> Scaler {
        let torch = Torch { scale: SCALER.initial_scale as f32, good: 0 };
        let scaler = Scaler { scale: Tensor::new(ground, 4, 0), found_inf: Tensor::new(ground, 4, 4), torch };
        scaler.set(0.0);
        scaler
    }

    /// Sets the flag as `unscale_` would, and the scale of the next pass.
    fn set(&self, found_inf: f32) {
        self.scale.write(&self.torch.scale.to_ne_bytes());
        self.found_inf.write(&found_inf.to_ne_bytes());
    }

    /// Reads the flag, and adapts the scale to it.
    fn update(&mut self) -> f32 {
        let flag = f32::from_ne_bytes(self.found_inf.read().try_into().unwrap());
        self.torch.update(&SCALER, flag != 0.0);
        self.set(0.0);
        flag
    }

    fn give<'a>(&self, builder: StepperBuilder<'a>) -> StepperBuilder<'a> {
        // SAFETY: the tensors outlive the steppers of each test, which touches them between passes, and the flag in one.
        unsafe { builder.grad_scaler(self.scale.address().cast(), self.found_inf.address().cast()) }
    }

    fn assert_bands_stand(&self) {
        self.scale.assert_bands_stand();
        self.found_inf.assert_bands_stand();
    }
}

/// Makes one pass at the scaler's scale; `bad` becomes one element of one parameter.
fn external_pass<D: Device>(
    stepper: &mut Stepper<D>,
    scale: f32,
    step: usize,
    bad: Option<f32>,
) -> Result<()> {
    let layout = stepper.layout().clone();
    let mut pass = stepper.begin()?;
    for (param, id) in layout.ids().enumerate().collect::<Vec<_>>().into_iter().rev() {
        let len = layout.parameter(id)?.len as usize;
        let mut gradient: Vec<f32> = (0..len).map(|k| paint_gradient(step, param, k) * scale).collect();
        if let Some(bad) = bad.filter(|_| param == step % LENGTHS.len()) {
            gradient[step % len] = bad;
        }
        pass.write(id.grad(), &gradient)?;
        pass.grad_ready(id)?;
    }
    pass.finish()
}

/// Trains, and returns the flags that the scaler has read.
fn train<D: Device>(
    stepper: &mut Stepper<D>,
    scaler: &mut Scaler,
    bad: impl Fn(usize) -> Option<f32>,
) -> Result<Vec<f32>> {
    let mut flags = Vec::new();
    for step in 0..24 {
        external_pass(stepper, scaler.torch.scale, step, bad(step))?;
        flags.push(scaler.update());
        if step % 7 == 3 {
            // Given up before anything was decided, and the scale changes at once.
            stepper.begin()?.abandon()?;
            scaler.set(0.0);
        }
    }
    Ok(flags)
}

fn assert_same<D: Device>(stepper: &Stepper<D>, reference: &Stepper, what: &str) -> Result<()> {
    let (ours, theirs) = (Outcome::of(stepper)?, Outcome::of(reference)?);
    ours.assert_same(&theirs, what);
    let of = |status: &Status| (status.pass, status.skipped, status.loss_scale, status.clip, status.norm);
    assert_eq!(of(&ours.status), of(&theirs.status), "{what}");
    Ok(())
}

#[test]
fn a_scaler_of_the_callers_gives_the_bits_of_one_that_the_stepper_keeps_on_every_rank() {
    let layout = layout(&LENGTHS);
    for (mode, ranks) in MODES.into_iter().flat_map(|mode| [(mode, 1), (mode, 3)]) {
        let outcomes = in_process(ranks, |comm| {
            let rank = comm.rank() as usize;
            let mine = |step: usize| overflow(5, step).filter(|_| step % ranks as usize == rank);
            let mut scaler = Scaler::new(&Ground::Host);
            let builder = scaler.give(options(mode).builder(&layout, few_optimizers()[1]));
            let mut stepper = builder.record(true).host(comm)?;
            paint_params(&mut stepper);
            let flags = train(&mut stepper, &mut scaler, mine)?;
            let recording = stepper.take_recording().unwrap();
            assert_eq!(stepper.check(&recording), [], "{mode:?}, rank {rank} of {ranks}");
            scaler.assert_bands_stand();
            Ok::<_, Error>((flags, scaler.torch.scale, Outcome::of(&stepper)?))
        })
        .unwrap();
        let references = in_process(ranks, |comm| {
            let rank = comm.rank() as usize;
            let mut stepper = open(&layout, few_optimizers()[1], mode, comm)?;
            let mut flags = Vec::new();
            for step in 0..24 {
                let mine = overflow(5, step).filter(|_| step % ranks as usize == rank);
                scaled_pass(&mut stepper, step, mine)?;
                flags.push(f32::from(u8::from(stepper.status()?.skipped)));
                if step % 7 == 3 {
                    stepper.begin()?.abandon()?;
                }
            }
            Ok::<_, Error>((flags, stepper.scaler_state()?.scale as f32, Outcome::of(&stepper)?))
        })
        .unwrap();
        for (rank, (ours, theirs)) in outcomes.iter().zip(&references).enumerate() {
            let what = format!("{mode:?}, rank {rank} of {ranks}");
            assert_eq!((&ours.0, ours.1), (&theirs.0, theirs.1), "{what}");
            assert!(ours.0.contains(&0.0) && ours.0.contains(&1.0), "{what}");
            ours.2.assert_same(&theirs.2, &what);
        }
    }
}

/// The control stream waits for the trainer before Begin reads the scale, and before Decide writes the flag.
#[test]
fn without_any_wait_for_the_scaler_there_is_a_race() {
    let layout = layout(&LENGTHS);
    for mode in MODES {
        let mut scaler = Scaler::new(&Ground::Host);
        let builder = scaler.give(options(mode).builder(&layout, few_optimizers()[1]));
        let mut stepper = builder.record(true).host(Solo::default()).unwrap();
        for step in 0..6 {
            external_pass(&mut stepper, scaler.torch.scale, step, None).unwrap();
            scaler.update();
        }
        let list = stepper.take_recording().unwrap().list;
        let waits = |entry: &Traced| {
            matches!(entry, Traced::Op(Op { stream: Stream::Optim, action: Action::Wait(ticket) })
                if ticket.stream == Stream::Compute)
        };
        let found: Vec<usize> = middle_passes(&list).filter(|at| waits(&list[*at])).collect();
        assert!(found.len() >= 2 * 4, "{mode:?}: {} waits", found.len());
        for at in found {
            let mut without = list.clone();
            without.remove(at);
            assert_ne!(check(stepper.plan(), 2, &without), [], "{mode:?}: nothing misses entry {at}");
        }
    }
}

#[test]
fn a_gpu_reads_the_scale_and_writes_the_flag_in_its_own_memory() {
    let layout = layout(&LENGTHS);
    for mode in MODES {
        let (cuda, optim) = (cuda(), few_optimizers()[1]);
        let [mut host_scaler, mut scaler] =
            [Ground::Host, Ground::of(&cuda)].map(|ground| Scaler::new(&ground));
        let builder = || options(mode).builder(&layout, optim).record(true);
        let mut host = host_scaler.give(builder()).host(Solo::default()).unwrap();
        // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
        let mut gpu = unsafe { scaler.give(builder()).cuda(Solo::default(), &cuda).unwrap() };
        paint_params(&mut host);
        paint_params(&mut gpu);
        let bad = |step| overflow(9, step);
        let flags = train(&mut host, &mut host_scaler, bad).unwrap();
        assert_eq!(train(&mut gpu, &mut scaler, bad).unwrap(), flags, "{mode:?}");
        assert!(flags.contains(&0.0) && flags.contains(&1.0), "{mode:?}");
        assert_same(&gpu, &host, &format!("{mode:?}")).unwrap();
        let recording = gpu.take_recording().unwrap();
        assert_eq!(gpu.check(&recording), [], "{mode:?}");
        scaler.assert_bands_stand();
        gpu.close().unwrap();
    }
}

#[test]
fn a_captured_pass_reads_the_scale_and_writes_the_flag_of_each_replay() {
    let (layout, cuda) = (layout(&[3]), cuda());
    let id = layout.id("p0").unwrap();
    for mode in MODES {
        let mut scaler = Scaler::new(&Ground::of(&cuda));
        let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() }).mode(mode);
        // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
        let mut gpu = unsafe { scaler.give(builder).cuda(Solo::default(), &cuda).unwrap() };
        let set = |scaler: &mut Scaler, scale, flag| {
            scaler.torch.scale = scale;
            scaler.set(flag);
        };
        set(&mut scaler, 2.0, 0.0);
        let mut pass = gpu.begin().unwrap();
        pass.write(id.grad(), &[8.0; 3]).unwrap();
        pass.finish().unwrap();
        let captured = gpu.capture(|mut pass| {
            pass.ptr(id.grad())?;
            pass.finish()
        });
        let captured = captured.unwrap();
        let mut expected = -4.0;
        for (scale, flag, change) in [(4.0, 0.0, -2.0), (8.0, 1.0, 0.0), (8.0, 0.0, -1.0)] {
            set(&mut scaler, scale, flag);
            // SAFETY: the capture is of the stepper's own work, and the scaler outlives it.
            unsafe { gpu.replay(&captured).unwrap() };
            let mut values = [0.0; 3];
            gpu.read(id, &mut values).unwrap();
            expected += change;
            assert_eq!(values, [expected; 3], "{mode:?}, {scale}, {flag}");
        }
        drop(captured);
        gpu.close().unwrap();
        assert_eq!(scaler.found_inf.read(), [0; 4], "{mode:?}");
    }
}

#[test]
fn a_flag_that_the_caller_has_set_before_the_end_of_a_pass_skips_it() {
    let layout = layout(&[3]);
    let id = layout.id("p0").unwrap();
    for mode in MODES {
        let scaler = Scaler::new(&Ground::Host);
        let builder = scaler.give(options(mode).builder(&layout, few_optimizers()[0]));
        let mut stepper = builder.host(Solo::default()).unwrap();
        for (flag, steps) in [(0.0, 1), (2.0, 1), (f32::NAN, 1), (0.0, 2)] {
            let mut pass = stepper.begin().unwrap();
            pass.write(id.grad(), &[1.0; 3]).unwrap();
            pass.grad_ready(id).unwrap();
            scaler.found_inf.write(&f32::to_ne_bytes(flag));
            pass.finish().unwrap();
            let expected = f32::from(u8::from(flag != 0.0));
            assert_eq!(scaler.found_inf.read(), expected.to_ne_bytes(), "{mode:?}, {flag}");
            assert_eq!(stepper.status().unwrap().skipped, flag != 0.0, "{mode:?}, {flag}");
            assert_eq!(stepper.step_count(id).unwrap(), steps, "{mode:?}, {flag}");
            scaler.found_inf.write(&[0; 4]);
        }
    }
}

#[test]
fn what_a_scaler_of_the_callers_cannot_serve_is_refused_by_name() {
    let layout = layout(&[3]);
    let scaler = Scaler::new(&Ground::Host);
    let builder = |mode| options(mode).builder(&layout, few_optimizers()[0]);
    assert_refused(scaler.give(builder(Mode::Eager)).host(Solo::default()), "loss_scale");
    let clipped = builder(Mode::Normed).clip(Clip::PerBucket(1.0));
    assert_refused(scaler.give(clipped).host(Solo::default()), "clip");
    let mut flag = 0f32;
    // SAFETY: null is refused.
    let null = unsafe { builder(Mode::Normed).grad_scaler(std::ptr::null(), &raw mut flag) };
    assert_refused(null.host(Solo::default()), "grad_scaler");
    let stepper = scaler.give(builder(Mode::Normed)).host(Solo::default()).unwrap();
    assert_refused(stepper.loss_scale(), "loss_scale");
    assert_refused(stepper.scaler_state(), "loss_scale");
    let constant = scaler.give(builder(Mode::Normed)).loss_scale(LossScale::Constant(2.0));
    assert_eq!(constant.host(Solo::default()).unwrap().loss_scale(), Ok(2.0), "the last call counts");
    let on_gpu = |cuda: &Cuda| {
        // SAFETY: as above, and the scaler is refused before it is read.
        unsafe { scaler.give(builder(Mode::Normed)).cuda(Solo::default(), cuda).map(drop) }
    };
    let refused = on_gpu(&cuda());
    assert!(matches!(&refused, Err(Error::Layout(why)) if why.remedy.contains("cuda:0")), "{refused:?}");
}
