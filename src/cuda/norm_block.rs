//! A control block on a GPU for several buckets. The norms of the buckets are added to the block, and the steps of the
//! buckets read the block.
//!
//! A call may name any stream. The work of a call waits for the work of the previous call (`any_stream.rs`).
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;

use super::Cuda;
use super::any_stream::AnyStream;
use super::driver::{Driver, Shape};
use super::gpu_memory::{bytes_of, fetch};
use super::kernels::Kernels;
use super::owned::Arena;
use crate::abi::{INSTEP_GPU_THREADS, InstepBeginArgs, InstepControl};
use crate::error::Result;
use crate::handle::{DevicePtr, StreamHandle};
use crate::launch::{StepConstants, begin_block, decide_block, first_control};

pub(crate) type NormBlock = AnyStream<Block>;

pub(crate) struct Block {
    driver: Arc<dyn Driver>,
    kernels: Kernels,
    arena: Arena,
}

impl NormBlock {
    pub(crate) fn of(cuda: &Cuda) -> Result<NormBlock> {
        let driver = Arc::clone(&cuda.driver);
        AnyStream::new(&cuda.driver, "norm", |own| {
            let kernels = Kernels::load(&driver, &[])?;
            let arena = Arena::zeroed(&driver, size_of::<InstepControl>() as u64, own)?;
            let control = first_control(&StepConstants::PLAIN);
            // SAFETY: the memory was just allocated for the block. The host waits for the copy, so every stream finds
            // the written block.
            unsafe { driver.upload(arena.address(), bytes_of(&control), own)? };
            Ok(Block { driver, kernels, arena })
        })
    }

    /// Begins a new norm in the block. `scale` writes the gradients' factors (divisor, loss scale) into the arguments.
    ///
    /// # Safety
    /// The stream belongs to this device.
    pub(crate) unsafe fn begin(
        &mut self,
        scale: impl FnOnce(&mut InstepBeginArgs),
        stream: StreamHandle,
    ) -> Result<()> {
        self.on_stream(stream, |block, _| {
            let (mut args, shape) =
                (begin_block(block.pointer()), Shape { blocks: 1, threads: INSTEP_GPU_THREADS });
            scale(&mut args);
            // SAFETY: the kernel takes this struct. The block in it is this object's own, and the caller guarantees the
            // rest.
            unsafe { block.driver.launch(block.kernels.begin, shape, stream, ptr::from_ref(&args).cast()) }
        })
    }

    /// Computes the clip coefficient from the norms that were added to the block, and decides whether steps are
    /// skipped.
    ///
    /// # Safety
    /// The stream belongs to this device.
    pub(crate) unsafe fn decide(
        &mut self,
        max_norm: Option<f64>,
        skip_nonfinite: bool,
        stream: StreamHandle,
    ) -> Result<()> {
        self.on_stream(stream, |block, _| {
            let args = decide_block(block.pointer(), max_norm, skip_nonfinite);
            let shape = Shape { blocks: 1, threads: 1 };
            // SAFETY: the kernel takes this struct. The block in it is this object's own, and the caller guarantees the
            // rest.
            unsafe { block.driver.launch(block.kernels.decide, shape, stream, ptr::from_ref(&args).cast()) }
        })
    }

    pub(crate) fn control(&mut self) -> Result<InstepControl> {
        // SAFETY: this is our own block. When the stream comes to the copy, nothing writes it.
        self.copy(|block, own| unsafe { fetch(&*block.driver, block.pointer().cast_const(), own) })
    }

    /// Calls `work` with the block's address. On the GPU, the work of this call runs after the work of earlier calls,
    /// and before the work of later calls.
    pub(crate) fn during<T>(
        &mut self,
        stream: StreamHandle,
        work: impl FnOnce(DevicePtr) -> Result<T>,
    ) -> Result<T> {
        self.on_stream(stream, |block, _| work(block.arena.address()))
    }
}

impl Block {
    fn pointer(&self) -> *mut InstepControl {
        self.arena.base().cast()
    }
}
