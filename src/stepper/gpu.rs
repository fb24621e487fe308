//! A stepper on a GPU: addresses in the place of slices, the trainer's stream in the place of its thread.
//!
//! The same passes and the same schedule; to ask for an address is to make the trainer's stream wait, and nothing here
//! waits on the host unless it says so. Must refuse what the GPU cannot reach before anything is launched.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use crate::abi::INSTEP_NO_BUCKET;
use crate::cuda::driver::Entered;
use crate::cuda::{CapturedPass, Cuda, CudaDevice, Parts};
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, EventHandle, Place};
use crate::layout::{ParamId, Segment};
use crate::op::{Collective, Memory, Sealed, Span};
use crate::stepper::borrowed::refuse_other_places;
use crate::stepper::build::Blueprint;
use crate::stepper::{Borrowed, Pass, Status, Stepper, StepperBuilder, Unused};

impl StepperBuilder<'_> {
    /// Builds the stepper on a GPU.
    ///
    /// ```no_run
    /// use instep::cuda::nccl::Options;
    /// use instep::cuda::{Cuda, Nccl};
    /// use instep::{AdamW, Layout, Stepper, StreamHandle};
    ///
    /// # fn backward(_: instep::DevicePtr, _: instep::DevicePtr) {}
    /// # let stream = StreamHandle(0);
    /// let layout = Layout::builder().param("weight", 1 << 20).build()?;
    /// let weight = layout.id("weight")?;
    /// let options = Options::from_environment()?; // torchrun's: who this rank is, and which GPU is its own
    /// let cuda = Cuda::open(options.device)?.compute_stream(stream);
    /// let comm = Nccl::connect(&options)?;
    /// // SAFETY: the stream is kept until the stepper is closed.
    /// let mut stepper = unsafe { Stepper::builder(&layout, AdamW::default()).cuda(comm, &cuda)? };
    /// for _ in 0..100 {
    ///     let mut pass = stepper.begin()?;
    ///     let (params, grads) = (pass.param_ptr(weight)?, pass.grad_ptr(weight)?); // the stream waits, not this thread
    ///     backward(params, grads); // your kernels, on `stream`
    ///     pass.grad_ready(weight)?; // the sum and one step, beside what you launch next
    ///     pass.finish()?;
    /// }
    /// stepper.close()?;
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Compares layout and options with the other ranks, and waits until the stepper's memory is there; if it
    /// [records](Self::record), for what the trainer's stream has been given too.
    ///
    /// # Errors
    /// As [`host`](Self::host), but for instruction sets; `Config` for options of the host device; `Unsupported` if the
    /// collective cannot reach the GPU's memory or the stream is of another device; `KernelsNotBuilt`; `Device` if the
    /// driver refuses anything, memory above all.
    ///
    /// # Safety
    /// The stream that [`Cuda::compute_stream`] names outlives the stepper; if it is the calling thread's own default stream
    /// (handle 2), which is another one elsewhere, the stepper stays on this thread.
    pub unsafe fn cuda(self, comm: impl Collective + 'static, cuda: &Cuda) -> Result<Stepper<CudaDevice>> {
        self.on_gpu(Arc::new(comm), None, cuda)
    }

    /// Builds the stepper on a GPU, on parameters and gradient buckets of the caller's: device addresses in a
    /// [`Borrowed`] (`std::ptr::with_exposed_provenance_mut` makes a pointer of a `CUdeviceptr`), under the same
    /// conditions as [`host_borrowing`](Self::host_borrowing). [`External`](crate::cuda::External) has an example.
    ///
    /// # Ordering
    /// As [`cuda`](Self::cuda). The trainer's stream must be behind whatever filled the parameters. It may fill them
    /// again between passes, behind [`Stepper::param_ptr`], with the same on every rank: nothing sends them, as
    /// [`Stepper::write_param`] would have it.
    ///
    /// # Errors
    /// As [`cuda`](Self::cuda) and [`host_borrowing`](Self::host_borrowing); `Layout` if a tensor is not in this GPU's
    /// memory.
    ///
    /// # Safety
    /// As for [`cuda`](Self::cuda). Until [`close`](Stepper::close) has returned `Ok` (if it fails, or the stepper is
    /// dropped instead: until the device has been synchronised since): every address is valid for its tensor on this
    /// device, and nothing touches it but this stepper, the sums that [`External`](crate::cuda::External) is told of,
    /// and work on the trainer's stream, or on others that fork from it behind the address and join it before the
    /// hand-over. A gradient is touched only between [`Pass::grad_ptr`] and its hand-over; a parameter is read only
    /// between [`Pass::param_ptr`] and its hand-over, behind [`Stepper::param_ptr`] until the next pass's hand-over, or
    /// behind [`Pass::finish`] of a pass in Sequential or Eager.
    pub unsafe fn cuda_borrowing(
        self,
        comm: impl Collective + 'static,
        memory: Borrowed,
        cuda: &Cuda,
    ) -> Result<Stepper<CudaDevice>> {
        self.on_gpu(Arc::new(comm), Some(memory), cuda)
    }

    fn on_gpu(
        self,
        comm: Arc<dyn Collective>,
        memory: Option<Borrowed>,
        cuda: &Cuda,
    ) -> Result<Stepper<CudaDevice>> {
        let place = Place::Cuda(cuda.driver.ordinal());
        if !comm.reaches(place) {
            let what = format!("summing in {place} by this collective");
            let have = "what reaches it: Nccl or External of the same device, Solo, or one of your own";
            return Err(Error::Unsupported { what, have: have.to_owned() });
        }
        if comm.sums_outside() && (self.unused == Unused::Skip || self.uneven_inputs.is_some()) {
            let why =
                "sums that are made elsewhere bring no counts of ranks; use StepZero, without uneven inputs";
            return Err(Error::config("unused", format!("{:?}", self.unused), why));
        }
        if self.isa.is_some() {
            return Err(Error::config("isa", "set", "a GPU's kernels have one instruction set"));
        }
        if self.threads.is_some() {
            return Err(Error::config("threads", "set", "a GPU takes none of the host's"));
        }
        if cuda.max_blocks == Some(0) {
            return Err(Error::config("max_blocks", 0, "no block would do the work"));
        }
        self.assemble(comm, memory, |blueprint| {
            let Blueprint { plan, rule, hypers, comm, deadline, borrowed, timed, agreement } = blueprint;
            if let Some(pieces) = &borrowed {
                let _entered = Entered::new(&*cuda.driver)?;
                refuse_other_places(pieces, place, |address| cuda.driver.inspect_memory(address))?;
            }
            comm.agree(agreement, deadline)?;
            CudaDevice::new(Parts {
                driver: Arc::clone(&cuda.driver),
                compute: cuda.compute,
                optim_priority: cuda.optim_priority,
                max_blocks: cuda.max_blocks,
                plan,
                rule,
                hypers,
                comm,
                deadline,
                borrowed,
                timed,
            })
        })
    }
}

