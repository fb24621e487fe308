//! A bucket's step on a GPU. It is enqueued on the caller's stream and takes device addresses.
//!
//! The launches are the same as those of a stepper. Parameters and gradients may lie apart, each at its own address.
//! Any other kind of tensor is in one run of memory.
#![allow(unsafe_code)]

#[cfg(feature = "cuda")]
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};

use super::BucketStep;
use super::builder::BucketStepBuilder;
#[cfg(feature = "cuda")]
use super::element::StepElement;
use super::norm::{GradNorm, NormOnGpu};
use super::scaling::Scaling;
use super::settings::Engine;
use super::tensors::{Lent, StepTensors};
use crate::cuda::{BucketEngine, Cuda};
use crate::error::{Result, refuse};
use crate::handle::StreamHandle;
use crate::launch::{Bases, Progress, Settings};

/// The GPU's part of a [`BucketStep`].
pub struct OnGpu {
    engine: BucketEngine,
    /// This buffer is kept between steps, so that a step allocates nothing.
    bases: Vec<Bases>,
}

impl BucketStepBuilder {
    /// Builds the step on a GPU.
    ///
    /// ```no_run
    /// use std::ptr::with_exposed_provenance_mut;
    ///
    /// use instep::bucket_step::{Lent, StepTensors};
    /// use instep::cuda::Cuda;
    /// use instep::{AdamW, BucketStep, Layout, Scaling, StreamHandle};
    ///
    /// # let (params, grads, exp_avg, exp_avg_sq, stream) = (0, 0, 0, 0, StreamHandle(0));
    /// let layout = Layout::builder().param("bucket", 1 << 20).build()?;
    /// let mut step = BucketStep::builder(&layout, AdamW::default()).cuda(&Cuda::open(0)?)?;
    /// // SAFETY: addresses of this GPU's memory that nothing else touches until the stream has passed the step.
    /// unsafe {
    ///     let tensor = |address: usize| Lent::at(with_exposed_provenance_mut(address));
    ///     let tensors = StepTensors::new(tensor(params), tensor(grads)).states([tensor(exp_avg), tensor(exp_avg_sq)]);
    ///     step.enqueue(&tensors, Scaling::mean(8), stream)?; // after the all-reduce on that stream
    /// }
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors as for [`host`](Self::host). `Config` for options of the CPU. `KernelsNotBuilt` in a build without
    /// kernels. `Device` if the driver refuses a call.
    pub fn cuda(self, cuda: &Cuda) -> Result<BucketStep<OnGpu>> {
        refuse! {
            "isa" = "set", if self.isa.is_some() => "chooses CPU kernels", "leave it out on a GPU";
            "pool" = "set", if self.pool.is_some() => "splits CPU kernels", "leave it out on a GPU";
            "max_blocks" = 0, if cuda.max_blocks == Some(0) => "out of range", "use 1 or more";
        }
        BucketStep::new(self.parts()?, true, |parts| {
            let engine = BucketEngine::of(cuda, &parts.plan, &parts.assignment, &parts.settings)?;
            Ok(OnGpu { engine, bases: Vec::new() })
        })
    }
}

