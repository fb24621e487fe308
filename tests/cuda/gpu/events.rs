//! An event must follow the caller's sum: the software GPU reports an event that comes too early as a named race.
//!
//! Each scene is a separate process, and a race ends it. The library cannot see what an event was recorded after.

use std::process::Command;

use instep::cuda::{Cuda, CudaDevice};
use instep::layout::ForeignBucket;
use instep::{AdamW, Borrowed, Error, EventHandle, Mode, ParamId, Pass, Stepper, Sums};

use super::memory::Gpu;
use crate::support::{MODES, layout};

const SCENE: &str = "INSTEP_EVENT_SCENE";
const LENGTH: usize = 5000;

/// The moment at which the event of a hand-over is recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Recorded {
    AfterSumAndReads,
    BeforeTheLastRead,
    BeforeTheSum,
    Never,
}

use Recorded::*;

/// A GPU, and a stepper of one parameter on its stream. Its sums have two ranks.
struct Scene {
    gpu: Gpu,
    id: ParamId,
    values: *mut f32,
    gradients: *mut f32,
    stepper: Stepper<CudaDevice>,
}

impl Scene {
    fn new(mode: Mode) -> Scene {
        let (gpu, layout) = (Gpu::open(), layout(&[LENGTH]));
        let cuda = Cuda::open(0).unwrap().compute_stream(gpu.stream());
        let [values, gradients] = [0.5, 0.0].map(|value| gpu.upload(&[value; LENGTH]));
        let id = layout.ids().next().unwrap();
        let bucket = ForeignBucket::new(LENGTH).gradient(id, 0);
        let memory = Borrowed::new().param(id, values).bucket(bucket, gradients);
        let builder = Stepper::builder(&layout, AdamW::default()).mode(mode);
        // SAFETY: memory and stream live as long as the process. What touches them keeps to the rules, but for a scene's fault,
        // which this driver finds before any harm.
        let stepper = unsafe { builder.cuda_borrowing(Sums::by_caller(0, 2), memory, &cuda) }.unwrap();
        Scene { gpu, id, values, gradients, stepper }
    }
}

fn play(recorded: Recorded, mode: Mode) {
    let Scene { gpu, id, values, gradients, mut stepper } = Scene::new(mode);
    let (read, sums) = (gpu.upload(&[0.0; LENGTH]), gpu.beside());
    for _ in 0..3 {
        let (written, summed) = (Gpu::event(), Gpu::event());
        let mut pass = stepper.begin().unwrap();
        pass.ptr(id).unwrap();
        pass.ptr(id.grad()).unwrap();
        gpu.fill(gradients, 0.5, LENGTH);
        if recorded != BeforeTheLastRead {
            gpu.copy(values, read, LENGTH);
        }
        gpu.record(written);
        sums.wait_for(written);
        if recorded == BeforeTheSum {
            sums.record(summed);
        }
        sums.fill(gradients, 1.0, LENGTH);
        if matches!(recorded, AfterSumAndReads | BeforeTheLastRead) {
            sums.record(summed);
        }
        if recorded == BeforeTheLastRead {
            gpu.copy(values, read, LENGTH);
        }
        // SAFETY: as above.
        unsafe { pass.bucket_ready_after(0, summed) }.unwrap();
        // The wait has been enqueued.
        gpu.record(summed);
        pass.finish().unwrap();
    }
    gpu.synchronize();
    stepper.close().unwrap();
}

