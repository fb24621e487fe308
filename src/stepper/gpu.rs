//! A stepper on a GPU: the trainer gets addresses instead of slices, and the trainer's stream waits instead of its
//! thread.
//!
//! Passes and schedule are the same as on the host. A call that returns an address makes the trainer's stream wait for
//! all ops that conflict with the access. The host waits only in calls that are documented to wait. Memory that the GPU
//! cannot reach is refused before any launch.
#![allow(unsafe_code)]

use crate::collective::Sums;
use crate::cuda::driver::Entered;
use crate::cuda::{CapturedPass, Cuda, CudaDevice};
use crate::device::Executor;
use crate::error::{Error, Result, refuse};
use crate::handle::{DevicePtr, EventHandle, Place};
use crate::launch::{BorrowedPieces, Piece, refuse_other_places};
use crate::layout::{Gradients, Moments};
use crate::op::Memory;
use crate::schedule::Schedule;
use crate::stepper::builder::StepperBuilder;
use crate::stepper::graphs::NOT_BROADCAST;
use crate::stepper::state::borrowed::Borrowed;
use crate::stepper::stepper::Stepper;
use crate::stepper::tensor::{Elements, TensorId};

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
    /// let comm = Nccl::from_environment()?;
    /// // SAFETY: the stream is kept until the stepper is closed.
    /// let mut stepper = unsafe { Stepper::builder(&layout, AdamW::default()).cuda(comm, &cuda)? };
    /// for _ in 0..100 {
    ///     let mut pass = stepper.begin()?;
    ///     let (params, grads) = (pass.ptr(weight)?, pass.ptr(weight.grad())?); // the stream waits, not this thread
    ///     backward(params, grads); // your kernels, on `stream`
    ///     pass.grad_ready(weight)?; // the sum and one step, beside what you launch next
    ///     pass.finish()?;
    /// }
    /// stepper.close()?;
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Compares layout and options with the other ranks, and waits until the stepper's memory is allocated. If the
    /// stepper [records](Self::record), this call also waits for all earlier work on the trainer's stream.
    ///
    /// # Errors
    /// Errors as for [`host`](Self::host), but those about instruction sets only with [offload](Self::offload).
    /// `Config` for an option that applies only to the host device. `Unsupported` if the collective cannot reach the
    /// GPU's memory, or if the stream belongs to another device. `KernelsNotBuilt` if the build has no GPU kernels.
    /// `Device` if the driver refuses a call, such as an allocation.
    ///
    /// # Safety
    /// The stream that [`Cuda::compute_stream`] names outlives the stepper. If this stream is the per-thread default
    /// stream (handle 2), the stepper must stay on the calling thread. On another thread, handle 2 names another
    /// stream.
    pub unsafe fn cuda(self, sums: impl Into<Sums>, cuda: &Cuda) -> Result<Stepper<CudaDevice>> {
        self.on_gpu(sums.into(), None, cuda)
    }

    /// Builds the stepper on a GPU, with parameters and gradient buckets in the caller's memory. Add the device
    /// addresses of these tensors to a [`Borrowed`] (`std::ptr::with_exposed_provenance_mut` turns a `CUdeviceptr` into
    /// a pointer). This call rejects the same options as [`host_borrowing`](Self::host_borrowing). The documentation of
    /// [`bucket_ready_after`](Stepper::bucket_ready_after) has an example.
    ///
    /// # Ordering
    /// Ordering as for [`cuda`](Self::cuda). Before this call, make the trainer's stream wait for the work that fills
    /// the parameters, unless that work is on this stream. Between passes, work on that stream may write new values to
    /// parameters after [`Stepper::ptr`] has returned their addresses. In that case, every rank must fill in the same
    /// values, because the stepper does not broadcast them. If a parameter has a [master weight](crate::Master), never
    /// fill the parameter in this way, because only [`Stepper::write`] writes masters.
    ///
    /// # Errors
    /// Errors as for [`host`](Self::host), but those about instruction sets only with [offload](Self::offload).
    /// `Config` for an option that applies only to the host device. `Unsupported` if the collective cannot reach the
    /// GPU's memory, or if the stream belongs to another device. `Layout` if a tensor has no address or two addresses,
    /// is misaligned for its type, overlaps another tensor, or is not in this GPU's memory. `KernelsNotBuilt` if the
    /// build has no GPU kernels. `Device` if the driver refuses a call.
    ///
    /// # Safety
    /// The trainer's stream meets the conditions of [`cuda`](Self::cuda). Every address is valid for its tensor on this
    /// device until [`close`](Stepper::close) has returned `Ok`. If `close` fails, or the stepper is dropped instead,
    /// every address stays valid until you have synchronised the device afterwards. As long as the addresses must be
    /// valid, only the stepper, work on the trainer's stream, and the sums that you hand over with
    /// [`bucket_ready_after`](Stepper::bucket_ready_after) access the tensors. A stream that forks from the trainer's
    /// stream after [`Stepper::ptr`], and joins it before the hand-over, counts as the trainer's stream. In a pass, a
    /// gradient may be written only after [`Stepper::ptr`] has returned its address, and before its hand-over. A
    /// parameter may be read only between [`Stepper::ptr`] for the parameter and its next hand-over, or after
    /// [`finish`](Stepper::finish) of a pass in `Sequential` or `Eager` mode.
    pub unsafe fn cuda_borrowing(
        self,
        sums: impl Into<Sums>,
        memory: Borrowed,
        cuda: &Cuda,
    ) -> Result<Stepper<CudaDevice>> {
        self.on_gpu(sums.into(), Some(memory), cuda)
    }

    fn on_gpu(self, sums: Sums, memory: Option<Borrowed>, cuda: &Cuda) -> Result<Stepper<CudaDevice>> {
        let (comm, place) = (&sums.comm, Place::Cuda(cuda.driver.ordinal()));
        if !comm.reaches(place) {
            let thing = format_args!("gradients in {place}");
            let remedy = "use Nccl of the same device, Solo, Sums::by_caller, or a collective of your own";
            return Err(Error::unsupported(thing, "this collective cannot reach them", remedy));
        }
        let offloads = self.offload.is_some();
        refuse! {
            "isa" = "set", if self.isa.is_some() && !offloads
                => "chooses CPU kernels", "leave it out on a GPU";
            "threads" = "set", if self.threads.is_some() && !offloads
                => "splits CPU kernels", "leave it out on a GPU";
            "inline" = "set", if self.is_inline
                => "a GPU's steps are always enqueued on the calling thread", "leave it out on a GPU";
        }
        let host = self.host_side(&**comm)?;
        if self.gradients == Gradients::Release {
            let wrong = format_args!("{place} cannot be given back");
            let remedy = "use Gradients::Keep or Gradients::Zero";
            return Err(Error::unsupported("Gradients::Release", wrong, remedy));
        }
        if cuda.max_blocks == Some(0) {
            return Err(Error::range("max_blocks", 0, "1 or more"));
        }
        self.assemble(sums, memory, |mut blueprint| {
            // With offload, steps run on the host and read and write its memory.
            let of_steps = if offloads { Place::Host } else { place };
            blueprint.assignment.refuse_unreached(of_steps)?;
            let scaler = blueprint.assignment.constants.loss_scale.external().map(|scaler| {
                [scaler.scale, scaler.found_inf].map(|base| Piece { start: 0, bytes: 4, base })
            });
            if blueprint.borrowed.is_some() || scaler.is_some() {
                let _entered = Entered::new(&*cuda.driver)?;
                let borrowed = blueprint.borrowed.iter().flat_map(BorrowedPieces::iter);
                refuse_other_places(borrowed, place, |address| cuda.driver.inspect_memory(address))?;
                refuse_other_places(scaler.iter().flatten(), of_steps, |address| {
                    let found = cuda.driver.inspect_memory(address);
                    // The driver returns an error for pageable memory, which is the host's.
                    if offloads { found.or(Ok(Place::Host)) } else { found }
                })?;
            }
            // Ranks agree first, so that a difference is reported before any communicator is made.
            blueprint.comms.agree(blueprint.comms.words.fixed())?;
            blueprint.comms.split(&blueprint.plan)?;
            let comms = blueprint.comms.clone();
            Ok((CudaDevice::new(cuda.clone(), blueprint, host)?, comms))
        })
    }
}

