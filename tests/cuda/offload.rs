//! A GPU offloads its steps to the host: the host's bits, each op's call, failures of the host's work, and refusals.
//!
//! `cuda::shards` has sharded ranks with offload among its cases; `ranks::offload` has the schedule and the bytes of
//! each memory. Every result is compared with the host device without offload.

use std::collections::HashMap;
use std::sync::Arc;

use instep::cuda::{Cuda, CudaDevice};
use instep::layout::DEFAULT_GROUP;
use instep::op::{Action, Op, Stream};
use instep::optim::{Custom, ParamStep, StepParam};
use instep::{Device, Error, Gradients, Isa, Layout, Mode, OffloadPolicy, Result, Solo, Stepper, Unused};

use super::driver_calls::{assert_calls, ops, streams};
use crate::support::device::cuda;
use crate::support::hardware;
use crate::support::stand_in::calls::Call;
use crate::support::stand_in::{COMPUTE, StandIn};
use crate::support::{
    LENGTHS, MODES, Optim, Options, Outcome, Presummed, few_optimizers, layout, optimizers, paint_params,
    painted, pass,
};

const PAGEABLE: OffloadPolicy = OffloadPolicy { pin_memory: false };

fn options(mode: Mode) -> Options {
    let max_norm = (mode == Mode::Normed).then_some(0.5);
    Options { mode, max_norm, cap: Some(8 << 10), world_size: 3, record: true, ..Options::default() }
}

fn offloaded(
    (options, policy): (&Options, OffloadPolicy),
    layout: &Layout,
    optim: Optim,
    cuda: &Cuda,
) -> Stepper<CudaDevice> {
    let builder = options.builder(layout, optim).offload(policy);
    // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
    unsafe { builder.cuda(Presummed(options.world_size), cuda).unwrap() }
}

/// Makes passes with rates that change before each pass, one with a frozen parameter, and some with missing gradients.
fn train<D: Device>(stepper: &mut Stepper<D>, options: &Options) -> Result<()> {
    let (gradient, last) = (painted(options), stepper.layout().ids().next_back().unwrap());
    paint_params(stepper);
    for step in 0..6 {
        stepper.set_lr(DEFAULT_GROUP, 0.01 / (step + 1) as f64)?;
        stepper.set_frozen(last, step == 3)?;
        pass(stepper, options, |param, values| {
            let is_frozen = step == 3 && param + 1 == LENGTHS.len();
            let is_unused = (param + step).is_multiple_of(5) || is_frozen;
            !is_unused && gradient(step, param, values)
        })?;
    }
    Ok(())
}

#[test]
fn every_optimizer_on_the_host_of_a_gpu_gives_the_bits_of_the_host_device() {
    let layout = layout(&LENGTHS);
    for (k, optim) in optimizers().into_iter().enumerate() {
        let gradients = [Gradients::Keep, Gradients::Zero][k % 2];
        let options = Options { gradients, ..options(MODES[k % 3]) };
        let policy = if k % 4 == 1 { PAGEABLE } else { OffloadPolicy::default() };
        let mut host = options.stepper(&layout, optim, Presummed(options.world_size)).unwrap();
        let mut gpu = offloaded((&options, policy), &layout, optim, &cuda());
        train(&mut host, &options).unwrap();
        train(&mut gpu, &options).unwrap();
        let [ours, theirs] = [Outcome::of(&gpu).unwrap(), Outcome::of(&host).unwrap()];
        ours.assert_same(&theirs, &format!("{optim:?}, {policy:?}"));
        assert_eq!(ours.status, theirs.status, "{optim:?}");
        let recording = gpu.take_recording().unwrap();
        assert_eq!(gpu.check(&recording), [], "{optim:?}");
        gpu.close().unwrap();
    }
}