/// Lends slices of cudarc. They must be on the step's GPU and in its context.
///
/// cudarc orders the uses of a slice by two events, unless the slice's context has only one stream or does not track
/// events. These events add driver calls to a step. A slice that is written adds two waits before the step and one
/// event record after it. A slice that is only read adds one wait and one event record. Addresses ([`Lent::at_len`])
/// add no calls, but you must then order all uses of the memory yourself.
#[cfg(feature = "cuda")]
impl<'a> Lent<'a> {
    /// Lends a slice of cudarc that a step may write. `stream` is the stream on which the step is enqueued.
    ///
    /// ```no_run
    /// use instep::bucket_step::{Lent, StepTensors};
    /// use instep::cuda::{Cuda, cudarc::driver::CudaContext};
    /// use instep::{BucketStep, Layout, Scaling, Sgd};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layout = Layout::builder().param("bucket", 1 << 20).build()?;
    /// let mut step = BucketStep::builder(&layout, Sgd::default()).cuda(&Cuda::open(0)?)?;
    /// let stream = CudaContext::new(0)?.new_stream()?;
    /// let (mut params, grads) = (stream.alloc_zeros::<f32>(1 << 20)?, stream.alloc_zeros::<f32>(1 << 20)?);
    /// let (params, written) = Lent::cuda_slice_mut(&mut params, &stream);
    /// let (grads, read) = Lent::cuda_slice(&grads, &stream);
    /// // SAFETY: the stream of the slices, which are alive until it has passed the step.
    /// unsafe { step.enqueue(&StepTensors::new(params, grads), Scaling::NONE, (&stream).into())? };
    /// drop((written, read));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Ordering
    /// The stream waits for earlier uses of the slice. Keep the second returned value until the step is enqueued.
    /// Dropping this value records the event for which later uses of the slice wait.
    pub fn cuda_slice_mut<T: StepElement>(
        slice: &'a mut impl DevicePtrMut<T>,
        stream: &'a CudaStream,
    ) -> (Lent<'a>, SyncOnDrop<'a>) {
        let elements = slice.len();
        let (address, guard) = slice.device_ptr_mut(stream);
        (Lent::on_gpu::<T>(address, elements, true), guard)
    }

    /// Lends a read-only slice of cudarc, such as gradients.
    ///
    /// # Ordering
    /// Ordering as for [`cuda_slice_mut`](Self::cuda_slice_mut), but the stream waits only for earlier writes.
    pub fn cuda_slice<T: StepElement>(
        slice: &'a impl DevicePtr<T>,
        stream: &'a CudaStream,
    ) -> (Lent<'a>, SyncOnDrop<'a>) {
        let (address, guard) = slice.device_ptr(stream);
        (Lent::on_gpu::<T>(address, slice.len(), false), guard)
    }
}

impl Engine for OnGpu {
    fn write_settings(&mut self, settings: &Settings) {
        self.engine.set(settings);
    }

    fn read_progress(&self, record: usize) -> Result<Progress> {
        self.engine.read_progress(record)
    }

    fn write_progress(&mut self, record: usize, progress: Progress) -> Result<()> {
        self.engine.write_progress(record, progress)
    }
}

impl BucketStep<OnGpu> {
    /// Enqueues the step on a stream. Before this call, make the stream wait for the all-reduce of the gradients.
    ///
    /// # Ordering
    /// Makes one launch on the stream per kind of optimizer, and two for LAMB, after the bucket's last step on any
    /// stream. In four cases an additional launch first computes the scalars:
    ///
    /// - The bucket has LAMB.
    /// - The bucket has more than 1,392 parameters.
    /// - This call or an earlier one has a [`Scaling::grad_scaler`], or [`enqueue_norm`](Self::enqueue_norm) was called
    ///   before.
    /// - In this call or an earlier one, the parameters have more than 24 combinations of step count, hyperparameters
    ///   and action.
    ///
    /// Returns at once, with two exceptions. The host waits if it is eight steps ahead of the GPU. It also waits if
    /// each parameter or each gradient has its own address, and these addresses change a third time before the GPU
    /// has copied the first change.
    ///
    /// # Errors
    /// Errors as for [`step`](BucketStep::step). `Unsupported` for slices of host memory, and for one address per
    /// parameter where the tensors are neither parameters nor gradients. `Device` if a launch fails, and `Poisoned` in
    /// every later call.
    ///
    /// # Safety
    /// The stream belongs to this GPU and lives until it has run the step. The stream is not being captured, because a
    /// replay would not count as a step. The tensors are in this GPU's memory and meet the contract of
    /// [`Lent::at`](super::Lent::at).
    pub unsafe fn enqueue(
        &mut self,
        tensors: &StepTensors<'_>,
        scaling: Scaling,
        stream: StreamHandle,
    ) -> Result<()> {
        self.engine.engine.refuse_failed()?;
        scaling.validate()?;
        self.bind(tensors)?;
        let OnGpu { engine, bases } = &mut self.engine;
        // SAFETY: the caller's promise.
        unsafe { engine.step(bases, |args| scaling.put(args), None, stream)? }
        self.is_stale = false;
        self.mark.step();
        Ok(())
    }

