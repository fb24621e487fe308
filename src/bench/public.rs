//! Wraps objects of the public interface. The objects use the bench's own memory and streams.
//!
//! [`Alone`] steps the same memory in two ways: through a bucket step, and with the kernel alone. The difference
//! between the two times is the cost of the bucket step. With [`Moving`], a bench measures the cost of
//! `Stepper::rebind`. The tensors of [`Moving`] are never stepped. [`Trainer::stepper`] builds a stepper on the
//! trainer's stream.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use super::samples::Trainer;
use super::{constants, plan};
use crate::abi::{InstepStepArgs, InstepTile};
use crate::bucket_step::{BucketStep, Lent, Scaling, StepTensors};
use crate::collective::Sums;
use crate::cuda::{CapturedPass, Cuda, CudaDevice};
use crate::error::Result;
use crate::host::kernels::Kernels;
use crate::host::memories::Memories;
use crate::host::{Isa, Solo};
use crate::launch::{Assignment, Kind, Launch, Settings, begin_args, first_control, first_records};
use crate::layout::{ForeignBucket, Layout, Storage};
use crate::op::{Memory, Span};
use crate::optim::AdamW;
use crate::stepper::{Borrowed, Stepper, StepperBuilder};

/// One f32 bucket with AdamW. A bench steps the bucket either with the kernel alone or through a [`BucketStep`].
pub struct Alone {
    step: BucketStep,
    scaling: Scaling,
    kernels: Kernels,
    launches: Vec<(InstepStepArgs, Vec<InstepTile>)>,
    /// Start addresses of the parameters, the gradients and the two states. Each list has one address for the whole
    /// bucket, or one for each parameter.
    addresses: [Vec<*mut c_void>; 4],
    _memories: Arc<Memories>,
}

impl Alone {
    /// Builds a bucket of `params` parameters. Each parameter has `elements` elements, a multiple of 256. With
    /// `is_apart`, the [`BucketStep`] gets one address for each tensor. Otherwise it gets one address for each kind of
    /// tensor.
    ///
    /// # Errors
    /// Errors as for `BucketStepBuilder::host`.
    pub fn new(params: usize, elements: usize, is_apart: bool, isa: Isa) -> Result<Alone> {
        const WORLD_SIZE: u32 = 8;
        let (names, optimizer) = ((0..params).map(|k| format!("p{k}")), AdamW::default());
        let layout = names.fold(Layout::builder(), |layout, name| layout.param(name, elements)).build()?;
        let plan = plan(&layout, u64::MAX, WORLD_SIZE, Storage::default())?;
        let (kernels, constants) = (Kernels::load(isa)?, constants(WORLD_SIZE));
        let assignment = Assignment::uniform(&layout, &plan, constants, &optimizer)?;
        let memories = Arc::new(Memories::new(&plan, &assignment, None, None)?);
        let regions = memories.regions();
        // SAFETY: nothing runs on this memory yet, and control memory holds these records.
        unsafe {
            memories.write_control(first_control(&constants), first_records(&plan, regions, &assignment));
            memories.write_settings(&Settings::new(&plan, &assignment));
            kernels.begin(&begin_args(regions, &constants));
        }
        let launches = Launch::all(Kind::Step, 0, &plan, regions, &assignment);
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

    /// Steps the bucket with the kernel alone.
    pub fn run_kernel(&mut self) {
        for (args, tiles) in &self.launches {
            // SAFETY: the arguments are of this bucket, and only `&mut self` reaches the bucket's memory.
            unsafe { self.kernels.step(args, std::ptr::null(), 0, tiles.len() as u64, 0) }
        }
    }

    /// Steps the bucket through the [`BucketStep`].
    ///
    /// # Errors
    /// Errors as for `BucketStep::step`. No error is possible today.
    pub fn step(&mut self) -> Result<()> {
        let [params, grads, first, second] = &self.addresses;
        let tensor = |runs: &'_ [*mut c_void]| match runs {
            // SAFETY: this is the bucket's own memory, which only `&mut self` reaches.
            [run] => unsafe { Lent::at(*run) },
            // SAFETY: this is the bucket's own memory, which only `&mut self` reaches. The list lives as long as the
            // object.
            runs => unsafe { Lent::at_each(std::slice::from_raw_parts(runs.as_ptr(), runs.len())) },
        };
        let tensors = StepTensors::new(tensor(params), tensor(grads)).states([tensor(first), tensor(second)]);
        self.step.step(&tensors, self.scaling)
    }
}