impl Stepper<CudaDevice> {
    /// Where a parameter is, between passes.
    ///
    /// # Shapes
    /// As many f32 as registered, aligned to 256 bytes unless [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// What the trainer's stream is given from here on comes behind the last step of its bucket.
    ///
    /// # Errors
    /// `Order` inside a pass, `Layout` if `id` is of another layout, `Poisoned` after a failure.
    pub fn param_ptr(&self, id: ParamId) -> Result<DevicePtr> {
        self.refuse_open_pass()?;
        let segment = self.claim(id, Memory::Params, false)?;
        Ok(self.device_address(&segment, Memory::Params))
    }

    /// The newest pass that is known to have ended, without asking the GPU, which costs nothing: it is as many passes
    /// behind as the GPU is behind the host. `None` before the first one has ended; an abandoned pass is never among
    /// them.
    pub fn latest_status(&self) -> Option<Status> {
        let latest = self.run.borrow().device.latest()?;
        Some(Status {
            pass: latest.sequence,
            skipped: latest.skipped != 0,
            norm: (latest.decided != 0).then_some(latest.norm),
            clip: latest.clip,
            first_nonfinite_bucket: (latest.first_nonfinite_bucket != INSTEP_NO_BUCKET)
                .then_some(latest.first_nonfinite_bucket),
        })
    }

    /// The event at which the times of recorded ops are zero, if ops are recorded: for benches, which time the trainer's own
    /// stream by the same clock.
    #[doc(hidden)]
    pub fn clock_zero(&self) -> Option<EventHandle> {
        self.run.borrow().device.clock_zero()
    }

