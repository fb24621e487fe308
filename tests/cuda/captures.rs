//! Trainers misuse addresses and captures on a GPU: they ask early, fail, panic, leave a pass, or outlive a stepper.
//!
//! The stand-in refuses what a driver refuses: waits across a capture's border, queries inside a capture, a stream that
//! stays in a capture. Each test shows that the stepper then trains on with the host's bits.

use std::any::Any;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use instep::cuda::{Cuda, CudaDevice};
use instep::layout::ForeignBucket;
use instep::{
    Borrowed, Collective, Error, Layout, Mode, Pass, Place, Result, Solo, Stepper, Unused, collective,
};

use crate::support::stand_in::calls::Call;
use crate::support::stand_in::{COMPUTE, StandIn};
use crate::support::{MODES, Options, Outcome, few_optimizers, layout, paint_params, painted, pass};

fn options(mode: Mode) -> Options {
    Options { mode, cap: Some(1 << 10), record: true, ..Options::default() }
}

fn gpu() -> (Arc<StandIn>, Cuda) {
    let stand_in = StandIn::new();
    let cuda = Cuda::on(stand_in.clone()).compute_stream(COMPUTE);
    (stand_in, cuda)
}

#[test]
fn what_the_trainer_enqueues_up_to_a_hand_over_comes_before_the_sum_however_early_it_asked_for_addresses() {
    for mode in MODES {
        let (stand_in, cuda) = gpu();
        let layout = layout(&[300, 700, 400]);
        let options = Options { unused: Unused::StepZero, ..options(mode) };
        let mut stepper = options.stepper_on(&cuda, &layout, few_optimizers()[2], Solo::default()).unwrap();
        paint_params(&mut stepper);
        assert_eq!(stepper.plan().buckets().len(), 3);
        for step in 0..3 {
            let mut pass = stepper.begin().unwrap();
            let ids: Vec<_> = layout.ids().collect();
            for id in &ids {
                pass.ptr(*id).unwrap();
                pass.ptr(id.grad()).unwrap();
            }
            for id in ids.into_iter().rev() {
                stand_in.take_calls();
                pass.grad_ready(id).unwrap();
                let calls = stand_in.take_calls();
                let marked = calls.iter().find_map(|call| match call {
                    Call::Record { event, stream: COMPUTE } => Some(*event),
                    _ => None,
                });
                let marked =
                    marked.unwrap_or_else(|| panic!("{mode:?}, pass {step}: no position: {calls:?}"));
                let waits = |call: &Call| matches!(call, Call::Wait { event, stream } if *event == marked && *stream != COMPUTE);
                assert!(calls.iter().any(waits), "{mode:?}, pass {step}: {calls:?}");
            }
            pass.finish().unwrap();
        }
        let recording = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recording), [], "{mode:?}");
    }
}

/// Makes a complete pass.
fn whole(mut pass: Pass<'_, CudaDevice>, layout: &Layout) -> Result<()> {
    for id in layout.ids().collect::<Vec<_>>().into_iter().rev() {
        pass.ptr(id.grad())?;
        pass.grad_ready(id)?;
    }
    pass.finish()
}

