//! A stepper on a GPU: addresses in the place of slices, the trainer's stream in the place of its thread.
//!
//! The same passes and the same schedule. Asking for an address makes the trainer's stream wait; nothing waits on the
//! host unless a call says so. Memory that the GPU cannot reach is refused before any launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::collective::Collective;
use crate::cuda::driver::Entered;
use crate::cuda::{Cuda, CudaDevice, Parts};
use crate::device::Executor;
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, EventHandle, Place};
use crate::layout::{Gradients, ParamId, Segment};
use crate::op::{Memory, Span};
use crate::stepper::build::Blueprint;
use crate::stepper::builder::StepperBuilder;
use crate::stepper::pass::Pass;
use crate::stepper::state::borrowed::{Borrowed, refuse_other_places};
use crate::stepper::stepper::Stepper;

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
    /// Errors as for [`host`](Self::host), but for instruction sets; `Config` for options of the host device;
    /// `Unsupported` if the collective cannot reach the GPU's memory or the stream is of another device;
    /// `KernelsNotBuilt`; `Device` if the driver refuses anything, memory above all.
    ///
    /// # Safety
    /// The stream that [`Cuda::compute_stream`] names outlives the stepper; if it is the calling thread's own default
    /// stream (handle 2), which is another one elsewhere, the stepper stays on this thread.
    pub unsafe fn cuda(self, comm: impl Collective + 'static, cuda: &Cuda) -> Result<Stepper<CudaDevice>> {
        self.on_gpu(Arc::new(comm), None, cuda)
    }

    /// Builds the stepper on a GPU, on parameters and gradient buckets of the caller's: device addresses in a
    /// [`Borrowed`] (`std::ptr::with_exposed_provenance_mut` makes a pointer of a `CUdeviceptr`), under the same
    /// conditions as [`host_borrowing`](Self::host_borrowing). [`External`](crate::cuda::External) has an example.
    ///
    /// # Ordering
    /// Ordering as for [`cuda`](Self::cuda). The trainer's stream must come after the work that filled the parameters.
    /// It may fill them again between passes, after [`Stepper::param_ptr`], with the same values on every rank, because
    /// nothing broadcasts them. Parameters with [master weights](crate::Master) are excepted: only
    /// [`Stepper::write_param`] writes masters.
    ///
    /// # Errors
    /// Errors as for [`cuda`](Self::cuda) and [`host_borrowing`](Self::host_borrowing); `Layout` if a tensor is not in
    /// this GPU's memory.
    ///
    /// # Safety
    /// As for [`cuda`](Self::cuda). Until [`close`](Stepper::close) has returned `Ok` (if it fails, or the stepper is
    /// dropped instead: until the device has been synchronised since): every address is valid for its tensor on this
    /// device, and nothing touches it but this stepper, the sums that [`External`](crate::cuda::External) is told of,
    /// and work on the trainer's stream, or on others that fork from it after the address was given and join it before
    /// the hand-over. A gradient is touched only between [`Pass::grad_ptr`] and its hand-over; a parameter is read only
    /// between [`Pass::param_ptr`] and its hand-over, after [`Stepper::param_ptr`] until the next pass's hand-over, or
    /// after [`Pass::finish`] of a pass in Sequential or Eager.
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
            let thing = format_args!("gradients in {place}");
            let remedy = "use Nccl or External of the same device, Solo, or a collective of your own";
            return Err(Error::unsupported(thing, "this collective cannot reach them", remedy));
        }
        if self.isa.is_some() {
            return Err(Error::config("isa", "set", "chooses CPU kernels", "leave it out on a GPU"));
        }
        if self.threads.is_some() {
            return Err(Error::config("threads", "set", "splits CPU kernels", "leave it out on a GPU"));
        }
        if self.is_inline {
            let wrong = "a GPU's steps are always enqueued on the calling thread";
            return Err(Error::config("inline", "set", wrong, "leave it out on a GPU"));
        }
        if self.gradients == Gradients::Release {
            let wrong = format_args!("{place} cannot be given back");
            let remedy = "use Gradients::Keep or Gradients::Zero";
            return Err(Error::unsupported("Gradients::Release", wrong, remedy));
        }
        if cuda.max_blocks == Some(0) {
            return Err(Error::range("max_blocks", 0, "1 or more"));
        }
        self.assemble(comm, memory, |blueprint| {
            let Blueprint { plan, constants, assignment, comm, deadline, borrowed, timed, agreement } =
                blueprint;
            assignment.refuse_unreached(place)?;
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
                constants,
                assignment,
                comm,
                deadline,
                borrowed,
                timed,
            })
        })
    }
}