    /// Captures a pass as a CUDA graph: what `trainer` puts on its stream, and every sum and step between. Nothing runs.
    /// [`replay`](Self::replay) then makes that pass with one launch, as often as wanted, with the learning rates of the
    /// moment. Frozen parameters are those of the capture: to freeze one later works, to unfreeze one takes a new capture.
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
    /// ranks capture the same pass.
    ///
    /// # Errors
    /// `Order` if a pass is open, none has been made yet, since the first one gives all ranks rank 0's parameters, or
    /// `trainer` has not finished its pass; `Unsupported` on the legacy default stream; what `trainer` returns; `Device` if
    /// the driver cannot capture something. Whatever it is, or if `trainer` panics, the capture has ended and the stepper
    /// goes on as if it had not begun; only a panic inside the pass ends the group, as ever.
    pub fn capture(
        &mut self,
        trainer: impl FnOnce(Pass<'_, CudaDevice>) -> Result<()>,
    ) -> Result<CapturedPass> {
        self.refuse_open_pass()?;
        if self.params_written {
            return Err(Error::Order("make a pass first: it gives all ranks the same parameters".into()));
        }
        let run = self.run.get_mut();
        run.schedule.synchronize();
        run.settle()?;
        run.device.begin_capture()?;
        let pass = run.schedule.pass();
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
        // Nothing of it has run; positions inside it are none to whoever waits outside.
        run.forgive();
        run.schedule.set_pass(pass);
        run.schedule.fork();
        run.submit();
        // What failed in a capture has poisoned nothing, whatever the trainer was told.
        outcome.unwrap_or_else(|panic| resume_unwind(panic)).map_err(|error| error.cause().clone())?;
        if captured.is_ok() && !is_whole {
            return Err(Error::Order("the captured pass was not finished".into()));
        }
        captured
    }

    /// Makes a captured pass.
    ///
    /// # Ordering
    /// Behind everything on the trainer's stream; whatever comes there next is behind the whole pass. Returns at once,
    /// unless the host is eight passes ahead. All ranks replay the same capture at the same point, with the same
    /// learning rates and frozen parameters: a replay's sums are compared with nobody's, so a difference is a hang or a
    /// drift.
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
            let why = "parameters were written: an ordinary pass first, which gives all ranks the same";
            return Err(Error::Order(why.into()));
        }
        let run = self.run.get_mut();
        run.touch_all()?;
        // Publishing reads the control block that the graph's Begin writes.
        run.touch_control()?;
        run.device.replay(captured)?;
        let pass = run.schedule.pass() + 1;
        run.schedule.set_pass(pass);
        run.schedule.fork();
        run.submit();
        Ok(())
    }

    fn device_address(&self, segment: &Segment, memory: Memory) -> DevicePtr {
        let span = Span::segment(memory, &self.plan, segment);
        DevicePtr(self.run.borrow().device.resolve(span).addr() as u64)
    }
}

impl Pass<'_, CudaDevice> {
    /// Where a parameter is.
    ///
    /// # Shapes
    /// As [`Stepper::param_ptr`].
    ///
    /// # Ordering
    /// What the trainer's stream is given from here until the parameter is handed over comes behind the last step of its
    /// bucket. Another stream of the trainer's waits for that one behind this call, and is joined before the hand-over.
    ///
    /// # Errors
    /// `Order` if it was handed over in this micro-batch, `Layout` if `id` is of another layout, `Poisoned` after a failure.
    pub fn param_ptr(&self, id: ParamId) -> Result<DevicePtr> {
        let segment = self.stepper.claim(id, Memory::Params, false)?;
        Ok(self.stepper.device_address(&segment, Memory::Params))
    }

    /// Where a gradient is, to be written whole, or added to if it [was written](Self::is_first) in this pass.
    ///
    /// # Shapes
    /// As [`Stepper::param_ptr`].
    ///
    /// # Ordering
    /// As [`param_ptr`](Self::param_ptr).
    ///
    /// # Errors
    /// As [`param_ptr`](Self::param_ptr); `Order` if the parameter is frozen.
    pub fn grad_ptr(&mut self, id: ParamId) -> Result<DevicePtr> {
        let segment = self.stepper.claim(id, Memory::Grads, true)?;
        self.stepper.written.get_mut()[segment.param as usize] = true;
        Ok(self.stepper.device_address(&segment, Memory::Grads))
    }

    /// Whether the gradient has not been written in this pass: the first write replaces, later ones add.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout.
    pub fn is_first(&self, id: ParamId) -> Result<bool> {
        Ok(!self.stepper.written.borrow()[self.stepper.layout.index(id)?])
    }
}
