//! Whole passes as CUDA graphs: captured once, replayed with one launch each.
//!
//! A captured pass is an ordinary one whose streams fork from the trainer's and join it again. Every capture that
//! begins also ends, and a failed one leaves the stepper as if it had not begun.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::cuda::{CapturedPass, CudaDevice};
use crate::error::{Error, Result};
use crate::stepper::pass::Pass;
use crate::stepper::stepper::Stepper;

const NOT_BROADCAST: &str = "parameters were written, and ranks have not exchanged them yet";

impl Stepper<CudaDevice> {
    /// Captures a pass as a CUDA graph: what `trainer` puts on its stream, and every sum and step between. Nothing
    /// runs. [`replay`](Self::replay) then makes that pass with one launch, as often as wanted, with the learning rates
    /// of the moment. Frozen parameters are those of the capture: to freeze one later works, to unfreeze one takes a
    /// new capture.
    ///
    /// ```no_run
    /// # use instep::cuda::CudaDevice;
    /// # use instep::layout::DEFAULT_GROUP;
    /// # use instep::{ParamId, Pass, Stepper};
    /// # fn backward(_: instep::DevicePtr) {}
    /// # fn train(mut stepper: Stepper<CudaDevice>, weight: ParamId) -> instep::Result<()> {
    /// let one_pass = |mut pass: Pass<'_, CudaDevice>| {
    ///     backward(pass.grad_ptr(weight)?); // launches on the stepper's stream: addresses are baked in
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
    /// `trainer` must put its work on the stream that the stepper was built with, or on streams that fork from it and
    /// join it again, must not wait for any of it, and must use addresses: copies from and to the host are refused. All
    /// ranks capture the same pass. The captured pass keeps the communicator open, so
    /// [`Nccl::close`](crate::cuda::Nccl::close) comes after it is dropped.
    ///
    /// # Errors
    /// `Order` if a pass is open, none has been made yet, since the first one gives all ranks rank 0's parameters, or
    /// `trainer` has not finished its pass; `Unsupported` on the legacy default stream; `Poisoned` after a failure; the
    /// error that `trainer` returns; `Device` if the driver cannot capture something. In each case, also if `trainer` panics, the capture has ended
    /// and the stepper goes on as if it had not begun; only a panic inside the pass ends the group, as ever.
    pub fn capture(
        &mut self,
        trainer: impl FnOnce(Pass<'_, CudaDevice>) -> Result<()>,
    ) -> Result<CapturedPass> {
        self.refuse_open_pass()?;
        if self.params_written {
            return Err(Error::order("capture", NOT_BROADCAST, "make an ordinary pass first"));
        }
        let run = self.run.get_mut();
        run.schedule.synchronize();
        run.settle()?;
        run.device.begin_capture()?;
        let (pass, step, abandoned) = (run.schedule.pass(), self.rates.step, self.abandoned);
        run.schedule.fork();
        run.submit();
        // Caught, since the trainer's stream would be captured for ever.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.begin().and_then(trainer)));
        if self.run.get_mut().schedule.is_open() {
            // The capture is thrown away, so nothing that was launched in it has happened.
            let _ = self.abandon_open_pass();
        }
        let run = self.run.get_mut();
        let is_whole = !run.schedule.was_abandoned();
        run.schedule.synchronize();
        // If it fails, the end says why.
        let _ = run.settle();
        let captured = run.device.end_capture();
        // None of it has run; positions inside it mean nothing outside.
        run.forgive();
        run.schedule.set_pass(pass);
        (self.rates.step, self.abandoned) = (step, abandoned);
        run.schedule.fork();
        run.submit();
        // A failure in a capture has poisoned nothing, although the trainer was told so.
        outcome.unwrap_or_else(|panic| resume_unwind(panic)).map_err(|error| error.cause().clone())?;
        if captured.is_ok() && !is_whole {
            return Err(Error::order("capture", "its pass was not finished", "call Pass::finish inside"));
        }
        captured
    }

    /// Makes a captured pass.
    ///
    /// # Ordering
    /// Comes after everything on the trainer's stream; later work there comes after the whole pass. Returns at once,
    /// unless the host is eight passes ahead. All ranks replay the same capture at the same point, with the same
    /// learning rates and frozen parameters: a replay's sums are not compared between ranks, so a difference is a hang
    /// or a drift.
    ///
    /// # Errors
    /// `Order` if a pass is open, parameters have been written since the last one, or the capture is another stepper's;
    /// `Poisoned` after a failure.
    ///
    /// # Safety
    /// All that the captured trainer's own work touches is still alive, and nothing else touches it meanwhile; the
    /// stepper's communicator has not been closed by another handle of it.
    pub unsafe fn replay(&mut self, captured: &CapturedPass) -> Result<()> {
        self.refuse_open_pass()?;
        if self.params_written {
            return Err(Error::order("captured pass", NOT_BROADCAST, "make an ordinary pass first"));
        }
        self.follow_schedules()?;
        self.flush_settings()?;
        let run = self.run.get_mut();
        run.touch_all()?;
        // Publishing reads the control block that the graph's Begin writes.
        run.touch_control()?;
        run.device.replay(captured)?;
        let pass = run.schedule.pass() + 1;
        run.schedule.set_pass(pass);
        run.schedule.fork();
        run.submit();
        self.rates.step += 1;
        Ok(())
    }
}