impl Stepper<CudaDevice> {
    /// Returns the address of a parameter, between passes.
    ///
    /// # Shapes
    /// As many elements as registered, of the type that the [precision](crate::Precision) says, aligned to 256 bytes
    /// unless [borrowed](crate::Borrowed).
    ///
    /// # Ordering
    /// Later work on the trainer's stream comes after the last step of the parameter's bucket.
    ///
    /// # Errors
    /// `Order` inside a pass, `Layout` if `id` is of another layout, `Poisoned` after a failure.
    pub fn param_ptr(&self, id: ParamId) -> Result<DevicePtr> {
        self.refuse_open_pass()?;
        let segment = self.claim(id, Memory::Params, false)?;
        Ok(self.device_address(&segment, Memory::Params))
    }

    /// Returns the address of a parameter's [copy](crate::StepperBuilder::copy_params), between passes: to be sent from
    /// there.
    ///
    /// # Shapes
    /// As many elements as the parameter, of the copy's type, aligned to 256 bytes.
    ///
    /// # Ordering
    /// Ordering as for [`param_ptr`](Self::param_ptr).
    ///
    /// # Errors
    /// Errors as for [`param_ptr`](Self::param_ptr); `Unsupported` if none is kept.
    pub fn copy_ptr(&self, id: ParamId) -> Result<DevicePtr> {
        self.require_copy()?;
        self.refuse_open_pass()?;
        let segment = self.claim(id, Memory::Copy, false)?;
        Ok(self.device_address(&segment, Memory::Copy))
    }

    /// Returns the event at which the times of recorded ops are zero, if ops are recorded: for benches, which time the
    /// trainer's own stream by the same clock.
    #[doc(hidden)]
    pub fn clock_zero(&self) -> Option<EventHandle> {
        self.run.borrow().device.clock_zero()
    }

    fn device_address(&self, segment: &Segment, memory: Memory) -> DevicePtr {
        let span = Span::segment(memory, &self.plan, segment);
        DevicePtr(self.run.borrow().device.resolve(span).addr() as u64)
    }
}

impl Pass<'_, CudaDevice> {
    /// Returns the address of a parameter.
    ///
    /// # Shapes
    /// Shape as for [`Stepper::param_ptr`].
    ///
    /// # Ordering
    /// Work on the trainer's stream from here until the hand-over comes after the last step of the parameter's bucket.
    /// Another stream of the trainer waits for that one after this call, and is joined before the hand-over.
    ///
    /// # Errors
    /// `Order` if it was handed over in this micro-batch, `Layout` if `id` is of another layout, `Poisoned` after a
    /// failure.
    pub fn param_ptr(&self, id: ParamId) -> Result<DevicePtr> {
        let segment = self.stepper.claim(id, Memory::Params, false)?;
        Ok(self.stepper.device_address(&segment, Memory::Params))
    }

    /// Returns the address of a gradient, to be written whole, or added to if it [was written](Self::is_first) in this
    /// pass.
    ///
    /// # Shapes
    /// Shape as for [`Stepper::param_ptr`].
    ///
    /// # Ordering
    /// Ordering as for [`param_ptr`](Self::param_ptr).
    ///
    /// # Errors
    /// Errors as for [`param_ptr`](Self::param_ptr); `Order` if the parameter is frozen.
    pub fn grad_ptr(&mut self, id: ParamId) -> Result<DevicePtr> {
        let segment = self.stepper.claim(id, Memory::Grads, true)?;
        self.stepper.written.get_mut()[segment.param as usize] = true;
        Ok(self.stepper.device_address(&segment, Memory::Grads))
    }

    /// Returns whether the gradient has not been written in this pass: the first write replaces, later ones add.
    ///
    /// # Errors
    /// `Layout` if `id` is of another layout.
    pub fn is_first(&self, id: ParamId) -> Result<bool> {
        Ok(!self.stepper.written.borrow()[self.stepper.layout.index(id)?])
    }
}
