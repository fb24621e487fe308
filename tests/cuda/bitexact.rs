//! A stepper on a GPU and one on the host have the same bits, in every mode, after the same calls.
//!
//! Without a GPU the stand-in replaces the driver, so these tests prove everything except the hardware. With
//! `INSTEP_REQUIRE_GPU=1` they run on a GPU, and in the lane that compiles the kernels for the CPU, on fibers. Every
//! test compares with the host device.

use std::num::NonZeroU32;

use instep::cuda::{Cuda, CudaDevice};
use instep::hazard::Traced;
use instep::layout::LayoutBuilder;
use instep::op::{Action, Op, Stream};
use instep::{AdamW, Device, Divisor, Layout, Mode, Pass, Result, RmsProp, Sgd, Solo, Stepper, Unused};

use crate::support::device::cuda;
use crate::support::hardware;
use crate::support::stand_in::COMPUTE;
use crate::support::{
    LENGTHS, MODES, Optim, Options, Outcome, Presummed, few_optimizers, grouped, layout, optimizers,
    paint_gradient, paint_params, painted, pass, with_group_clips,
};

/// Runs the same trainer on the host and on the GPU.
fn assert_same(
    lengths: &[usize],
    optim: Optim,
    options: &Options,
    what: &str,
    train: impl Fn(&mut dyn Trainer) -> Result<()>,
) {
    let layout = layout(lengths);
    let solo = || Presummed(options.world_size);
    let mut host = options.stepper(&layout, optim, solo()).unwrap();
    let mut gpu = options.stepper_on(&cuda(), &layout, optim, solo()).unwrap();
    paint_params(&mut host);
    paint_params(&mut gpu);
    train(&mut host).unwrap();
    train(&mut gpu).unwrap();
    let (host, gpu) = (Outcome::of(&host).unwrap(), Outcome::of(&gpu).unwrap());
    gpu.assert_same(&host, what);
    assert_eq!(gpu.status, host.status, "{what}");
}

/// The calls of a test, on a stepper of either device.
trait Trainer {
    fn pass(&mut self, options: &Options, gradient: &mut dyn FnMut(usize, &mut [f32]) -> bool) -> Result<()>;
    fn accumulate(&mut self, micro_batches: u32) -> Result<()>;
    fn set_lr(&mut self, lr: f64) -> Result<()>;
    fn set_frozen(&mut self, param: usize, frozen: bool) -> Result<()>;
    fn abandon_a_pass(&mut self) -> Result<()>;
    fn join(&mut self) -> Result<bool>;
}

impl<D: Device> Trainer for Stepper<D> {
    fn pass(&mut self, options: &Options, gradient: &mut dyn FnMut(usize, &mut [f32]) -> bool) -> Result<()> {
        pass(self, options, gradient)
    }

    /// Each micro-batch replaces the gradients: the test needs only that the last one launches.
    fn accumulate(&mut self, micro_batches: u32) -> Result<()> {
        let layout = self.layout().clone();
        let mut pass = self.begin_accumulating(NonZeroU32::new(micro_batches).unwrap())?;
        for batch in 0..micro_batches {
            for (param, id) in layout.ids().enumerate().collect::<Vec<_>>().into_iter().rev() {
                let len = layout.parameter(id)?.len as usize;
                let values: Vec<f32> = (0..len).map(|k| paint_gradient(batch as usize, param, k)).collect();
                pass.write(id.grad(), &values)?;
                pass.grad_ready(id)?;
            }
            if batch + 1 < micro_batches {
                pass.next_micro_batch()?;
            }
        }
        pass.finish()
    }

    fn set_lr(&mut self, lr: f64) -> Result<()> {
        Stepper::set_lr(self, instep::layout::DEFAULT_GROUP, lr)
    }

    fn set_frozen(&mut self, param: usize, frozen: bool) -> Result<()> {
        let id = self.layout().ids().nth(param).unwrap();
        Stepper::set_frozen(self, id, frozen)
    }

    fn abandon_a_pass(&mut self) -> Result<()> {
        let id = self.layout().ids().last().unwrap();
        let len = self.layout().parameter(id)?.len as usize;
        let mut pass = self.begin()?;
        pass.write(id.grad(), &vec![1.0; len])?;
        pass.grad_ready(id)?;
        pass.abandon().map(drop)
    }

    fn join(&mut self) -> Result<bool> {
        Stepper::join(self)
    }
}

fn options(mode: Mode) -> Options {
    Options { mode, cap: Some(8 << 10), world_size: 3, ..Options::default() }
}