type Misdeed = fn(Pass<'_, CudaDevice>, &Layout, &StandIn) -> Result<()>;
/// The trainer's action, in words and as code, and the error that it expects.
type Case = (&'static str, Misdeed, fn(&Error) -> bool);

#[test]
fn a_capture_that_comes_to_nothing_leaves_the_stepper_as_it_was() {
    let order = |error: &Error| matches!(error, Error::Order(_));
    let device = |error: &Error| matches!(error, Error::Device { .. });
    let misdeeds: [Case; 10] = [
        ("errs", |_, _, _| Err(Error::order("test", "made up", "")), order),
        ("drops its pass", |_, _, _| Ok(()), order),
        ("gives its pass up", |pass, _, _| pass.abandon().map(drop), order),
        (
            "leaks its pass",
            |pass, _, _| {
                std::mem::forget(pass);
                Ok(())
            },
            order,
        ),
        (
            "makes another pass",
            |mut pass, layout, _| {
                for id in layout.ids() {
                    pass.ptr(id.grad())?;
                }
                Stepper::finish(&mut pass)?;
                pass.begin().map(|second| second.detach())
            },
            order,
        ),
        (
            "changes the stepper after its pass",
            |mut pass, layout, _| {
                Stepper::abandon(&mut pass)?;
                pass.set_frozen(layout.ids().next().unwrap(), true)
            },
            order,
        ),
        ("reads", |pass, layout, _| pass.read(layout.ids().next().unwrap(), &mut [0.0; 300]), order),
        ("writes", |mut pass, layout, _| pass.write(layout.ids().next().unwrap().grad(), &[0.0; 300]), order),
        (
            "breaks the driver",
            |pass, layout, gpu| {
                gpu.break_call("launch");
                whole(pass, layout)
            },
            device,
        ),
        (
            "goes on with a broken driver",
            |pass, layout, gpu| {
                gpu.break_call("launch");
                let _ = whole(pass, layout);
                Ok(())
            },
            device,
        ),
    ];
    for (mode, (what, misdeed, expected)) in MODES.into_iter().flat_map(|mode| misdeeds.map(|m| (mode, m))) {
        let (stand_in, cuda) = gpu();
        let (options, optim, layout) = (options(mode), few_optimizers()[3], layout(&[300, 5, 700]));
        let gradient = painted(&options);
        let mut host = options.stepper(&layout, optim, Solo::default()).unwrap();
        let mut gpu = options.stepper_on(&cuda, &layout, optim, Solo::default()).unwrap();
        paint_params(&mut host);
        paint_params(&mut gpu);
        pass(&mut host, &options, |param, values| gradient(0, param, values)).unwrap();
        pass(&mut gpu, &options, |param, values| gradient(0, param, values)).unwrap();
        let error = gpu.capture(|pass| misdeed(pass, &layout, &stand_in)).unwrap_err();
        assert!(expected(&error), "{mode:?}, a trainer that {what}: {error}");
        stand_in.break_call("nothing");
        let captured = gpu.capture(|pass| whole(pass, &layout)).unwrap();
        pass(&mut host, &options, |param, values| gradient(0, param, values)).unwrap();
        // SAFETY: the capture holds no work of the trainer.
        unsafe { gpu.replay(&captured).unwrap() };
        pass(&mut host, &options, |param, values| gradient(1, param, values)).unwrap();
        pass(&mut gpu, &options, |param, values| gradient(1, param, values)).unwrap();
        let (host, gpu) = (Outcome::of(&host).unwrap(), Outcome::of(&gpu).unwrap());
        gpu.assert_same(&host, &format!("{mode:?}, {what}"));
        assert_eq!(gpu.status, host.status);
    }
}

#[test]
fn a_stepper_that_is_exchanged_in_its_capture_is_refused_from_then_on() {
    let layout = layout(&[300]);
    let gpus = [gpu(), gpu()];
    let [mut captured, mut other] = [0, 1].map(|k| one_pass(&gpus[k].1, &layout));
    let outcome = captured.capture(|mut pass| {
        std::mem::swap(&mut *pass, &mut other);
        Ok(())
    });
    assert!(matches!(outcome, Err(Error::Order(_))), "{outcome:?}");
    let calls = gpus[0].0.take_calls();
    assert!(calls.iter().any(|call| matches!(call, Call::EndCapture { .. })), "no stream is left capturing");
    assert!(matches!(other.begin().map(drop), Err(Error::Order(_))), "what it has queued is gone");
    captured.begin().unwrap().finish().unwrap();
    assert!(captured.status().is_ok());
}

fn one_pass(cuda: &Cuda, layout: &Layout) -> Stepper<CudaDevice> {
    let options = options(Mode::Eager);
    let mut stepper = options.stepper_on(cuda, layout, few_optimizers()[2], Solo::default()).unwrap();
    paint_params(&mut stepper);
    let gradient = painted(&options);
    pass(&mut stepper, &options, |param, values| gradient(0, param, values)).unwrap();
    stepper
}

#[test]
fn a_panic_in_a_capture_is_passed_on_and_no_stream_is_left_capturing() {
    let ((stand_in, cuda), layout) = (gpu(), layout(&[300]));
    let mut stepper = one_pass(&cuda, &layout);
    let panicked = catch_unwind(AssertUnwindSafe(|| stepper.capture(|_| panic!("in the trainer"))));
    assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"in the trainer"));
    assert!(stand_in.take_calls().iter().any(|call| matches!(call, Call::EndCapture { .. })));
    let captured = stepper.capture(|pass| whole(pass, &layout)).unwrap();
    // SAFETY: the capture holds no work of the trainer.
    unsafe { stepper.replay(&captured).unwrap() };
}

#[test]
fn a_capture_that_fails_ends_with_all_streams_joined() {
    let ((stand_in, cuda), layout) = (gpu(), layout(&[300, 700]));
    let mut stepper = one_pass(&cuda, &layout);
    stand_in.take_calls();
    stand_in.break_call("launch");
    stepper.capture(|pass| whole(pass, &layout)).unwrap_err();
    let calls = stand_in.take_calls();
    let end = calls.iter().position(|call| matches!(call, Call::EndCapture { .. })).unwrap();
    // A stream is in the capture once it has waited for the trainer's.
    let waiting = |call: &Call| match call {
        Call::Wait { stream, .. } if *stream != COMPUTE => Some(*stream),
        _ => None,
    };
    let forked: HashSet<_> = calls[..end].iter().filter_map(waiting).collect();
    assert_eq!(forked.len(), 2, "{calls:?}");
    for stream in forked {
        let on_it = |call: &Call| match call {
            Call::Record { stream: on, .. } | Call::Wait { stream: on, .. } => *on == stream,
            Call::Launch { stream: on, .. } | Call::Fill { stream: on, .. } => *on == stream,
            _ => false,
        };
        // The last call on it is a record, for which the trainer's stream waits next.
        let last = calls[..end].iter().rposition(on_it).unwrap();
        let Call::Record { event, .. } = calls[last] else { panic!("{stream:?}: {:?}", calls[last]) };
        assert_eq!(calls[last + 1], Call::Wait { stream: COMPUTE, event }, "{stream:?}: {calls:?}");
    }
    stand_in.break_call("nothing");
    stepper.capture(|pass| whole(pass, &layout)).unwrap();
}

