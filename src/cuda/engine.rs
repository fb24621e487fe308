//! The parts that a stepper and a single bucket both need on a GPU: kernels, memory, settings, and the launches of the
//! kernels that are neither steps nor norms.
//!
//! If the host does not begin an update (`given.rs`), the GPU begins it with one launch. This launch applies the
//! current settings to the records and derives the update's scalars. The engine's owner decides when and on which
//! stream the launches run, and when the memory may be freed.
#![allow(unsafe_code)]

use std::ptr;

use super::driver::{Kernel, Shape};
use super::gpu_memory::DeviceMemory;
use super::kernels::Kernels;
use super::pinned::{SLOTS, SettingsRing};
use crate::abi::{INSTEP_GPU_THREADS, InstepBeginArgs};
use crate::error::Result;
use crate::handle::StreamHandle;
use crate::launch::{StepConstants, begin_args};

pub(super) struct Engine {
    pub(super) kernels: Kernels,
    pub(super) settings: SettingsRing,
    pub(super) memory: DeviceMemory,
    pub(super) constants: StepConstants,
}

impl Engine {
    /// Begins an update, with the settings in the ring's current slot. `scale` writes the gradients' factors (divisor,
    /// loss scale, clip) into the arguments.
    pub(super) fn begin(&self, scale: impl FnOnce(&mut InstepBeginArgs), stream: StreamHandle) -> Result<()> {
        let mut args = InstepBeginArgs {
            ring: ptr::with_exposed_provenance(self.settings.ring.device().0 as usize),
            slot_words: self.settings.words.len() as u64,
            slot_count: SLOTS as u64,
            ..begin_args(&self.memory.regions, &self.constants)
        };
        scale(&mut args);
        self.launch(self.kernels.begin, Shape { blocks: 1, threads: INSTEP_GPU_THREADS }, stream, &args)
    }

    /// Launches a kernel. `args` is the struct of abi.h that the kernel takes. Its addresses are in memory that is
    /// valid until the kernel has ended: this engine's memory, the ring of statuses, or memory of the caller (a loss
    /// scale, a skip flag).
    pub(super) fn launch<Args>(
        &self,
        kernel: Kernel,
        shape: Shape,
        stream: StreamHandle,
        args: &Args,
    ) -> Result<()> {
        // SAFETY: the kernel takes this struct. As for every op, nothing else touches this engine's memory until the
        // kernel has ended.
        unsafe { self.memory.driver.launch(kernel, shape, stream, ptr::from_ref(args).cast()) }
    }
}
