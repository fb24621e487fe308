//! A Python object for the norm of the gradients of several buckets.
//!
//! As in `step.rs`, only one thread at a time may use the object, and a forked child may not use it.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::{Mutex, MutexGuard};

use instep::bucket_step::{Decision, NormOnGpu};
use instep::{GradNorm, StreamHandle};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::arguments::Factors;
use crate::device::{Owner, gpu};
use crate::errors::raised;

/// The norm of the gradients of any number of buckets, and the decision whether to clip or skip their steps.
#[pyclass(frozen, module = "instep._native")]
pub(crate) struct Norm {
    owner: Owner,
    block: ManuallyDrop<Mutex<Block>>,
}

pub(crate) enum Block {
    Host(GradNorm),
    Gpu(GradNorm<NormOnGpu>),
}

#[pymethods]
impl Norm {
    /// Builds the norm on the CPU, or on the GPU with this ordinal.
    #[new]
    fn new(gpu_ordinal: Option<u32>) -> PyResult<Norm> {
        let block = match gpu_ordinal {
            None => Block::Host(GradNorm::host().map_err(raised)?),
            Some(ordinal) => Block::Gpu(GradNorm::cuda(&gpu(ordinal)?).map_err(raised)?),
        };
        Ok(Norm { owner: Owner::current(), block: ManuallyDrop::new(Mutex::new(block)) })
    }

    /// Begins a new norm. All gradients of the norm contain these factors.
    fn begin(&self, py: Python<'_>, factors: Factors, stream: usize) -> PyResult<()> {
        let mut block = self.lock()?;
        let block = &mut *block;
        py.detach(|| {
            // SAFETY: the Python half keeps GradScaler's tensors alive during the call. On a GPU, it keeps them alive
            // until the stream has run the call's work.
            unsafe {
                match block {
                    Block::Host(norm) => norm.begin(factors.scaling()),
                    Block::Gpu(norm) => norm.enqueue_begin(factors.scaling(), StreamHandle(stream)),
                }
            }
        })
        .map_err(raised)
    }

    /// Returns the address of the sum's limbs and the address of the largest magnitude. The caller may combine the
    /// limbs and the magnitude over ranks. On a GPU, `stream` first waits for the work of earlier calls with this norm.
    fn sum(&self, stream: usize) -> PyResult<(usize, usize)> {
        match &mut *self.lock()? {
            Block::Host(norm) => {
                let sum = norm.sum().map_err(raised)?;
                let limbs = ptr::from_mut(sum.limbs).expose_provenance();
                Ok((limbs, ptr::from_mut(sum.largest).expose_provenance()))
            }
            // SAFETY: the Python half passes a stream of PyTorch's on this GPU, which outlives the call's work.
            Block::Gpu(norm) => unsafe {
                let sum = norm.enqueue_sum(StreamHandle(stream)).map_err(raised)?;
                Ok((sum.limbs.0 as usize, sum.largest.0 as usize))
            },
        }
    }

    /// Decides whether steps are clipped or skipped.
    fn decide(
        &self,
        py: Python<'_>,
        max_norm: Option<f64>,
        skip_nonfinite: bool,
        stream: usize,
    ) -> PyResult<()> {
        let mut block = self.lock()?;
        let block = &mut *block;
        py.detach(|| match block {
            Block::Host(norm) => norm.decide(max_norm, skip_nonfinite).map(|_| ()),
            // SAFETY: the Python half passes a stream of PyTorch's on this GPU, which outlives the call's work.
            Block::Gpu(norm) => unsafe {
                norm.enqueue_decide(max_norm, skip_nonfinite, StreamHandle(stream))
            },
        })
        .map_err(raised)
    }

    /// Returns the norm, the clip coefficient, and whether the steps are skipped. On a GPU, waits for the decision.
    fn decision(&self, py: Python<'_>) -> PyResult<(f64, f64, bool)> {
        let mut block = self.lock()?;
        let block = &mut *block;
        let decision = py.detach(|| match block {
            Block::Host(norm) => norm.decision(),
            Block::Gpu(norm) => norm.decision(),
        });
        let Decision { norm, clip, skipped, .. } = decision.map_err(raised)?;
        Ok((norm, clip, skipped))
    }
}

impl Norm {
    pub(crate) fn lock(&self) -> PyResult<MutexGuard<'_, Block>> {
        self.owner.refuse_child()?;
        self.block
            .try_lock()
            .map_err(|_| PyRuntimeError::new_err("norm: in use by another thread; wait for it"))
    }
}

impl Drop for Norm {
    fn drop(&mut self) {
        // A forked child has no GPU.
        if !self.owner.is_elsewhere() {
            // SAFETY: nothing uses it afterwards.
            unsafe { ManuallyDrop::drop(&mut self.block) }
        }
    }
}