#[test]
fn a_stream_that_is_captured_already_is_refused_and_nothing_has_failed() {
    let ((stand_in, cuda), layout) = (gpu(), layout(&[300]));
    let mut stepper = one_pass(&cuda, &layout);
    stand_in.break_call("begin_capture");
    let refused = stepper.capture(|pass| whole(pass, &layout)).unwrap_err();
    assert!(matches!(refused, Error::Device { call: "begin_capture", .. }), "{refused}");
    stepper.status().unwrap();
    stepper.capture(|pass| whole(pass, &layout)).unwrap_err();
    stepper.close().unwrap();
}

#[test]
fn a_capture_that_has_outlived_its_stepper_is_no_other_steppers() {
    let ((_, cuda), layout) = (gpu(), layout(&[300]));
    let mut captures = Vec::new();
    // The next stepper's plan may have the address of the last one's.
    for _ in 0..8 {
        let mut stepper = one_pass(&cuda, &layout);
        for captured in &captures {
            // SAFETY: refused before anything is touched.
            let refused = unsafe { stepper.replay(captured) };
            assert!(matches!(refused, Err(Error::Order(_))), "{refused:?}");
        }
        captures.push(stepper.capture(|pass| whole(pass, &layout)).unwrap());
    }
}

/// A communicator that counts its holds, and asserts that a hold outlives its graph.
struct Held {
    stand_in: Arc<StandIn>,
    alive: Arc<AtomicUsize>,
}

struct Hold {
    stand_in: Arc<StandIn>,
    alive: Arc<AtomicUsize>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let alive = self.alive.fetch_sub(1, Relaxed) - 1;
        assert_eq!(self.stand_in.live_graphs(), alive, "a hold ends before its graph");
    }
}

impl Collective for Held {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        1
    }

    fn reaches(&self, place: Place) -> bool {
        place == Place::Cuda(0)
    }

    fn hold(&self) -> Option<Box<dyn Any + Send + Sync>> {
        self.alive.fetch_add(1, Relaxed);
        Some(Box::new(Hold { stand_in: Arc::clone(&self.stand_in), alive: Arc::clone(&self.alive) }))
    }

    fn enqueue(&self, _: &mut collective::Call<'_>) -> Result<()> {
        Ok(())
    }

    fn abort(&self, _: &Error) {}
}

#[test]
fn a_captured_pass_holds_its_communicator_until_its_graph_is_freed() {
    let ((stand_in, cuda), layout) = (gpu(), layout(&[300]));
    let alive = Arc::new(AtomicUsize::new(0));
    let holds = || alive.load(Relaxed);
    let comm = Held { stand_in: Arc::clone(&stand_in), alive: Arc::clone(&alive) };
    let options = options(Mode::Eager);
    let mut stepper = options.stepper_on(&cuda, &layout, few_optimizers()[2], comm).unwrap();
    paint_params(&mut stepper);
    let gradient = painted(&options);
    pass(&mut stepper, &options, |param, values| gradient(0, param, values)).unwrap();
    assert_eq!(holds(), 0);
    let first = stepper.capture(|pass| whole(pass, &layout)).unwrap();
    let second = stepper.capture(|pass| whole(pass, &layout)).unwrap();
    assert_eq!((holds(), stand_in.live_graphs()), (2, 2));
    stepper.capture(|_| Err(Error::order("test", "made up", ""))).unwrap_err();
    assert_eq!(holds(), 2, "a failed capture holds nothing");
    drop(first);
    assert_eq!(holds(), 1);
    stepper.close().unwrap();
    assert_eq!(holds(), 1, "a captured pass outlives its stepper");
    drop(second);
    assert_eq!((holds(), stand_in.live_graphs()), (0, 0));
}

#[test]
fn a_tensor_that_ends_outside_the_gpus_memory_is_refused() {
    let (_, cuda) = gpu();
    let layout = layout(&[3000]);
    let id = layout.ids().next().unwrap();
    let driver = cuda.driver();
    let entered = driver.enter().unwrap();
    let memory = driver.allocate(40_000, COMPUTE).unwrap();
    if entered {
        driver.leave();
    }
    // The weights' last bytes, of 12,000, are past the end of the allocation.
    let [weights, grads] =
        [32_000, 0].map(|at| std::ptr::with_exposed_provenance_mut::<f32>(memory.0 as usize + at));
    let memory = Borrowed::new().param(id, weights).bucket(ForeignBucket::new(3000).gradient(id, 0), grads);
    let builder = few_optimizers()[0].builder(&layout).unused(Unused::StepZero);
    // SAFETY: refused before anything is touched.
    let refused = unsafe { builder.cuda_borrowing(Solo::default(), memory, &cuda) };
    let error = refused.map(drop).unwrap_err().to_string();
    assert!(error.contains("a tensor ends there"), "{error}");
}