/// Makes two passes, the second one captured and replayed if `captures`; returns the parameters.
fn trained(captures: bool) -> Vec<f32> {
    let Scene { gpu, id, values, gradients, mut stepper } = Scene::new(Mode::default());
    let sums = gpu.beside();
    let (written, summed) = (Gpu::event(), Gpu::event());
    let one_pass = |mut pass: Pass<'_, CudaDevice>| {
        pass.ptr(id.grad())?;
        gpu.fill(gradients, 0.5, LENGTH);
        gpu.record(written);
        sums.wait_for(written);
        sums.fill(gradients, 1.5, LENGTH);
        sums.record(summed);
        // SAFETY: recorded after the sum, in a capture by the capture.
        unsafe { pass.bucket_ready_after(0, summed)? };
        pass.finish()
    };
    one_pass(stepper.begin().unwrap()).unwrap();
    if captures {
        let captured = stepper.capture(one_pass).unwrap();
        for _ in 0..3 {
            // SAFETY: as above.
            unsafe { stepper.replay(&captured).unwrap() };
        }
    } else {
        (0..3).for_each(|_| one_pass(stepper.begin().unwrap()).unwrap());
    }
    assert_eq!(stepper.step_count(id).unwrap(), 4);
    gpu.synchronize();
    let trained = gpu.read(values, LENGTH);
    stepper.close().unwrap();
    trained
}

#[test]
#[ignore = "scripts/software-gpu.sh runs it: needs the software GPU, which names races"]
fn a_captured_pass_waits_for_the_event_that_it_has_recorded_and_a_replay_needs_none() {
    assert_eq!(trained(true), trained(false));
}

#[test]
#[ignore = "scripts/software-gpu.sh runs it: needs the software GPU, which names races"]
fn the_sum_of_a_frozen_bucket_ends_before_its_next_gradient_is_written_and_a_null_event_is_refused() {
    for mode in MODES {
        let Scene { gpu, id, gradients, mut stepper, .. } = Scene::new(mode);
        let (sums, summed) = (gpu.beside(), Gpu::event());
        stepper.set_frozen(id, true).unwrap();
        let mut pass = stepper.begin().unwrap();
        // SAFETY: refused.
        let null = unsafe { pass.bucket_ready_after(0, EventHandle(0)) };
        assert!(matches!(null, Err(Error::Order { .. })), "{null:?}");
        sums.fill(gradients, 0.0, LENGTH); // a framework sums every bucket
        sums.record(summed);
        // SAFETY: recorded after the sum.
        unsafe { pass.bucket_ready_after(0, summed) }.unwrap();
        pass.finish().unwrap();
        stepper.set_frozen(id, false).unwrap();
        let mut pass = stepper.begin().unwrap();
        pass.ptr(id.grad()).unwrap();
        gpu.fill(gradients, 0.5, LENGTH);
        gpu.record(summed);
        // SAFETY: recorded after the sum.
        unsafe { pass.bucket_ready_after(0, summed) }.unwrap();
        pass.finish().unwrap();
        assert_eq!(stepper.step_count(id).unwrap(), 1);
        gpu.synchronize();
        stepper.close().unwrap();
    }
}

#[test]
#[ignore = "scripts/software-gpu.sh runs it: needs the software GPU, which names races"]
fn an_event_that_comes_too_early_or_was_never_recorded_is_a_race_with_a_name() {
    let scenes = [AfterSumAndReads, BeforeTheLastRead, BeforeTheSum, Never];
    let all = || {
        scenes.into_iter().flat_map(|scene| MODES.map(|mode| (format!("{scene:?} {mode:?}"), scene, mode)))
    };
    if let Ok(wanted) = std::env::var(SCENE) {
        let (_, scene, mode) = all().find(|(name, ..)| *name == wanted).unwrap();
        return play(scene, mode);
    }
    for (name, scene, _) in all() {
        let test =
            "cuda::gpu::events::an_event_that_comes_too_early_or_was_never_recorded_is_a_race_with_a_name";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let ran =
            child.args(["--exact", test, "--ignored", "--nocapture"]).env(SCENE, &name).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        match scene {
            AfterSumAndReads => assert!(ran.status.success(), "{name}: {said}"),
            _ => assert!(!ran.status.success() && said.contains("software gpu: race"), "{name}: {said}"),
        }
    }
}
