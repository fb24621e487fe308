//! The CUDA device: ops as driver calls, kernels embedded in the crate, memory and streams that may be anyone's.
//!
//! Everything is enqueued on the calling thread, and nothing there waits: bucket by bucket, one wait for the reduce and
//! one launch. Without feature `cuda`, or without a driver, every constructor here says so and nothing else changes.
//! What may overlap is decided in `schedule` and proven by `hazard`, as on the host.

mod built;
#[cfg(feature = "cuda")]
mod context;
mod custom;
mod device;
mod device_impl;
#[doc(hidden)]
pub mod driver;
mod external;
mod fatbin;
mod graph;
#[cfg(feature = "interop")]
mod interop;
mod kernels;
mod memory;
pub mod nccl;
mod pinned;
mod streams;
#[cfg(feature = "cuda")]
mod system;
mod timing;
mod waits;

pub use built::{BuiltKernels, built_kernels};
pub use device::CudaDevice;
pub(crate) use device::Parts;
pub use external::External;
pub use fatbin::Image;
pub use graph::CapturedPass;
pub use nccl::Nccl;

use std::sync::Arc;

use crate::error::Result;
use crate::handle::StreamHandle;
use driver::Driver;

/// A GPU, and how a stepper is to use it.
#[derive(Clone)]
pub struct Cuda {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) compute: StreamHandle,
    pub(crate) optim_priority: i32,
    pub(crate) max_blocks: Option<u32>,
}

impl Cuda {
    /// The device with this ordinal, by its primary context, which the CUDA runtime and frameworks use too. Of ranks
    /// that torchrun started each opens its own: [`Options::device`](nccl::Options::device).
    ///
    /// # Errors
    /// `KernelsNotBuilt` without feature `cuda`, `DriverUnavailable` if there is no driver that works, `Unsupported` if
    /// it has no such device.
    pub fn open(ordinal: u32) -> Result<Cuda> {
        #[cfg(feature = "cuda")]
        return Ok(Cuda::on(system::open(ordinal)?));
        #[cfg(not(feature = "cuda"))]
        {
            let _ = ordinal;
            built_kernels().map(|_| unreachable!("no kernels without the feature"))
        }
    }

    /// As [`open`](Self::open), on a driver of the caller's: how tests run without one.
    #[doc(hidden)]
    pub fn on(driver: Arc<dyn Driver>) -> Cuda {
        Cuda { driver, compute: StreamHandle::default(), optim_priority: 0, max_blocks: None }
    }

    #[doc(hidden)]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// The stream that forward and backward run on. Unset: the legacy default stream. The calling thread's own default
    /// stream (handle 2) is another one on every thread: a stepper on it must stay on its thread.
    pub fn compute_stream(mut self, stream: StreamHandle) -> Cuda {
        self.compute = stream;
        self
    }

    /// How urgent steps are beside the trainer's kernels; lower runs sooner, and the driver clamps it to what the
    /// device has. Unset: 0, as an ordinary stream.
    pub fn optim_priority(mut self, priority: i32) -> Cuda {
        self.optim_priority = priority;
        self
    }

    /// At most so many thread blocks per step: fewer leave multiprocessors to the backward that runs beside it, and too
    /// few cost bandwidth; `instep bench --device cuda:0 --max-blocks` shows how many do. Unset: one per 2,048
    /// elements.
    pub fn max_blocks(mut self, blocks: u32) -> Cuda {
        self.max_blocks = Some(blocks);
        self
    }
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda")
            .field("ordinal", &self.driver.ordinal())
            .field("compute", &self.compute)
            .field("optim_priority", &self.optim_priority)
            .field("max_blocks", &self.max_blocks)
            .finish()
    }
}

/// How many CUDA devices there are.
///
/// # Errors
/// As [`Cuda::open`], but for the ordinal.
pub fn device_count() -> Result<u32> {
    #[cfg(feature = "cuda")]
    return context::device_count();
    #[cfg(not(feature = "cuda"))]
    built_kernels().map(|_| 0)
}
