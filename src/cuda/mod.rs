//! The CUDA device. This device runs ops as driver calls, with kernels that are embedded in this crate. Memory and
//! streams belong to the library or to the caller.
//!
//! The calling thread enqueues a stepper's work, and waits only if it is eight passes ahead of the GPU. For each
//! bucket, the thread enqueues a wait for the sum, a kernel (two for LAMB), and the recording of an event. Without
//! feature `cuda`, or without a driver, every constructor returns an error that names what is missing. As on the host
//! device, the module `schedule` decides which ops may overlap, and `hazard` proves that the overlap is safe.

mod any_stream;
mod bucket;
mod built;
mod cast;
mod claims;
mod device;
mod device_impl;
#[doc(hidden)]
pub mod driver;
mod engine;
mod full_buckets;
mod given;
mod gpu_memory;
mod graph;
mod host_steps;
mod judge;
mod kernels;
mod launches;
#[cfg(feature = "cuda")]
mod library;
pub mod nccl;
mod norm_block;
mod order;
pub(crate) mod owned;
mod pinned;
mod streams;
mod submit;
#[cfg(feature = "cuda")]
mod system;
mod tile_tables;
mod timing;
mod waits;

pub(crate) use bucket::BucketEngine;
pub use built::{BuiltKernels, Image, built_kernels};
pub use cast::CastKernel;
/// The version of cudarc that this crate uses. cudarc's streams and events convert to [`StreamHandle`] and
/// [`EventHandle`](crate::EventHandle). In this crate's interface, only these conversions and
/// [`Lent`](crate::bucket_step::Lent) use cudarc's types, because the types change often.
#[cfg(feature = "cuda")]
pub use cudarc;
pub use device::CudaDevice;
pub use graph::CapturedPass;
pub(crate) use host_steps::HostSide;
pub use nccl::Nccl;
pub(crate) use norm_block::NormBlock;

use std::sync::Arc;

use crate::error::Result;
use crate::handle::StreamHandle;
use driver::Driver;

/// A GPU, and how a stepper uses it.
#[derive(Clone)]
pub struct Cuda {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) compute: StreamHandle,
    pub(crate) optim_priority: i32,
    pub(crate) max_blocks: Option<u32>,
}

impl Cuda {
    /// Opens the device with this ordinal. Work runs in the device's primary context, which the CUDA runtime and
    /// frameworks use too. Under torchrun, each rank opens its own device, with the ordinal
    /// [`Options::device`](nccl::Options::device).
    ///
    /// # Errors
    /// `KernelsNotBuilt` without feature `cuda`. `DriverUnavailable` without a working driver. `Unsupported` if there
    /// is no such device, or if the device has no stream-ordered memory or no unified addressing. `Device` if the
    /// driver refuses a call.
    pub fn open(ordinal: u32) -> Result<Cuda> {
        #[cfg(feature = "cuda")]
        return Ok(Cuda::on(system::open(ordinal)?));
        #[cfg(not(feature = "cuda"))]
        {
            let _ = ordinal;
            built_kernels().map(|_| unreachable!("no kernels without the feature"))
        }
    }

    /// Uses the caller's driver instead of the system's driver. Tests use it to run without a GPU.
    #[doc(hidden)]
    pub fn on(driver: Arc<dyn Driver>) -> Cuda {
        Cuda { driver, compute: StreamHandle::default(), optim_priority: 0, max_blocks: None }
    }

    #[doc(hidden)]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Sets the stream on which forward and backward run. The default is the legacy default stream. The per-thread
    /// default stream (handle 2) differs between threads, so a stepper that uses it must stay on one thread. A stream
    /// of a green context of this device is accepted too (CUDA 12.5 or newer). Streams of other contexts are refused.
    ///
    /// Create the stream with a higher priority than that of the steps ([`optim_priority`](Self::optim_priority)), such
    /// as -1 (`cuStreamCreateWithPriority`; `torch.cuda.Stream(priority=-1)`). With equal priorities, blocks run in the
    /// order of their launches. A backward kernel would then start only after all blocks of a concurrent step have
    /// started.
    pub fn compute_stream(mut self, stream: StreamHandle) -> Cuda {
        self.compute = stream;
        self
    }

    /// Sets the priority of steps relative to the trainer's kernels. A lower number is a higher priority. The driver
    /// clamps the number to the device's range. The default is 0, the priority of an ordinary stream.
    pub fn optim_priority(mut self, priority: i32) -> Cuda {
        self.optim_priority = priority;
        self
    }

    /// Sets the number of thread blocks of a step's launch. There is at most one block per tile of 2,048 elements.
    /// Fewer blocks leave more multiprocessors free for a concurrent backward. Too few blocks do not use the full
    /// memory bandwidth. With more blocks, each block ends sooner, so a kernel of higher priority waits less for a
    /// multiprocessor. `u32::MAX` gives each tile its own block. `instep bench --device cuda:0 --max-blocks` measures
    /// the effect. By default, a block steps one tile if tiles move at least 38 KiB on average. Otherwise, a block
    /// steps enough tiles to move about 224 KiB. If there are enough tiles, the launch has at least twice as many
    /// blocks as can be resident at a time.
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

/// Returns the number of CUDA devices.
///
/// # Errors
/// `KernelsNotBuilt`, `DriverUnavailable` and `Device` as for [`Cuda::open`].
pub fn device_count() -> Result<u32> {
    #[cfg(feature = "cuda")]
    return system::device_count();
    #[cfg(not(feature = "cuda"))]
    built_kernels().map(|_| 0)
}