    /// Enqueues a step that is clipped or skipped by the decision of a norm over several buckets. The norm must be
    /// decided before this call.
    ///
    /// # Ordering
    /// Ordering as for [`enqueue`](Self::enqueue). The step also runs after all earlier work of the norm on any stream.
    ///
    /// # Errors
    /// `Layout` for tensors that do not fit, as for [`step`](BucketStep::step). `Unsupported` for slices of host
    /// memory, and for one address per parameter where the tensors are neither parameters nor gradients. `Order` if the
    /// norm has not been decided, the bucket was not added to it, or the bucket was stepped after it was added.
    /// `Device` if a launch fails, and `Poisoned` in every later call.
    ///
    /// # Safety
    /// The stream and the tensors meet the conditions of [`enqueue`](Self::enqueue). The norm is of the same GPU.
    pub unsafe fn enqueue_decided(
        &mut self,
        tensors: &StepTensors<'_>,
        norm: &mut GradNorm<NormOnGpu>,
        stream: StreamHandle,
    ) -> Result<()> {
        self.engine.engine.refuse_failed()?;
        norm.refuse_step(&self.mark, || self.name())?;
        self.bind(tensors)?;
        let OnGpu { engine, bases } = &mut self.engine;
        norm.block().during(stream, |block| {
            // SAFETY: the caller's promise. The block is alive, and `during` orders this work among the norm's other
            // work.
            unsafe { engine.step(bases, |args| Scaling::NONE.put(args), Some(block), stream) }
        })?;
        self.is_stale = false;
        norm.marks().step(&mut self.mark);
        Ok(())
    }

    /// Enqueues a launch that adds the bucket's summed gradients to a norm.
    ///
    /// # Ordering
    /// Makes one launch on the stream, after all earlier work of the norm on any stream. The bucket's first call of
    /// this method may make two launches, and so may a call after a parameter was frozen or unfrozen since the last
    /// step.
    ///
    /// # Errors
    /// `Layout` for gradients that do not fit, as for [`step`](BucketStep::step). `Unsupported` for slices of host
    /// memory. `Order` if the norm has not been begun, has been decided, or has this bucket already. `Device` if a
    /// launch fails, and `Poisoned` in every later call.
    ///
    /// # Safety
    /// The stream and the gradients meet the conditions of [`enqueue`](Self::enqueue). The norm is of the same GPU.
    pub unsafe fn enqueue_norm(
        &mut self,
        grads: &Lent<'_>,
        norm: &mut GradNorm<NormOnGpu>,
        stream: StreamHandle,
    ) -> Result<()> {
        self.engine.engine.refuse_failed()?;
        norm.refuse_add(&self.mark, || self.name())?;
        let lacks_some = self.shape.bind_grads(grads, &mut self.engine.bases)?;
        self.pass_over_missing(grads, lacks_some);
        let (OnGpu { engine, bases }, is_stale) = (&mut self.engine, std::mem::take(&mut self.is_stale));
        // The parameters' records tell the norm which parameters are frozen. If the records are stale, this call
        // derives them again, and does not leave this to the next step.
        norm.block().during(stream, |block| {
            // SAFETY: the caller's promise. The block is alive, and `during` orders this work among the norm's other
            // work.
            unsafe { engine.norm(bases, block, is_stale, stream) }
        })?;
        norm.marks().add(&mut self.mark);
        Ok(())
    }

    /// Stores the addresses of a call's tensors, or refuses the tensors before anything has changed.
    fn bind(&mut self, tensors: &StepTensors<'_>) -> Result<()> {
        let lacks_some = self.shape.bind(tensors, &mut self.engine.bases)?;
        self.pass_over_missing(tensors.grads(), lacks_some);
        Ok(())
    }
}