/// A stepper on borrowed tensors that all move between two places in memory.
pub struct Moving {
    /// This is the first field, so that the stepper is dropped before the tensors.
    stepper: Stepper,
    layout: Layout,
    in_bucket: usize,
    /// The parameters and the gradients in each of the two places.
    tensors: [[Vec<f32>; 2]; 2],
    side: usize,
}

impl Moving {
    /// Builds an AdamW stepper with buckets of `in_bucket` parameters and one kernel thread.
    ///
    /// # Errors
    /// Errors as for `StepperBuilder::host_borrowing`.
    pub fn new(layout: &Layout, in_bucket: usize) -> Result<Moving> {
        let elements = layout.ids().map(|id| layout.parameter(id).map(|parameter| parameter.len as usize));
        let elements = elements.sum::<Result<usize>>()?;
        let mut tensors = [(); 2].map(|()| [(); 2].map(|()| vec![0.0f32; elements]));
        let builder = Stepper::builder(layout, AdamW::default()).threads(1);
        let memory = lend(layout, in_bucket, &mut tensors[0])?;
        // SAFETY: the stepper is dropped before the tensors, and no other code touches the tensors that it borrows.
        let stepper = unsafe { builder.host_borrowing(Solo::default(), memory)? };
        Ok(Moving { stepper, layout: layout.clone(), in_bucket, tensors, side: 0 })
    }

    /// Rebinds the stepper to the tensors in the other place.
    ///
    /// # Errors
    /// Errors as for `Stepper::rebind`.
    pub fn move_all(&mut self) -> Result<()> {
        self.side = 1 - self.side;
        let memory = lend(&self.layout, self.in_bucket, &mut self.tensors[self.side])?;
        // SAFETY: only the stepper touches the tensors that it borrows, and both places hold zeros.
        unsafe { self.stepper.rebind(memory).map(drop) }
    }
}

fn lend(layout: &Layout, in_bucket: usize, [params, grads]: &mut [Vec<f32>; 2]) -> Result<Borrowed> {
    let (mut memory, mut first) = (Borrowed::new(), 0);
    let ids: Vec<_> = layout.ids().collect();
    for of_bucket in ids.chunks(in_bucket) {
        let (mut gradients, mut len) = (Vec::with_capacity(of_bucket.len()), 0);
        for id in of_bucket {
            memory = memory.param(*id, params.as_mut_ptr().wrapping_add(first + len));
            gradients.push((*id, len));
            len += layout.parameter(*id)?.len as usize;
        }
        let bucket = gradients.into_iter().fold(ForeignBucket::new(len), |b, (id, at)| b.gradient(id, at));
        memory = memory.bucket(bucket, grads.as_mut_ptr().wrapping_add(first));
        first += len;
    }
    Ok(memory)
}

impl Trainer {
    /// Builds a stepper on the trainer's stream. The stepper's steps use at most `max_blocks` thread blocks.
    ///
    /// # Errors
    /// Errors as for `StepperBuilder::cuda`.
    pub fn stepper(
        &self,
        builder: StepperBuilder<'_>,
        sums: impl Into<Sums>,
        max_blocks: Option<u32>,
    ) -> Result<Stepper<CudaDevice>> {
        let cuda = Cuda { max_blocks, ..self.cuda().clone() };
        // SAFETY: the stream is never destroyed.
        unsafe { builder.cuda(sums, &cuda) }
    }

    /// Replays a captured pass that contains no work of the trainer.
    ///
    /// # Errors
    /// Errors as for `Stepper::replay`.
    pub fn replay(&self, stepper: &mut Stepper<CudaDevice>, captured: &CapturedPass) -> Result<()> {
        // SAFETY: the capture is of the stepper's own work on the stepper's own memory.
        unsafe { stepper.replay(captured) }
    }
}