#[test]
fn every_optimizer_gives_the_hosts_bits_in_one_mode_or_another() {
    for (k, optim) in optimizers().into_iter().enumerate() {
        let options = options(MODES[k % 3]);
        assert_same(&LENGTHS, optim, &options, &format!("{optim:?} {:?}", options.mode), |trainer| {
            let gradient = painted(&options);
            (0..4).try_for_each(|step| {
                trainer.pass(&options, &mut |param, values| gradient(step, param, values))
            })
        });
    }
}

#[test]
fn groups_of_one_launch_keep_the_states_that_each_of_them_has() {
    let rms = RmsProp { lr: 0.01, ..RmsProp::default() };
    let sgd = Sgd { lr: 0.05, ..Sgd::default() };
    let adamw = AdamW { lr: 0.01, ..AdamW::default() };
    let of_rms = [RmsProp { momentum: 0.9, ..rms }, RmsProp { centered: true, ..rms }, rms].map(Optim::of);
    let of_sgd =
        [Sgd { momentum: 0.9, ..sgd }, sgd, Sgd { momentum: 0.9, nesterov: true, ..sgd }].map(Optim::of);
    let of_adam =
        [AdamW { amsgrad: true, ..adamw }, adamw, AdamW { weight_decay: 0.0, ..adamw }].map(Optim::of);
    // Runs of full tiles, and what is shorter than one.
    let lengths = [6149, 300, 4096, 5, 2048, 6144];
    for optims in [of_rms, of_sgd, of_adam] {
        let add = |builder: LayoutBuilder, (k, length): (usize, usize)| {
            builder.param(format!("p{k}"), length).in_group(["default", "second", "third"][k % 3])
        };
        let layout = lengths.into_iter().enumerate().fold(Layout::builder(), add).build().unwrap();
        let builder = || {
            let [first, second, third] = optims;
            first.builder(&layout).group("second", second.boxed()).group("third", third.boxed())
        };
        let options = Options::default();
        let mut host = builder().host(Solo::default()).unwrap();
        // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
        let mut gpu = unsafe { builder().cuda(Solo::default(), &cuda()) }.unwrap();
        paint_params(&mut host);
        paint_params(&mut gpu);
        let gradient = painted(&options);
        for step in 0..3 {
            pass(&mut host, &options, |param, values| gradient(step, param, values)).unwrap();
            pass(&mut gpu, &options, |param, values| gradient(step, param, values)).unwrap();
        }
        Outcome::of(&gpu).unwrap().assert_same(&Outcome::of(&host).unwrap(), &format!("{optims:?}"));
    }
}

#[test]
fn layouts_without_elements_make_passes_too() {
    for (mode, unused) in MODES.into_iter().zip([Unused::Skip, Unused::StepZero, Unused::Skip]) {
        let options = Options { unused, ..options(mode) };
        assert_same(&[0, 0], few_optimizers()[3], &options, &format!("{mode:?}"), |trainer| {
            (0..3).try_for_each(|_| trainer.pass(&options, &mut |_, _| true))
        });
    }
}

#[test]
fn a_global_norm_clips_and_skips_as_on_the_host() {
    for mode in [Mode::Sequential, Mode::Normed] {
        let options = Options { max_norm: Some(0.5), skip_nonfinite: true, loss_scale: 8.0, ..options(mode) };
        for optim in few_optimizers() {
            assert_same(&[300, 5, 2049], optim, &options, &format!("{optim:?} {mode:?}"), |trainer| {
                let gradient = painted(&options);
                (0..5).try_for_each(|step| {
                    trainer.pass(&options, &mut |param, values| {
                        let given = gradient(step, param, values);
                        if step == 2 && param == 0 {
                            values[17] = f32::INFINITY;
                        }
                        given
                    })
                })
            });
        }
    }
}

#[test]
fn what_is_left_out_frozen_or_abandoned_stays_as_on_the_host() {
    for (mode, unused) in MODES.into_iter().flat_map(|m| [Unused::Skip, Unused::StepZero].map(|u| (m, u))) {
        let options = Options { unused, ..options(mode) };
        assert_same(
            &[700, 0, 256, 31, 4000],
            few_optimizers()[2],
            &options,
            &format!("{mode:?}"),
            |trainer| {
                let gradient = painted(&options);
                for step in 0..6 {
                    trainer.set_lr(0.01 / (step + 1) as f64)?;
                    trainer.set_frozen(3, step % 3 == 1)?;
                    trainer.pass(&options, &mut |param, values| {
                        let frozen = param == 3 && step % 3 == 1;
                        (param + step) % 4 != 0 && !frozen && gradient(step, param, values)
                    })?;
                    if step == 3 {
                        trainer.abandon_a_pass()?;
                    }
                }
                Ok(())
            },
        );
    }
}

