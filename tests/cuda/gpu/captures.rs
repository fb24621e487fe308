//! Captures fail after streams have joined them: the stepper goes on as if the capture had not begun.
//!
//! On the software GPU, a stream that has not joined back stays in its capture, because CUDA does not say that it
//! leaves. CUDA says that a stream leaves an invalid capture when the capture ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use instep::cuda::{Cuda, CudaDevice};
use instep::{Collective, Error, Layout, Pass, Place, Result, collective};

use super::memory::Gpu;
use crate::support::{MODES, Options, Outcome, few_optimizers, layout, paint_params, painted, pass};

/// A group of one rank, whose calls fail once the test says so.
#[derive(Clone, Default)]
struct Failing(Arc<AtomicBool>);

impl Failing {
    fn set(&self, fails: bool) {
        self.0.store(fails, Relaxed);
    }
}

impl Collective for Failing {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        1
    }

    fn reaches(&self, _: Place) -> bool {
        true
    }

    fn enqueue(&self, _: &mut collective::Call<'_>) -> Result<()> {
        if self.0.load(Relaxed) { Err(Error::Hook("made up".to_owned())) } else { Ok(()) }
    }

    fn abort(&self, _: &Error) {}
}

/// Hands over all gradients of a pass; calls `midway` after the first one.
fn whole(mut pass: Pass<'_, CudaDevice>, layout: &Layout, midway: impl FnOnce()) -> Result<()> {
    let mut midway = Some(midway);
    for id in layout.ids().collect::<Vec<_>>().into_iter().rev() {
        pass.ptr(id.grad())?;
        pass.grad_ready(id)?;
        if let Some(midway) = midway.take() {
            midway();
        }
    }
    pass.finish()
}

#[test]
#[ignore = "benches/gpu/run.sh runs it: needs a GPU"]
fn a_capture_that_fails_once_streams_have_forked_leaves_the_stepper_as_it_was() {
    for (mode, is_invalid) in MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let (gpu, layout, comm) = (Gpu::open(), layout(&[300, 5, 700]), Failing::default());
        let cuda = Cuda::open(0).unwrap().compute_stream(gpu.stream());
        let options = Options { mode, cap: Some(1 << 10), ..Options::default() };
        let (optim, gradient, outside) = (few_optimizers()[2], painted(&options), Gpu::event());
        gpu.record(outside);
        let mut host = options.stepper(&layout, optim, Failing::default()).unwrap();
        let mut stepper = options.stepper_on(&cuda, &layout, optim, comm.clone()).unwrap();
        paint_params(&mut host);
        paint_params(&mut stepper);
        pass(&mut host, &options, |param, values| gradient(0, param, values)).unwrap();
        pass(&mut stepper, &options, |param, values| gradient(0, param, values)).unwrap();
        // The trainer's stream may not wait for what comes before the capture, and the sum that fails comes after forks.
        let midway = || if is_invalid { gpu.is_refused(outside) } else { comm.set(true) };
        let failed = stepper.capture(|pass| whole(pass, &layout, midway)).unwrap_err();
        let is_invalids = matches!(failed, Error::Device { .. });
        let is_expected = if is_invalid { is_invalids } else { failed == Error::Hook("made up".to_owned()) };
        assert!(is_expected, "{mode:?}: {failed}");
        comm.set(false);
        for step in 1..3 {
            pass(&mut host, &options, |param, values| gradient(step, param, values)).unwrap();
            pass(&mut stepper, &options, |param, values| gradient(step, param, values)).unwrap();
        }
        let captured = stepper.capture(|pass| whole(pass, &layout, || {})).unwrap();
        pass(&mut host, &options, |param, values| gradient(2, param, values)).unwrap();
        // SAFETY: the capture holds no work of the trainer.
        unsafe { stepper.replay(&captured).unwrap() };
        Outcome::of(&stepper).unwrap().assert_same(&Outcome::of(&host).unwrap(), &format!("{mode:?}"));
        drop(captured);
        stepper.close().unwrap();
    }
}