impl Stepper<CudaDevice> {
    /// Hands over a bucket that the caller sums. The caller has recorded `event` after the sum of the bucket, and the
    /// bucket's step waits for `event`. The stepper must have been built with
    /// [`Sums::by_caller`](crate::Sums::by_caller). In the steady state of [`Mode::Eager`](crate::Mode), this call
    /// makes four driver calls. One reads the current context. The other three are a wait, a launch and an event record
    /// on the optim stream.
    ///
    /// ```no_run
    /// # use instep::cuda::Cuda;
    /// # use instep::layout::ForeignBucket;
    /// # use instep::{AdamW, Borrowed, EventHandle, Layout, Stepper, StreamHandle, Sums};
    /// # let layout = Layout::builder().param("weight", 1024).build()?;
    /// # let weight = layout.id("weight")?;
    /// # let (weights, bucket, stream) = (std::ptr::null_mut::<f32>(), std::ptr::null_mut::<f32>(), StreamHandle(0));
    /// # let all_reduce = || EventHandle(0);
    /// let cuda = Cuda::open(0)?.compute_stream(stream);
    /// let memory = Borrowed::new().param(weight, weights).bucket(ForeignBucket::new(1024).gradient(weight, 0), bucket);
    /// let builder = Stepper::builder(&layout, AdamW::default());
    /// // SAFETY: stream and tensors are the framework's, which keeps them and touches them as agreed.
    /// let mut stepper = unsafe { builder.cuda_borrowing(Sums::by_caller(0, 8), memory, &cuda)? };
    /// let mut pass = stepper.begin()?;
    /// pass.ptr(weight.grad())?; // backward writes it on `stream`, your all-reduce sums it on another one, then:
    /// // SAFETY: recorded after the sum.
    /// unsafe { pass.bucket_ready_after(0, all_reduce())? };
    /// pass.finish()?;
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// This call enqueues the wait, so the event may be destroyed or recorded again afterwards. Steps of later buckets
    /// run after the event too. In a [capture](Self::capture), the event must have been recorded inside the capture.
    /// Replays need no event.
    ///
    /// # Errors
    /// Errors as for [`bucket_ready`](Self::bucket_ready). `Order` for a null event, if the stepper itself sums the
    /// bucket, or if this is not the last micro-batch. If this call is outside a capture, an event that was last
    /// recorded in a capture poisons the stepper.
    ///
    /// # Safety
    /// The event has not been destroyed, and belongs to this device. The event was recorded in this pass, after the
    /// bucket's sum. The sum runs after this pass's last write of the bucket's gradients, and after this pass's last
    /// read of the bucket's parameters. (A wait for an event that was never recorded returns at once. A wait for an
    /// event that was recorded too early does not wait for the sum. In both cases, the step would race with the sum.)
    pub unsafe fn bucket_ready_after(&mut self, bucket: u32, event: EventHandle) -> Result<()> {
        if event == EventHandle::default() {
            let remedy = "hand over the event that you have recorded after the sum";
            return Err(Error::order(format_args!("bucket {bucket}"), "a null event says nothing", remedy));
        }
        self.hand_over_awaited(bucket, event)
    }

