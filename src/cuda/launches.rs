//! Kernel launches of the buckets, prepared before the first pass.
//!
//! A launch holds its arguments and its grid, so running it takes one driver call and, with the user's own code, one
//! call per parameter. The addresses in the arguments lead into the stepper's memory, which outlives the launches.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;

use super::custom::EnqueuedParams;
use super::driver::{Driver, Kernel, Shape};
use super::kernels::Kernels;
use super::memory::DeviceMemory;
use crate::abi::{INSTEP_GPU_THREADS, INSTEP_OPTIMIZER_CUSTOM, InstepStepArgs};
use crate::error::Result;
use crate::handle::StreamHandle;
use crate::launch::{Assignment, Kind, Launch, StepConstants};
use crate::layout::Plan;

/// Blocks of the norm per multiprocessor. Each block ends in atomics, so no more run than fill the GPU.
const NORM_BLOCKS_PER_MULTIPROCESSOR: u32 = 4;

/// One launch of a bucket, and the user's own code that runs after it.
pub(super) struct BucketLaunch {
    kernel: Kernel,
    shape: Shape,
    args: InstepStepArgs,
    custom: Option<EnqueuedParams>,
}

/// Inputs that all launches of one stepper share.
pub(super) struct Preparation<'a> {
    pub(super) driver: &'a Arc<dyn Driver>,
    pub(super) kernels: &'a Kernels,
    pub(super) plan: &'a Plan,
    pub(super) constants: &'a StepConstants,
    pub(super) assignment: &'a Assignment,
    /// The stream on which tiles are uploaded.
    pub(super) stream: StreamHandle,
    /// Most blocks of one launch, if the caller limits them.
    pub(super) max_blocks: Option<u32>,
}

impl Preparation<'_> {
    /// Prepares the launches of every bucket and uploads their tiles.
    pub(super) fn launches(&self, kind: Kind, memory: &mut DeviceMemory) -> Result<Vec<Vec<BucketLaunch>>> {
        (0..self.plan.buckets().len() as u32).map(|bucket| self.of_bucket(kind, bucket, memory)).collect()
    }

    fn of_bucket(&self, kind: Kind, bucket: u32, memory: &mut DeviceMemory) -> Result<Vec<BucketLaunch>> {
        let inputs = (self.constants, self.assignment);
        let mut launches = Vec::new();
        for Launch { mut args, tiles, .. } in Launch::all(kind, bucket, self.plan, &memory.regions, inputs) {
            args.tiles = memory.keep(self.driver, self.stream, &tiles)?;
            let is_custom = kind == Kind::Step && args.optimizer == INSTEP_OPTIMIZER_CUSTOM;
            let most = if is_custom { 1 } else { self.most_blocks(kind) };
            let blocks = args.tile_count.min(most.into()) as u32;
            launches.push(BucketLaunch {
                kernel: match kind {
                    Kind::Step => self.kernels.step(args.optimizer),
                    Kind::Norm => self.kernels.norm,
                },
                shape: Shape { blocks, threads: INSTEP_GPU_THREADS },
                custom: is_custom.then(|| EnqueuedParams::new(&args, &tiles, self.plan, self.assignment)),
                args,
            });
        }
        Ok(launches)
    }

    fn most_blocks(&self, kind: Kind) -> u32 {
        let most = self.max_blocks.unwrap_or(i32::MAX as u32);
        match kind {
            Kind::Step => most,
            Kind::Norm => most.min(NORM_BLOCKS_PER_MULTIPROCESSOR * self.driver.multiprocessors()),
        }
    }
}

impl BucketLaunch {
    /// Enqueues the launch.
    ///
    /// # Safety
    /// The stepper's memory is alive, and nothing else touches what the kernel touches until it has ended.
    pub(super) unsafe fn enqueue(&self, driver: &dyn Driver, stream: StreamHandle) -> Result<()> {
        if self.shape.blocks == 0 {
            return Ok(());
        }
        // SAFETY: the kernel takes this struct; the rest is the caller's promise.
        unsafe { driver.launch(self.kernel, self.shape, stream, ptr::from_ref(&self.args).cast())? };
        match &self.custom {
            Some(custom) => custom.enqueue(driver, stream),
            None => Ok(()),
        }
    }
}
