//! A bucket's kernel alone, called as a launch calls it: what a step costs that does nothing else.
//!
//! It depends on the host's kernels and memory. Scalars are derived once, so every step is the same update.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::{constants, plan};
use crate::abi::{InstepStepArgs, InstepTile};
use crate::error::Result;
use crate::host::Isa;
use crate::host::arena::Memories;
use crate::host::kernels::Kernels;
use crate::launch::{Assignment, Kind, Launch, Settings, begin_args, first_control, first_records};
use crate::layout::{Layout, Storage};
use crate::optim::Optimizer;

/// The kernel of one bucket in f32, on memory of its own.
pub struct KernelAlone {
    kernels: Kernels,
    launches: Vec<(InstepStepArgs, Vec<InstepTile>)>,
    _memories: Arc<Memories>,
}

impl KernelAlone {
    /// Builds one bucket of a layout.
    ///
    /// # Errors
    /// As `StepperBuilder::host`.
    pub fn new(layout: &Layout, optimizer: &dyn Optimizer, world_size: u32, isa: Isa) -> Result<KernelAlone> {
        let plan = plan(layout, u64::MAX, world_size, Storage::default())?;
        let (kernels, constants) = (Kernels::load(isa)?, constants(world_size));
        let assignment = Assignment::uniform(layout, &plan, optimizer)?;
        let memories = Arc::new(Memories::new(&plan, (&constants, &assignment), None)?);
        let regions = memories.regions();
        // SAFETY: nothing runs on this memory yet, and control memory holds these records.
        unsafe {
            memories.write_control(first_control(&constants), first_records(&plan, regions, &assignment));
            memories.write_settings(&Settings::new(&plan, &assignment));
            kernels.begin(&begin_args(&plan, regions, &constants));
        }
        let launches = Launch::all(Kind::Step, 0, &plan, regions, (&constants, &assignment));
        let launches = launches.into_iter().map(|Launch { mut args, tiles, .. }| {
            args.tiles = tiles.as_ptr();
            (args, tiles)
        });
        Ok(KernelAlone { kernels, launches: launches.collect(), _memories: memories })
    }

    /// Runs the kernel over the whole bucket.
    pub fn step(&mut self) {
        for (args, tiles) in &self.launches {
            // SAFETY: arguments of this bucket, whose memory `&mut self` holds alone.
            unsafe { self.kernels.step(args, 0, tiles.len() as u64, 0) }
        }
    }
}