#[test]
fn each_op_of_the_host_is_one_call_and_each_copy_one_between_the_two_memories() {
    for mode in MODES {
        let options = Options { cap: Some(64 << 10), world_size: 2, ..options(mode) };
        let (stand_in, layout) = (StandIn::new(), layout(&[70_000, 0, 300, 2049, 40_000]));
        let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE).optim_priority(-1);
        let policy = OffloadPolicy::default();
        let mut stepper = offloaded((&options, policy), &layout, few_optimizers()[2], &cuda);
        let mut by_stream = streams(&stand_in);
        paint_params(&mut stepper);
        let gradient = painted(&options);
        let one = |stepper: &mut Stepper<CudaDevice>, step: usize| {
            pass(stepper, &options, |param, values| {
                !(param + step).is_multiple_of(3) && gradient(step, param, values)
            })
            .unwrap();
        };
        for step in 0..6 {
            one(&mut stepper, step);
        }
        let (list, calls) = (ops(&stepper.take_recording().unwrap().list), stand_in.take_calls());
        follow_copies(&mut by_stream, &list, &calls);
        assert_calls(&list, &calls, stepper.plan(), &by_stream, None);
        assert!(!calls.iter().any(|call| matches!(call, Call::Launch { .. })), "{mode:?}: no kernel");
        for step in 6..10 {
            one(&mut stepper, step);
            let made = stand_in.take_calls();
            let made: Vec<&Call> = made.iter().filter(|call| is_made(call)).collect();
            // Recorded ops take timed events.
            assert!(made.iter().all(|call| matches!(call, Call::Make { what: "create_event" })), "{made:?}");
        }
    }
}

fn is_made(call: &Call) -> bool {
    matches!(call, Call::Make { .. } | Call::CreateStream { .. })
}

/// Finds the streams of the copies. They are different streams, and neither is the reduce stream or the optim stream.
fn follow_copies(by_stream: &mut HashMap<Stream, instep::StreamHandle>, list: &[Op], calls: &[Call]) {
    let of = |wanted: fn(&Call) -> Option<instep::StreamHandle>| calls.iter().find_map(wanted).unwrap();
    let down = of(|call| if let Call::CopyDown { stream, .. } = call { Some(*stream) } else { None });
    let up = of(|call| if let Call::CopyUp { stream, .. } = call { Some(*stream) } else { None });
    assert!(down != up && by_stream.values().all(|known| ![down, up].contains(known)));
    assert!(list.iter().any(|op| op.stream == Stream::Upload && matches!(op.action, Action::Copy { .. })));
    by_stream.extend([(Stream::Download, down), (Stream::Upload, up)]);
}

#[test]
fn a_captured_pass_of_offloaded_steps_is_replayed_with_the_rates_of_each_replay() {
    for mode in MODES {
        let options = Options { unused: Unused::StepZero, ..options(mode) };
        let layout = layout(&[300, 2049, 5]);
        let gradients: Vec<Vec<f32>> =
            [300, 2049, 5].iter().map(|len| (0..*len).map(|k| (k % 7) as f32 - 3.0).collect()).collect();
        let write = |param: usize, values: &mut [f32]| {
            values.copy_from_slice(&gradients[param]);
            true
        };
        let mut host = options.stepper(&layout, few_optimizers()[2], Presummed(3)).unwrap();
        let cuda = Cuda::on(StandIn::new()).compute_stream(COMPUTE);
        let mut gpu = offloaded((&options, OffloadPolicy::default()), &layout, few_optimizers()[2], &cuda);
        paint_params(&mut host);
        paint_params(&mut gpu);
        pass(&mut gpu, &options, write).unwrap();
        pass(&mut host, &options, write).unwrap();
        let ids: Vec<_> = layout.ids().collect();
        let captured = gpu
            .capture(|mut pass| {
                for (id, values) in ids.iter().zip(&gradients).rev() {
                    // The gradients of the pass before are still there.
                    assert!(!values.is_empty());
                    pass.ptr(id.grad())?;
                    pass.grad_ready(*id)?;
                }
                pass.finish()
            })
            .unwrap();
        for replay in 0..20 {
            let lr = 0.01 / (replay + 1) as f64;
            host.set_lr(DEFAULT_GROUP, lr).unwrap();
            gpu.set_lr(DEFAULT_GROUP, lr).unwrap();
            pass(&mut host, &options, write).unwrap();
            // SAFETY: the capture has no work of the trainer's.
            unsafe { gpu.replay(&captured).unwrap() };
        }
        let [ours, theirs] = [Outcome::of(&gpu).unwrap(), Outcome::of(&host).unwrap()];
        ours.assert_same(&theirs, &format!("{mode:?}"));
        drop(captured);
        gpu.close().unwrap();
    }
}

