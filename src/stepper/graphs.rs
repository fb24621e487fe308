//! Captures whole passes as CUDA graphs. A pass is captured once, and then replayed with one launch each time.
//!
//! In a captured pass, all streams fork from the trainer's stream and join it again. In all other respects, a captured
//! pass is an ordinary pass. Every capture is ended, even after an error. After a failed capture, the stepper is in the
//! same state as before the capture, unless `trainer` has replaced the stepper.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use crate::cuda::{CapturedPass, CudaDevice};
use crate::error::{Error, Result};
use crate::schedule::Opening;
use crate::stepper::pass::Pass;
use crate::stepper::stepper::Stepper;

pub(super) const NOT_BROADCAST: &str = "parameters were written, and ranks have not exchanged them yet";

impl Stepper<CudaDevice> {
    /// Captures a pass as a CUDA graph. The graph contains the work that `trainer` enqueues on its stream, and the
    /// pass's collectives and steps. Nothing runs during the capture. [`replay`](Self::replay) then runs the pass with
    /// one launch, any number of times, with the current learning rates. If you freeze a parameter after the capture,
    /// replays do not step it. A parameter that was frozen during the capture is never stepped in replays. To step it,
    /// unfreeze it and capture again.
    ///
    /// ```no_run
    /// # use instep::cuda::CudaDevice;
    /// # use instep::layout::DEFAULT_GROUP;
    /// # use instep::{ParamId, Pass, Stepper};
    /// # fn backward(_: instep::DevicePtr) {}
    /// # fn train(mut stepper: Stepper<CudaDevice>, weight: ParamId) -> instep::Result<()> {
    /// let one_pass = |mut pass: Pass<'_, CudaDevice>| {
    ///     backward(pass.ptr(weight.grad())?); // launches on the stepper's stream: addresses are baked in
    ///     pass.grad_ready(weight)?;
    ///     pass.finish()
    /// };
    /// one_pass(stepper.begin()?)?; // an ordinary pass first
    /// let captured = stepper.capture(one_pass)?;
    /// for step in 1..1000 {
    ///     stepper.set_lr(DEFAULT_GROUP, 1e-3 / f64::from(step))?; // no new capture
    ///     // SAFETY: tensors and communicator are kept, and used on the stepper's stream alone.
    ///     unsafe { stepper.replay(&captured)? };
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Ordering
    /// `trainer` must enqueue its work on the stream that the stepper was built with. `trainer` may also use streams
    /// that fork from that stream and join it again. `trainer` must not wait for the work that it enqueues. `trainer`
    /// must access tensors by address, because copies from and to the host are refused. All ranks must capture the same
    /// pass. The captured pass keeps the communicator open, so drop the captured pass before
    /// [`Nccl::close`](crate::cuda::Nccl::close).
    ///
    /// # Errors
    /// `Order` if a pass is open. `Order` if the next pass must broadcast rank 0's parameters: it is the first pass, or
    /// parameters were written after the last pass. `Order` if `trainer` has not finished its pass, or has put another
    /// stepper in place of this one. `Unsupported` on the legacy default stream, or with
    /// [`Strategy::Fsdp`](crate::Strategy). `Unsupported` with [offload](crate::StepperBuilder::offload) to pageable
    /// memory, or with offload and a [`grad_scaler`](crate::StepperBuilder::grad_scaler). `Poisoned` after a failure.
    /// Any error that `trainer` returns. `Device` if the driver cannot capture a call. After an error or a panic of
    /// `trainer`, the capture has ended. The stepper is in the same state as before the capture, unless `trainer` has
    /// replaced it. A panic inside the pass ends the group of ranks, as it does without a capture.
    pub fn capture(
        &mut self,
        trainer: impl FnOnce(Pass<'_, CudaDevice>) -> Result<()>,
    ) -> Result<CapturedPass> {
        self.refuse_open_pass()?;
        if self.plan.shards_params() {
            let wrong = "a graph has fixed addresses, and unsharded buckets come and go";
            return Err(Error::unsupported("capture with Strategy::Fsdp", wrong, "use Strategy::Zero"));
        }
        if self.params_written.is_broadcast_due() {
            return Err(Error::order("capture", NOT_BROADCAST, "make an ordinary pass first"));
        }
        let run = self.run.get_mut();
        run.schedule.synchronize();
        run.settle()?;
        run.device.begin_capture()?;
        let (pass, step, abandoned) = (run.schedule.pass(), self.rates.step, self.abandoned);
        let late_unused = run.schedule.late_unused();
        run.schedule.fork();
        run.submit();
        let end_without_stepper = run.device.capture_breaker();
        let plan = Arc::clone(&self.plan);
        // A panic is caught, because the trainer's stream would otherwise stay in capture.
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            self.open(Opening::default())?;
            self.is_capturing = true;
            trainer(Pass::new(self))
        }));
        if !Arc::ptr_eq(&plan, &self.plan) {
            // A pass dereferences mutably to its stepper, so `trainer` can replace the stepper. The capturing stepper
            // is then gone.
            end_without_stepper();
            outcome.unwrap_or_else(|panic| resume_unwind(panic))?;
            let wrong = "its trainer exchanged the stepper for another one";
            return Err(Error::order("capture", wrong, "keep the stepper in its pass"));
        }
        self.is_capturing = false;
        if self.run.get_mut().schedule.is_open() {
            // The capture is discarded, so none of its launches has run.
            let _ = self.abandon();
        }
        let run = self.run.get_mut();
        let is_whole = !run.schedule.was_abandoned();
        run.schedule.synchronize();
        // If `settle` fails, `end_capture` reports why.
        let _ = run.settle();
        let captured = run.device.end_capture();
        // Nothing in the capture has run, so stream positions from it are invalid outside.
        run.drop_deferred_waits();
        run.schedule.set_pass(pass);
        run.schedule.set_late_unused(late_unused);
        (self.rates.step, self.abandoned) = (step, abandoned);
        run.schedule.fork();
        run.submit();
        // `trainer` may return `Poisoned`, but a failure in a capture poisons nothing, so the cause is reported
        // instead.
        outcome.unwrap_or_else(|panic| resume_unwind(panic)).map_err(|error| error.cause().clone())?;
        if captured.is_ok() && !is_whole {
            return Err(Error::order("capture", "its pass was not finished", "finish it inside"));
        }
        captured
    }
}
