//! A control block on a GPU that belongs to no bucket: norms of several buckets add to it, and their steps read it.
//!
//! Its calls may come on any stream: each waits for the last one. A failure is sticky.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;

use super::Cuda;
use super::arena::Arena;
use super::driver::{Driver, Entered, Kernel, Shape};
use super::kernels::Kernels;
use super::last_use::LastUse;
use super::memory::{bytes_of, fetch};
use crate::abi::{INSTEP_GPU_THREADS, InstepBeginArgs, InstepControl};
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, StreamHandle};
use crate::launch::{StepConstants, begin_block, decide_block, first_control};

/// See the module.
pub(crate) struct NormBlock {
    driver: Arc<dyn Driver>,
    kernels: ManuallyDrop<Kernels>,
    block: ManuallyDrop<Arena>,
    last: ManuallyDrop<LastUse>,
    failed: Option<Error>,
}

impl NormBlock {
    pub(crate) fn new(cuda: &Cuda) -> Result<NormBlock> {
        let driver = Arc::clone(&cuda.driver);
        let _entered = Entered::new(&*driver)?;
        let kernels = Kernels::load(&driver, &[])?;
        let last = LastUse::new(&driver)?;
        let block = Arena::zeroed(&driver, size_of::<InstepControl>() as u64, last.own())?;
        let control = first_control(&StepConstants::PLAIN);
        // SAFETY: just allocated for it. The host waits for the copy, so every stream finds it.
        unsafe { driver.upload(block.address, bytes_of(&control), last.own())? };
        Ok(NormBlock {
            driver: Arc::clone(&driver),
            kernels: ManuallyDrop::new(kernels),
            block: ManuallyDrop::new(block),
            last: ManuallyDrop::new(last),
            failed: None,
        })
    }

    /// Returns where the block lies.
    pub(crate) fn address(&self) -> DevicePtr {
        self.block.address
    }

    /// Opens the block. `scale` puts the factors of the gradients into the arguments.
    ///
    /// # Safety
    /// The stream is this device's.
    pub(crate) unsafe fn begin(
        &mut self,
        scale: impl FnOnce(&mut InstepBeginArgs),
        stream: StreamHandle,
    ) -> Result<()> {
        let mut args = begin_block(self.pointer());
        scale(&mut args);
        // SAFETY: the kernel takes this struct; the stream is the caller's promise.
        unsafe {
            self.launch(|kernels| kernels.begin, INSTEP_GPU_THREADS, ptr::from_ref(&args).cast(), stream)
        }
    }

    /// Decides by what was added.
    ///
    /// # Safety
    /// The stream is this device's.
    pub(crate) unsafe fn decide(
        &mut self,
        max_norm: Option<f64>,
        skip_nonfinite: bool,
        stream: StreamHandle,
    ) -> Result<()> {
        let args = decide_block(self.pointer(), max_norm, skip_nonfinite);
        // SAFETY: as in `begin`.
        unsafe { self.launch(|kernels| kernels.decide, 1, ptr::from_ref(&args).cast(), stream) }
    }

    /// Returns the block after all calls.
    pub(crate) fn read(&mut self) -> Result<InstepControl> {
        self.guarded(|block| {
            block.last.join(block.last.own())?;
            // SAFETY: our own block, which nothing writes when the stream comes to the copy.
            unsafe { fetch(&*block.driver, block.pointer().cast_const(), block.last.own()) }
        })
    }

    /// Runs a bucket's work between the last call and the next one.
    pub(crate) fn during<T>(
        &mut self,
        stream: StreamHandle,
        work: impl FnOnce(DevicePtr) -> Result<T>,
    ) -> Result<T> {
        self.on_stream(stream, |block| work(block.address()))
    }

    /// # Safety
    /// The kernel takes the struct at `args`, and the stream is this device's.
    unsafe fn launch(
        &mut self,
        kernel: impl FnOnce(&Kernels) -> Kernel,
        threads: u32,
        args: *const c_void,
        stream: StreamHandle,
    ) -> Result<()> {
        self.on_stream(stream, |block| {
            let shape = Shape { blocks: 1, threads };
            // SAFETY: the caller's promise; the block is alive.
            unsafe { block.driver.launch(kernel(&block.kernels), shape, stream, args) }
        })
    }

    /// Enqueues work after the last one, and marks its end even if only a part was enqueued.
    fn on_stream<T>(
        &mut self,
        stream: StreamHandle,
        work: impl FnOnce(&NormBlock) -> Result<T>,
    ) -> Result<T> {
        self.guarded(|block| {
            block.last.join(stream)?;
            let outcome = work(block);
            let marked = block.last.mark(stream);
            outcome.and_then(|value| marked.map(|()| value))
        })
    }

    fn pointer(&self) -> *mut InstepControl {
        ptr::with_exposed_provenance_mut(self.block.address.0 as usize)
    }

    fn guarded<T>(&mut self, work: impl FnOnce(&mut NormBlock) -> Result<T>) -> Result<T> {
        if let Some(first) = &self.failed {
            let op = "an earlier call of this norm".to_owned();
            return Err(Error::Poisoned { op, first: Arc::new(first.clone()) });
        }
        let driver = Arc::clone(&self.driver);
        let outcome = Entered::new(&*driver).and_then(|_entered| work(self));
        outcome.inspect_err(|error| self.failed = Some(error.clone()))
    }
}

impl Drop for NormBlock {
    fn drop(&mut self) {
        let driver = Arc::clone(&self.driver);
        let Ok(_entered) = Entered::new(&*driver) else { return };
        if !self.last.is_over_soon() {
            return;
        }
        // SAFETY: each dropped once, here; nothing runs any more.
        unsafe {
            ManuallyDrop::drop(&mut self.block);
            ManuallyDrop::drop(&mut self.kernels);
            ManuallyDrop::drop(&mut self.last);
        }
    }
}
