//! A bucket's step on a GPU: enqueued on a stream of the caller's, on device addresses.
//!
//! The launches are the stepper's. Parameters and gradients may lie apart; every other tensor is one run.
#![allow(unsafe_code)]

use super::builder::BucketStepBuilder;
use super::norm::{GradNorm, NormOnGpu};
use super::scaling::Scaling;
use super::tensors::{Tensor, Tensors};
use super::{BucketStep, refuse_carried};
use crate::cuda::{BucketEngine, Cuda};
use crate::error::{Error, Result};
use crate::handle::StreamHandle;
use crate::launch::{Bases, Progress};
use crate::layout::ParamId;
use crate::op::Memory;
use crate::optim::Optimizer;

/// A GPU's half of a [`BucketStep`].
pub struct OnGpu {
    engine: BucketEngine,
    /// Kept, so that a step allocates nothing.
    bases: Vec<Bases>,
}

impl BucketStepBuilder {
    /// Builds the step on a GPU.
    ///
    /// ```no_run
    /// use std::ptr::with_exposed_provenance_mut;
    ///
    /// use instep::bucket_step::{Tensor, Tensors};
    /// use instep::cuda::Cuda;
    /// use instep::{AdamW, BucketStep, Layout, Scaling, StreamHandle};
    ///
    /// # let (params, grads, exp_avg, exp_avg_sq, stream) = (0, 0, 0, 0, StreamHandle(0));
    /// let layout = Layout::builder().param("bucket", 1 << 20).build()?;
    /// let mut step = BucketStep::builder(&layout, AdamW::default()).cuda(&Cuda::open(0)?)?;
    /// // SAFETY: addresses of this GPU's memory that nothing else touches until the stream has passed the step.
    /// unsafe {
    ///     let tensor = |address: usize| Tensor::at(with_exposed_provenance_mut(address));
    ///     let tensors = Tensors::new(tensor(params), tensor(grads)).states([tensor(exp_avg), tensor(exp_avg_sq)]);
    ///     step.enqueue(&tensors, Scaling::mean(8), stream)?; // after the all-reduce on that stream
    /// }
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors as for [`host`](Self::host); `Config` for options of the CPU; `KernelsNotBuilt`; `Device` if the driver
    /// refuses anything.
    pub fn cuda(self, cuda: &Cuda) -> Result<BucketStep<OnGpu>> {
        if self.isa.is_some() {
            return Err(Error::config("isa", "set", "chooses CPU kernels", "leave it out on a GPU"));
        }
        if self.pool.is_some() {
            return Err(Error::config("pool", "set", "splits CPU kernels", "leave it out on a GPU"));
        }
        if cuda.max_blocks == Some(0) {
            return Err(Error::range("max_blocks", 0, "1 or more"));
        }
        BucketStep::new(self.parts()?, |parts| {
            let inputs = (&parts.constants, &parts.assignment);
            let engine = BucketEngine::new(cuda, &parts.plan, inputs, &parts.settings)?;
            Ok(OnGpu { engine, bases: Vec::new() })
        })
    }
}

impl BucketStep<OnGpu> {
    /// Enqueues the step on a stream, which must come after the sum of the gradients.
    ///
    /// # Ordering
    /// One launch on the stream for the scalars, and one per kind of optimizer, LAMB two, after the bucket's last step on any
    /// stream. Returns at once, but for a host that is
    /// eight steps ahead, or that changes the addresses of parameters or gradients that lie apart a third time before the
    /// GPU has copied the first ones.
    ///
    /// # Errors
    /// Errors as for [`step`](BucketStep::step); `Unsupported` for slices, which are the host's, and for tensors other
    /// than parameters and gradients that lie apart; `Device` if a launch fails, and `Poisoned` ever after.
    ///
    /// # Safety
    /// The stream is this GPU's, alive until it has passed the step, and not being captured: a replay would not count as a
    /// step here. The tensors are in this GPU's memory, by the contract of [`Tensor::at`](super::Tensor::at).
    pub unsafe fn enqueue(
        &mut self,
        tensors: &Tensors<'_>,
        scaling: Scaling,
        stream: StreamHandle,
    ) -> Result<()> {
        scaling.validate()?;
        tensors.refuse_on_gpu()?;
        self.shape.bind(tensors, &mut self.engine.bases)?;
        let OnGpu { engine, bases } = &mut self.engine;
        // SAFETY: the caller's promise.
        unsafe { engine.step(&self.constants, bases, (|args| scaling.put(args), None), stream)? }
        self.is_stale = false;
        Ok(())
    }