/// A caller's own rule that runs only on the host.
struct OnTheHost(fn(&ParamStep<'_>) -> Result<()>);

impl StepParam for OnTheHost {
    fn name(&self) -> &str {
        "on the host"
    }

    fn step_param(&self, step: ParamStep<'_>) -> Result<()> {
        (self.0)(&step)?;
        for (p, grad) in step.param.iter_mut().zip(step.grad_sum) {
            *p -= step.multiplier * grad;
        }
        Ok(())
    }
}

#[test]
fn code_of_the_callers_own_steps_on_the_host_and_what_fails_in_it_is_told() {
    let layout = Layout::builder().param("a", 4).param("b", 700).build().unwrap();
    let b = layout.id("b").unwrap();
    let build = |rule: OnTheHost, cuda: &Cuda| {
        let builder = Stepper::builder(&layout, Custom::new(rule)).bucket_cap_bytes(1);
        // SAFETY: as above.
        unsafe { builder.offload(OffloadPolicy::default()).cuda(Solo::default(), cuda).unwrap() }
    };
    let one = |stepper: &mut Stepper<CudaDevice>| {
        let mut pass = stepper.begin()?;
        for id in layout.ids().rev() {
            pass.write(id.grad(), &vec![0.5; layout.parameter(id)?.len as usize])?;
            pass.grad_ready(id)?;
        }
        pass.finish()
    };
    let mut stepper = build(OnTheHost(|_| Ok(())), &cuda());
    one(&mut stepper).unwrap();
    let mut values = vec![0.0; 700];
    stepper.read(b, &mut values).unwrap();
    assert_eq!(values, vec![-0.5; 700]);
    stepper.close().unwrap();
    let failures: [fn(&ParamStep<'_>) -> Result<()>; 2] =
        [|_| panic!("out of ideas"), |_| Err(Error::layout("test", "out of ideas", ""))];
    for failure in failures {
        let (stand_in, cuda) = gpu();
        let mut stepper = build(OnTheHost(failure), &cuda);
        let outcome = one(&mut stepper).and_then(|()| stepper.status().map(drop));
        let error = outcome.unwrap_err();
        assert!(matches!(&error, Error::Poisoned { op, .. } if op.contains("step")), "{error}");
        assert!(error.to_string().contains("out of ideas"), "{error}");
        stand_in.take_calls();
        assert_eq!(one(&mut stepper).unwrap_err(), error);
        let called = |call: &Call| matches!(call, Call::OnHost { .. } | Call::CopyUp { .. });
        assert!(!stand_in.take_calls().iter().any(called), "nothing comes after a failure");
        assert!(matches!(stepper.read(b, &mut values), Err(Error::Poisoned { .. })));
        assert!(matches!(stepper.close(), Err(Error::Poisoned { .. })));
        drop(cuda);
        assert_eq!(stand_in.allocated_bytes(), 0);
    }
}

fn gpu() -> (Arc<StandIn>, Cuda) {
    let stand_in = StandIn::new();
    let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE);
    (stand_in, cuda)
}

#[test]
fn a_call_that_the_driver_refuses_poisons_and_frees_both_memories() {
    let layout = layout(&[3000, 300]);
    for call in ["call_host", "copy_down", "copy_up"] {
        let (stand_in, cuda) = gpu();
        let options = options(Mode::Eager);
        let optim = few_optimizers()[2];
        let mut stepper = offloaded((&options, OffloadPolicy::default()), &layout, optim, &cuda);
        let gradient = painted(&options);
        pass(&mut stepper, &options, |param, values| gradient(0, param, values)).unwrap();
        stand_in.break_call(call);
        let broken = pass(&mut stepper, &options, |param, values| gradient(1, param, values));
        let error = broken.and_then(|()| stepper.status().map(drop)).unwrap_err();
        assert!(matches!(error.cause(), Error::Device { call: c, code: 719, .. } if *c == call), "{error}");
        stand_in.break_call("nothing");
        assert_eq!(stepper.status().unwrap_err(), error);
        drop((stepper, cuda));
        assert_eq!(stand_in.allocated_bytes(), 0, "{call}");
    }
}

/// The driver may still call work that the stepper has enqueued.
#[test]
fn memory_of_the_host_outlives_a_stepper_whose_gpu_does_not_end() {
    let (stand_in, cuda) = gpu();
    let layout = layout(&[3000, 300]);
    let options = options(Mode::Eager);
    let stepper = offloaded((&options, OffloadPolicy::default()), &layout, few_optimizers()[2], &cuda);
    stand_in.stall();
    drop(stepper);
    assert!(stand_in.allocated_bytes() > 4 * 2 * 3300, "page-locked parameters and gradients");
    stand_in.go_on();
    stand_in.forget_memory();
}

#[test]
fn a_gpu_beside_the_host_has_the_hosts_options_and_refuses_what_would_cross_over() {
    let (layout, (_stand_in, cuda)) = (layout(&[3000, 300]), gpu());
    let id = layout.ids().next().unwrap();
    let options = Options { isa: Some(Isa::Baseline), threads: Some(2), ..options(Mode::Eager) };
    let mut stepper = offloaded((&options, OffloadPolicy::default()), &layout, few_optimizers()[2], &cuda);
    let refused = stepper.ptr(id.state("exp_avg")).unwrap_err();
    assert!(refused.to_string().contains("host's memory"), "{refused}");
    stepper.ptr(id).unwrap();
    stepper.close().unwrap();
    let mut stepper = offloaded((&options, PAGEABLE), &layout, few_optimizers()[2], &cuda);
    let gradient = painted(&options);
    pass(&mut stepper, &options, |param, values| gradient(0, param, values)).unwrap();
    let refused = stepper.capture(|pass| pass.finish()).unwrap_err();
    assert!(refused.to_string().contains("pin_memory"), "{refused}");
    stepper.close().unwrap();
    let host = cuda.driver().clone();
    host.enter().unwrap();
    let on_gpu = host.allocate(8, COMPUTE).unwrap().0 as usize;
    host.leave();
    let scaler = std::ptr::with_exposed_provenance_mut::<f32>(on_gpu);
    let mut on_host = [1.0f32, 0.0];
    for (at, is_reached) in [(scaler, false), (on_host.as_mut_ptr(), true)] {
        let builder = Stepper::builder(&layout, instep::AdamW::default()).offload(OffloadPolicy::default());
        // SAFETY: two f32, which nothing else touches, for as long as the stepper lives.
        let built = unsafe {
            builder.mode(Mode::Sequential).grad_scaler(at, at.wrapping_add(1)).cuda(Solo::default(), &cuda)
        };
        assert_eq!(built.is_ok(), is_reached, "{:?}", built.map(drop));
    }
    // SAFETY: allocated above, and nothing uses it.
    unsafe {
        host.enter().unwrap();
        host.free(instep::DevicePtr(on_gpu as u64), COMPUTE);
        host.leave();
    }
}

#[test]
fn a_scaler_of_the_trainers_thread_is_asked_and_told_between_passes() {
    let layout = Layout::builder().param("w", 700).build().unwrap();
    let w = layout.id("w").unwrap();
    let [scale, found_inf] = [8.0f32, 0.0].map(|value| Box::into_raw(Box::new(value)));
    let builder = Stepper::builder(&layout, instep::Sgd { lr: 1.0, ..Default::default() }).mode(Mode::Normed);
    // SAFETY: both outlive the stepper, and are touched between passes alone; the stream as above.
    let built = unsafe {
        builder.grad_scaler(scale, found_inf).offload(OffloadPolicy::default()).cuda(Solo::default(), &cuda())
    };
    let mut stepper = built.unwrap();
    let mut told = Vec::new();
    for gradient in [16.0, f32::INFINITY, 4.0, f32::INFINITY, 4.0] {
        let mut pass = stepper.begin().unwrap();
        pass.write(w.grad(), &[gradient; 700]).unwrap();
        pass.finish().unwrap();
        // SAFETY: no pass is open.
        unsafe {
            told.push(*found_inf);
            (*scale, *found_inf) = (if *found_inf > 0.0 { *scale / 2.0 } else { *scale }, 0.0);
        }
    }
    let mut values = [0.0; 700];
    stepper.read(w, &mut values).unwrap();
    assert_eq!((told, values[699]), (vec![0.0, 1.0, 0.0, 1.0, 0.0], -5.0));
    if !hardware::is_required() {
        let refused = stepper.capture(|pass| pass.finish()).unwrap_err();
        assert!(refused.to_string().contains("grad_scaler"), "{refused}");
    }
    stepper.close().unwrap();
    // SAFETY: made above, and no longer used.
    unsafe { [scale, found_inf].into_iter().for_each(|value| drop(Box::from_raw(value))) };
}
