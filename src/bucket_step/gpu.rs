//! A bucket's step on a GPU. The caller passes a stream for the step and the device addresses of the tensors.
//!
//! The launches are the same as those of a stepper. Each parameter and each gradient may have its own address. Every
//! other kind of tensor is one contiguous run of memory for the whole bucket.
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
    /// The addresses of a call's tensors. Every step reuses this buffer, so a step allocates nothing.
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
    /// Errors as for [`host`](Self::host). `Config` if [`isa`](Self::isa) or [`pool`](Self::pool) is set, because they
    /// are options of the CPU. `KernelsNotBuilt` in a build without kernels. `Device` if the driver refuses a call.
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

/// Lends cudarc slices. The slices must be on the step's GPU, and in the context that the step uses.
///
/// cudarc orders the uses of a slice by two events, unless the slice's context has only one stream or does not track
/// events. These events add driver calls to a step. A slice that the step writes needs two waits before the step and
/// one event record after it. A slice that the step only reads needs one wait and one event record. If you lend an
/// address instead ([`Lent::at_len`]), no calls are added, but you must order all uses of the memory yourself.
#[cfg(feature = "cuda")]
impl<'a> Lent<'a> {
    /// Lends a cudarc slice that a step may write. `stream` is the stream on which the step is enqueued.
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
    /// The stream waits for earlier uses of the slice. Do not drop the second returned value before the step is
    /// enqueued. When it is dropped, it records an event, and later uses of the slice wait for this event.
    pub fn cuda_slice_mut<T: StepElement>(
        slice: &'a mut impl DevicePtrMut<T>,
        stream: &'a CudaStream,
    ) -> (Lent<'a>, SyncOnDrop<'a>) {
        let elements = slice.len();
        let (address, guard) = slice.device_ptr_mut(stream);
        (Lent::on_gpu::<T>(address, elements, true), guard)
    }

    /// Lends a cudarc slice that a step only reads, such as gradients.
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
    /// Makes one launch on the stream for each kind of optimizer, or two launches for LAMB. The launches run after the
    /// bucket's previous step, even if that step was enqueued on another stream. In four cases an additional launch
    /// first computes the scalars:
    ///
    /// - One of the bucket's optimizers is LAMB.
    /// - The bucket has more than 1,392 parameters.
    /// - The `scaling` of this call or an earlier one uses [`Scaling::grad_scaler`], or
    ///   [`enqueue_norm`](Self::enqueue_norm) was called before.
    /// - In this call or an earlier one, the parameters have more than 24 combinations of step count, hyperparameters
    ///   and action.
    ///
    /// Returns at once, except in two cases. If the call makes the additional launch, the calling thread waits if it is
    /// eight such launches ahead of the GPU. If each parameter or each gradient has its own address, every change of
    /// these addresses is copied to the GPU. The calling thread waits at a third change if the GPU has not copied the
    /// first change yet.
    ///
    /// # Errors
    /// Errors as for [`step`](BucketStep::step). `Unsupported` for slices of host memory, or if tensors other than
    /// parameters and gradients have one address per parameter. `Device` if a launch fails, and `Poisoned` in every
    /// later call.
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

    /// Enqueues a step that obeys a decision made from a norm over several buckets. The decision sets the step's clip
    /// coefficient, or skips the step. The norm must be decided before this call.
    ///
    /// # Ordering
    /// Ordering as for [`enqueue`](Self::enqueue). The step also waits for all work that earlier calls with this norm
    /// have enqueued, on any stream.
    ///
    /// # Errors
    /// `Layout` for tensors that do not fit, as for [`step`](BucketStep::step). `Unsupported` for slices of host
    /// memory, or if tensors other than parameters and gradients have one address per parameter. `Order` if the norm
    /// has not been decided, if the bucket was not added to the norm, or if the bucket has been stepped since it was
    /// added. If `GradNorm::enqueue_sum` was called, a bucket that was added to another norm is accepted too. `Device`
    /// if a launch fails, and `Poisoned` in every later call.
    ///
    /// # Safety
    /// The stream and the tensors meet the conditions of [`enqueue`](Self::enqueue). The norm was made for the same
    /// GPU.
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
    /// Makes one launch on the stream. The launch waits for all work that earlier calls with this norm have enqueued,
    /// on any stream. The call may make two launches in two cases: it is the bucket's first call of this method, or the
    /// set of frozen parameters or of missing gradients has changed since the bucket's last step.
    ///
    /// # Errors
    /// `Layout` for gradients that do not fit, as for [`step`](BucketStep::step). `Unsupported` for slices of host
    /// memory. `Order` if the norm has not been begun, if it has been decided, or if this bucket was already added to
    /// it. `Device` if a launch fails, and `Poisoned` in every later call.
    ///
    /// # Safety
    /// The stream and the gradients meet the conditions of [`enqueue`](Self::enqueue). The norm was made for the same
    /// GPU.
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

    /// Checks a call's tensors and stores their addresses. If a tensor is refused, no stored address changes.
    fn bind(&mut self, tensors: &StepTensors<'_>) -> Result<()> {
        let lacks_some = self.shape.bind(tensors, &mut self.engine.bases)?;
        self.pass_over_missing(tensors.grads(), lacks_some);
        Ok(())
    }
}