#[test]
fn micro_batches_and_joined_ranks_give_the_hosts_bits() {
    for mode in MODES {
        assert_same(&[300, 5, 2049], few_optimizers()[3], &options(mode), &format!("{mode:?}"), |trainer| {
            (1..4).try_for_each(|micro_batches| trainer.accumulate(micro_batches))
        });
        let options = Options { uneven: Some(Divisor::ContributingRanks), world_size: 1, ..options(mode) };
        assert_same(&[300, 5], few_optimizers()[1], &options, &format!("{mode:?}, joining"), |trainer| {
            trainer.accumulate(1)?;
            assert!(!trainer.join()?, "no rank had data");
            trainer.accumulate(2)
        });
    }
}

#[test]
fn a_trainer_that_runs_far_ahead_changes_rates_that_no_earlier_pass_sees() {
    let options = options(Mode::Eager);
    assert_same(&[5000], few_optimizers()[0], &options, "rates", |trainer| {
        let gradient = painted(&options);
        (0..40).try_for_each(|step| {
            trainer.set_lr(0.5 / (step + 1) as f64)?;
            trainer.pass(&options, &mut |param, values| gradient(step, param, values))
        })
    });
}

#[test]
fn the_latest_status_is_the_last_passs_once_it_has_ended() {
    let (options, layout) = (Options { max_norm: Some(0.5), ..options(Mode::Normed) }, layout(&[300, 700]));
    let mut stepper = options.stepper_on(&cuda(), &layout, few_optimizers()[2], Presummed(3)).unwrap();
    paint_params(&mut stepper);
    assert_eq!(stepper.latest_status(), None);
    let gradient = painted(&options);
    for step in 0..20 {
        pass(&mut stepper, &options, |param, values| gradient(step, param, values)).unwrap();
        let waited = stepper.status().unwrap();
        assert_eq!(stepper.latest_status(), Some(waited));
        assert_eq!(waited.pass, step as u64 + 1);
    }
}

#[test]
fn a_replayed_graph_clips_each_group_as_the_host_does() {
    let (layout, options) =
        (grouped(&[300, 5, 2049, 700]), Options { max_norm: None, ..options(Mode::Normed) });
    let builder = || with_group_clips(few_optimizers()[3].builder(&layout)).mode(Mode::Normed);
    let builder = || builder().skip_nonfinite(true).bucket_cap_bytes(1 << 10);
    let gradient = painted(&options);
    let mut host = builder().host(Presummed(3)).unwrap();
    // SAFETY: the trainer's stream is the stand-in's, which is a number, or one of this test's own.
    let mut gpu = unsafe { builder().cuda(Presummed(3), &capturable()) }.unwrap();
    paint_params(&mut host);
    paint_params(&mut gpu);
    pass(&mut host, &options, |param, values| gradient(0, param, values)).unwrap();
    pass(&mut gpu, &options, |param, values| gradient(0, param, values)).unwrap();
    let hand_over = |mut pass: Pass<'_, CudaDevice>| {
        for id in layout.ids().collect::<Vec<_>>().into_iter().rev() {
            pass.ptr(id.grad())?;
            pass.grad_ready(id)?;
        }
        pass.finish()
    };
    let captured = gpu.capture(hand_over).unwrap();
    for _ in 0..3 {
        pass(&mut host, &options, |param, values| gradient(0, param, values)).unwrap();
        // SAFETY: the capture holds no work of the trainer.
        unsafe { gpu.replay(&captured).unwrap() };
    }
    for group in ["default", "alone", "free"] {
        let norms = (gpu.group_norm(group).unwrap(), host.group_norm(group).unwrap());
        assert!(norms.0 == norms.1 && norms.0.is_some(), "{group}: {norms:?}");
    }
    let (host, gpu) = (Outcome::of(&host).unwrap(), Outcome::of(&gpu).unwrap());
    gpu.assert_same(&host, "groups");
    assert_eq!(gpu.status, host.status);
    assert!(host.status.clip < 1.0);
}

