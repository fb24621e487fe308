//! A `BucketStep` and its kernel alone, on the same memory: the difference is what the public object adds.
//!
//! It depends on the host's kernels and memory. The kernel's scalars are derived once.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use super::{constants, plan};
use crate::abi::{InstepStepArgs, InstepTile};
use crate::bucket_step::{BucketStep, Scaling, Tensor, Tensors};
use crate::error::Result;
use crate::host::Isa;
use crate::host::arena::Memories;
use crate::host::kernels::Kernels;
use crate::launch::{Assignment, Kind, Launch, Settings, begin_args, first_control, first_records};
use crate::layout::{Layout, Storage};
use crate::op::{Memory, Span};
use crate::optim::AdamW;

/// One bucket in f32 that is stepped by AdamW, by its kernel or through the public object.
pub struct Alone {
    step: BucketStep,
    scaling: Scaling,
    kernels: Kernels,
    launches: Vec<(InstepStepArgs, Vec<InstepTile>)>,
    /// Of parameters, gradients and states: one run, or one per parameter.
    addresses: [Vec<*mut c_void>; 4],
    _memories: Arc<Memories>,
}

impl Alone {
    /// Builds the bucket of so many parameters of so many elements, a multiple of 256. The public object takes one run
    /// per kind of tensor, or one per parameter if they lie apart.
    ///
    /// # Errors
    /// As `BucketStepBuilder::host`.
    pub fn new(params: usize, elements: usize, is_apart: bool, isa: Isa) -> Result<Alone> {
        const WORLD_SIZE: u32 = 8;
        let (names, optimizer) = ((0..params).map(|k| format!("p{k}")), AdamW::default());
        let layout = names.fold(Layout::builder(), |layout, name| layout.param(name, elements)).build()?;
        let plan = plan(&layout, u64::MAX, WORLD_SIZE, Storage::default())?;
        let (kernels, constants) = (Kernels::load(isa)?, constants(WORLD_SIZE));
        let assignment = Assignment::uniform(&layout, &plan, &optimizer)?;
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
        let (launches, bytes) = (launches.collect(), elements * size_of::<f32>());
        let memory = [Memory::Params, Memory::Grads, Memory::State(0), Memory::State(1)];
        let addresses = memory.map(|memory| {
            let base = memories.resolve(Span::elements(memory, &plan, 0, (params * elements) as u64));
            let runs = if is_apart { params } else { 1 };
            (0..runs).map(|k| base.wrapping_add(k * bytes).cast()).collect()
        });
        let step = BucketStep::builder(&layout, optimizer).isa(isa).host()?;
        let scaling = Scaling::mean(WORLD_SIZE);
        Ok(Alone { step, scaling, kernels, launches, addresses, _memories: memories })
    }

    /// Runs the kernel over the whole bucket.
    pub fn run_kernel(&mut self) {
        for (args, tiles) in &self.launches {
            // SAFETY: arguments of this bucket, whose memory `&mut self` holds alone.
            unsafe { self.kernels.step(args, 0, tiles.len() as u64, 0) }
        }
    }

    /// Steps the bucket through the public object.
    ///
    /// # Errors
    /// None today; those of `BucketStep::step`.
    pub fn step(&mut self) -> Result<()> {
        let [params, grads, first, second] = &self.addresses;
        let tensor = |runs: &'_ [*mut c_void]| match runs {
            // SAFETY: this bucket's own memory, which `&mut self` holds alone.
            [run] => unsafe { Tensor::at(*run) },
            // SAFETY: as above; the list lives as long as the object.
            runs => unsafe { Tensor::at_each(std::slice::from_raw_parts(runs.as_ptr(), runs.len())) },
        };
        let tensors = Tensors::new(tensor(params), tensor(grads)).states([tensor(first), tensor(second)]);
        self.step.step(&tensors, self.scaling)
    }
}