    /// Enqueues the step as a norm over several buckets has decided: clipped by its coefficient, or not at all.
    ///
    /// # Ordering
    /// Ordering as for [`enqueue`](Self::enqueue), and after the norm's last call on any stream.
    ///
    /// # Errors
    /// Errors as for [`enqueue`](Self::enqueue); `Order` if the norm has not been decided.
    ///
    /// # Safety
    /// As for [`enqueue`](Self::enqueue); the norm is of the same GPU.
    pub unsafe fn enqueue_decided(
        &mut self,
        tensors: &Tensors<'_>,
        norm: &mut GradNorm<NormOnGpu>,
        stream: StreamHandle,
    ) -> Result<()> {
        self.engine.engine.refuse_failed()?;
        norm.refuse_undecided()?;
        tensors.refuse_on_gpu()?;
        self.shape.bind(tensors, &mut self.engine.bases)?;
        let (OnGpu { engine, bases }, constants) = (&mut self.engine, &self.constants);
        norm.block().during(stream, |block| {
            // SAFETY: the caller's promise; the block is alive, and this work is between the norm's others.
            unsafe { engine.step(constants, bases, (|args| Scaling::NONE.put(args), Some(block)), stream) }
        })?;
        self.is_stale = false;
        Ok(())
    }

    /// Enqueues the addition of the bucket's summed gradients to a norm.
    ///
    /// # Ordering
    /// One launch on the stream, or two where a parameter was frozen or thawed since the last step, after the norm's last call
    /// on any stream.
    ///
    /// # Errors
    /// Errors as for [`enqueue`](Self::enqueue), of the gradients alone; `Order` unless the norm has been begun.
    ///
    /// # Safety
    /// As for [`enqueue_decided`](Self::enqueue_decided).
    pub unsafe fn enqueue_norm(
        &mut self,
        grads: &Tensor<'_>,
        norm: &mut GradNorm<NormOnGpu>,
        stream: StreamHandle,
    ) -> Result<()> {
        self.engine.engine.refuse_failed()?;
        norm.refuse_decided()?;
        grads.refuse_on_gpu(Memory::Grads)?;
        self.shape.bind_grads(grads, &mut self.engine.bases)?;
        let (OnGpu { engine, bases }, is_stale) = (&mut self.engine, std::mem::take(&mut self.is_stale));
        // A norm leaves out what is frozen, as the records say, and so does the step, which begins once more.
        let begin = is_stale.then_some(&self.constants);
        norm.block().during(stream, |block| {
            // SAFETY: as in `enqueue_decided`.
            unsafe { engine.norm(bases, block, begin, stream) }
        })
    }

    /// Replaces the hyperparameters of a group, such as [`DEFAULT_GROUP`](crate::DEFAULT_GROUP), from the next step on, without waiting.
    ///
    /// # Errors
    /// Errors as for the CPU's [`set_optimizer`](BucketStep::set_optimizer).
    pub fn set_optimizer(&mut self, group: &str, optimizer: &dyn Optimizer) -> Result<()> {
        self.replace(group, optimizer)?;
        self.engine.engine.set(&self.settings);
        Ok(())
    }

    /// Sets whether steps pass over a parameter, from the next one on, without waiting.
    ///
    /// # Errors
    /// Errors as for the CPU's [`set_frozen`](BucketStep::set_frozen).
    pub fn set_frozen(&mut self, id: ParamId, frozen: bool) -> Result<()> {
        self.freeze(id, frozen)?;
        self.engine.engine.set(&self.settings);
        Ok(())
    }

    /// Returns how many updates a parameter has had.
    ///
    /// # Ordering
    /// Waits for the last step.
    ///
    /// # Errors
    /// `Layout` if it is not in this bucket; `Device` if the copy fails, and `Poisoned` after a failure.
    pub fn step_count(&mut self, id: ParamId) -> Result<u64> {
        let record = self.record(id)?;
        Ok(self.engine.engine.read_progress(record)?.count)
    }

    /// Sets how many updates a parameter has had: when a training is resumed. NAdam's product of momenta is resumed by
    /// [`set_carried`](Self::set_carried).
    ///
    /// # Ordering
    /// Waits for the last step.
    ///
    /// # Errors
    /// Errors as for [`step_count`](Self::step_count).
    pub fn set_step_count(&mut self, id: ParamId, count: u64) -> Result<()> {
        let record = self.record(id)?;
        let Progress { carried, .. } = self.engine.engine.read_progress(record)?;
        self.engine.engine.write_progress(record, Progress { count, carried })
    }

    /// Returns the number that the optimizer carries beside the step count: NAdam's product of momenta, 1 in others.
    ///
    /// # Ordering
    /// Waits for the last step.
    ///
    /// # Errors
    /// Errors as for [`step_count`](Self::step_count).
    pub fn carried(&mut self, id: ParamId) -> Result<f64> {
        let record = self.record(id)?;
        Ok(self.engine.engine.read_progress(record)?.carried)
    }

    /// Sets that number, after [`set_step_count`](Self::set_step_count).
    ///
    /// # Ordering
    /// Waits for the last step.
    ///
    /// # Errors
    /// Errors as for [`step_count`](Self::step_count); `Config` if the number is not from 0 to 1.
    pub fn set_carried(&mut self, id: ParamId, carried: f64) -> Result<()> {
        refuse_carried(carried)?;
        let record = self.record(id)?;
        let Progress { count, .. } = self.engine.engine.read_progress(record)?;
        self.engine.engine.write_progress(record, Progress { count, carried })
    }
}