#[test]
fn replayed_graphs_are_the_passes_that_they_captured() {
    for mode in MODES {
        let max_norm = (mode != Mode::Eager).then_some(0.5);
        let options = Options { max_norm, ..options(mode) };
        let lengths = [300, 5, 2049];
        let layout = layout(&lengths);
        let (optim, gradient) = (few_optimizers()[3], painted(&options));
        let mut host = options.stepper(&layout, optim, Presummed(3)).unwrap();
        let cuda = capturable();
        let mut gpu = options.stepper_on(&cuda, &layout, optim, Presummed(3)).unwrap();
        paint_params(&mut host);
        paint_params(&mut gpu);
        // The gradients stay as the first pass left them, because a sum over one rank changes nothing.
        pass(&mut host, &options, |param, values| gradient(0, param, values)).unwrap();
        pass(&mut gpu, &options, |param, values| gradient(0, param, values)).unwrap();
        let captured = gpu
            .capture(|mut pass| {
                for id in layout.ids().collect::<Vec<_>>().into_iter().rev() {
                    pass.ptr(id.grad())?;
                    pass.grad_ready(id)?;
                }
                pass.finish()
            })
            .unwrap();
        for replay in 0..20 {
            let lr = 0.01 / (replay + 1) as f64;
            Stepper::set_lr(&mut host, instep::layout::DEFAULT_GROUP, lr).unwrap();
            Stepper::set_lr(&mut gpu, instep::layout::DEFAULT_GROUP, lr).unwrap();
            pass(&mut host, &options, |param, values| gradient(0, param, values)).unwrap();
            // SAFETY: the capture holds no work of the trainer.
            unsafe { gpu.replay(&captured).unwrap() };
            if replay == 11 {
                // An ordinary pass between replays is another equal pass.
                pass(&mut host, &options, |param, values| gradient(0, param, values)).unwrap();
                pass(&mut gpu, &options, |param, values| gradient(0, param, values)).unwrap();
            }
        }
        let (host, gpu) = (Outcome::of(&host).unwrap(), Outcome::of(&gpu).unwrap());
        gpu.assert_same(&host, &format!("{mode:?}"));
        assert_eq!(gpu.status, host.status);
    }
}

/// Returns a GPU whose stream can be captured; the legacy default stream cannot.
fn capturable() -> Cuda {
    let cuda = cuda();
    let stream = if hardware::is_required() {
        hardware::entered(&**cuda.driver(), |driver| driver.create_stream(0))
    } else {
        COMPUTE
    };
    cuda.compute_stream(stream)
}

#[test]
fn the_address_of_a_frozen_gradient_waits_for_the_sum_of_its_bucket() {
    for mode in MODES {
        let options = Options { record: true, ..options(mode) };
        let layout = layout(&[300, 400]);
        let frozen = layout.ids().next().unwrap();
        let mut stepper = options.stepper_on(&cuda(), &layout, few_optimizers()[2], Presummed(3)).unwrap();
        paint_params(&mut stepper);
        stepper.set_frozen(frozen, true).unwrap();
        let gradient = painted(&options);
        for step in 0..2 {
            pass(&mut stepper, &options, |param, values| param == 1 && gradient(step, param, values))
                .unwrap();
            stepper.ptr(frozen.grad()).unwrap();
        }
        let recording = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recording), [], "{mode:?}");
    }
}

#[test]
fn a_recording_holds_what_ran_and_when_the_trainers_stream_stood_still() {
    for mode in MODES {
        let options = Options { record: true, unused: Unused::Skip, ..options(mode) };
        let layout = layout(&[5000, 300, 4000]);
        let mut stepper = options.stepper_on(&cuda(), &layout, few_optimizers()[2], Presummed(3)).unwrap();
        paint_params(&mut stepper);
        let gradient = painted(&options);
        for step in 0..4 {
            pass(&mut stepper, &options, |param, values| param != step && gradient(step, param, values))
                .unwrap();
        }
        let recording = stepper.take_recording().unwrap();
        // A recording without times fails the device, and the next call says why.
        stepper.read(layout.ids().next().unwrap(), &mut [0.0; 5000]).unwrap();
        assert_eq!(stepper.check(&recording), [], "{mode:?}");
        let works = |op: &Op| {
            !matches!(op.action, Action::Wait(_) | Action::Record(_)) && op.stream != Stream::Compute
        };
        let submitted = recording.list.iter().filter_map(|entry| match entry {
            Traced::Op(op) if works(op) => Some(*op),
            _ => None,
        });
        assert_eq!(recording.ran.iter().map(|ran| ran.op).collect::<Vec<_>>(), submitted.collect::<Vec<_>>());
        assert!(!recording.blocked.is_empty(), "{mode:?}: the trainer reads what was stepped");
    }
}