    /// Returns the address of a tensor. Between passes, `tensor` may be any tensor. In a pass, `tensor` must be a
    /// parameter or a gradient, and this call marks the gradient as written. Write the full gradient, or add to the
    /// gradient if it [was written](Self::is_first) before. Between passes, borrowed parameters may also be written at
    /// their addresses ([`StepperBuilder::cuda_borrowing`]). All other tensors may only be read at their addresses. To
    /// change them, call [`write`](Self::write).
    ///
    /// # Shapes
    /// The tensor has the registered number of elements, and the [precision](crate::Precision) sets their type. The
    /// address is aligned to 256 bytes unless the memory is [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// Later work on the trainer's stream runs after the last step of the parameter's bucket. An address that was
    /// returned inside a pass may be used until the parameter's hand-over. A parameter's address that was returned
    /// between passes may be used until the parameter's hand-over in the next pass. Any other address that was returned
    /// between passes may be used until the next pass begins. After this call, another stream must wait for the
    /// trainer's stream before it uses the address. The trainer's stream must then wait for the other stream, before
    /// the hand-over or `begin` after which the address may not be used. With [`Strategy::Fsdp`](crate::Strategy), a
    /// parameter's address is valid until a call or the bucket's launch [reshards](Self::reshard) the bucket.
    ///
    /// # Errors
    /// `Layout` if the parameter is of another layout. `Unsupported` if the stepper has no such tensor, stores it as
    /// 8-bit codes, or has [offloaded](StepperBuilder::offload) it. `Sharded` for a [sharded](crate::Strategy) tensor.
    /// `Order` inside a pass for a state, a copy, an average, or the gradient of a frozen or [unused](Self::set_unused)
    /// parameter. `Order` for a tensor that was handed over in this micro-batch, and for a parameter in a bucket that
    /// is not unsharded. `Poisoned` after a failure.
    pub fn ptr<'n>(&mut self, tensor: impl Into<TensorId<'n>>) -> Result<DevicePtr> {
        let (id, memory) = self.find(tensor.into())?;
        if memory.is_offloaded(&self.plan) {
            let wrong = "it lies in the host's memory, beside the steps";
            return Err(Error::unsupported("address of what is offloaded", wrong, "copy it with read"));
        }
        let is_open = self.run.get_mut().schedule.is_open();
        if !matches!(memory, Memory::Params | Memory::Grads) {
            self.refuse_open_pass()?;
        }
        if matches!(memory, Memory::State(_)) && self.precision_of(id)?.moments == Moments::EightBit {
            let wrong = "it is held in 8-bit codes";
            return Err(Error::unsupported("address of an optimizer state", wrong, "copy it with read"));
        }
        if !is_open {
            self.refuse_shard(id, memory)?;
        }
        self.refuse_resharded(id, memory)?;
        let writes = is_open && memory == Memory::Grads;
        let segment = self.claim(id, memory, writes)?;
        if writes {
            self.note_written(id, memory)?;
        }
        let run = self.run.get_mut();
        let present = Elements::present(memory, &segment, &self.plan, &run.schedule);
        Ok(DevicePtr(run.device.resolve(present.span(&self.plan, &run.schedule)).addr() as u64))
    }

    /// Runs a captured pass.
    ///
    /// # Ordering
    /// The pass runs after all earlier work on the trainer's stream, and later work on that stream runs after the pass
    /// has ended. This call returns at once, unless the host is eight passes ahead of the GPU. All ranks must replay
    /// the same capture at the same point, with the same learning rates and frozen parameters. Ranks do not compare a
    /// replay's collectives, so a difference makes the ranks hang or diverge.
    ///
    /// # Errors
    /// `Order` if a pass is open, parameters have been written since the last pass, or the capture belongs to another
    /// stepper. `Poisoned` after a failure.
    ///
    /// # Safety
    /// All memory that the trainer's captured work touches is still valid, and nothing else touches this memory during
    /// the replay. No other handle has closed the stepper's communicator.
    pub unsafe fn replay(&mut self, captured: &CapturedPass) -> Result<()> {
        self.refuse_open_pass()?;
        if self.params_written.is_broadcast_due() {
            return Err(Error::order("captured pass", NOT_BROADCAST, "make an ordinary pass first"));
        }
        self.follow_schedules()?;
        self.flush_settings()?;
        let run = self.run.get_mut();
        run.touch(Schedule::touch_all)?;
        // Publishing the status reads the control block that the graph's Begin writes.
        run.touch(Schedule::touch_control)?;
        run.device.replay(captured)?;
        let pass = run.schedule.pass() + 1;
        run.schedule.set_pass(pass);
        run.schedule.fork();
        run.submit();
        self.rates.step += 1;
        Ok(())
    }

    /// Returns the event from which the times of ops are measured, if ops are recorded.
    #[cfg(feature = "bench")]
    pub(crate) fn clock_zero(&self) -> Option<crate::handle::EventHandle> {
        self.run.borrow().device.timing.as_ref().map(|timing| timing.origin.handle())
    }
}
