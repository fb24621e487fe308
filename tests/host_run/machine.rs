//! A pass runs on one of these machines: the library's CPU functions, the GPU's kernels as fibers, or the GPU's kernels
//! with the naive kernel as their step.
//!
//! The launches are those of a device: norm and step have one block per tile or fewer, and work that happens once has
//! one block, with some idle blocks.

use std::ffi::{CStr, CString};

use instep::Isa;
use instep::abi::*;

use super::launch::launch;
use super::naive;
use crate::support::entries;

/// The row of an optimizer is its number.
const OPTIMIZERS: &str = include_str!("../../kernels/optimizers.def");

#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// The largest number of blocks, as `max_ctas` sets it; it may be more than there is work for.
    pub blocks: u32,
    /// The order of blocks, and of the threads in each: 0 is forward, 1 backward, 2 shuffled.
    pub order: u32,
}

/// One block per tile and two idle blocks, in every order; and limits under which a block takes several tiles.
pub(crate) const SHAPES: [Shape; 5] = [
    Shape { blocks: u32::MAX, order: 0 },
    Shape { blocks: u32::MAX, order: 1 },
    Shape { blocks: u32::MAX, order: 2 },
    Shape { blocks: 3, order: 2 },
    Shape { blocks: 1, order: 1 },
];

#[derive(Clone, Copy, Debug)]
pub(crate) enum Machine {
    Cpu,
    Gpu(Shape),
    /// The GPU, but the naive kernel makes each step. Its launches have a separate shape.
    Naive(Shape),
}

impl Machine {
    /// Returns the owner of expected values, for the message of a difference.
    pub(crate) fn owner(self) -> &'static str {
        match self {
            Machine::Cpu => "the CPU",
            Machine::Gpu(_) => "the GPU's kernel",
            Machine::Naive(_) => "the naive kernel",
        }
    }
}

/// All methods require that the arguments' pointers lead to memory of the length that they say. Nothing else uses this
/// memory meanwhile.
impl Machine {
    pub(crate) unsafe fn begin(self, args: &InstepBeginArgs) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Machine::Cpu => cpu().begin.unwrap()(args),
                Machine::Gpu(Shape { blocks, order }) | Machine::Naive(Shape { blocks, order }) => {
                    launch(c"instep_begin", args, blocks.min(3), INSTEP_GPU_THREADS, order);
                }
            }
        }
    }

    pub(crate) unsafe fn norm(self, args: &InstepStepArgs) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Machine::Cpu => cpu().norm.unwrap()(args, std::ptr::null(), 0, args.tile_count),
                Machine::Gpu(shape) | Machine::Naive(shape) => launch_tiles(c"instep_norm", args, shape),
            }
        }
    }

    pub(crate) unsafe fn decide(self, args: &InstepDecideArgs) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Machine::Cpu => cpu().decide.unwrap()(args),
                Machine::Gpu(Shape { order, .. }) | Machine::Naive(Shape { order, .. }) => {
                    launch(c"instep_decide", args, 1, 32, order);
                }
            }
        }
    }

    pub(crate) unsafe fn step(self, args: &InstepStepArgs) {
        let mut rows = OPTIMIZERS.lines().filter_map(|line| line.strip_prefix("OPTIMIZER("));
        let (name, _) = rows.nth(args.optimizer as usize).unwrap().split_once(',').unwrap();
        let moments = if args.moments == INSTEP_MOMENTS_8BIT { "_8bit" } else { "" };
        let kernel = CString::new(format!("instep_step_{name}{moments}")).unwrap();
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Machine::Cpu => cpu().step.unwrap()(args, std::ptr::null(), 0, args.tile_count, 0),
                Machine::Gpu(shape) => launch_tiles(&kernel, args, shape),
                Machine::Naive(shape) => {
                    let measure = || launch_tiles(&kernel, args, shape);
                    naive::step(
                        &CString::new(format!("instep_naive_{name}")).unwrap(),
                        args,
                        shape.order,
                        measure,
                    );
                }
            }
        }
    }

    /// The CPU has no ring, so the test computes the expected slot from the control block.
    pub(crate) unsafe fn publish(self, args: &InstepPublishArgs) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Machine::Cpu => {
                    let control = &*args.control;
                    *args.ring.add((control.passes % args.slot_count) as usize) = InstepStatus {
                        sequence: control.passes,
                        norm: control.norm,
                        clip: control.clip,
                        loss_scale: control.loss_scale,
                        decided: control.decided,
                        skipped: control.skip,
                        first_nonfinite_bucket: control.first_nonfinite_bucket,
                        reserved: [0; 5],
                    };
                }
                Machine::Gpu(Shape { order, .. }) | Machine::Naive(Shape { order, .. }) => {
                    launch(c"instep_publish", args, 1, 32, order);
                }
            }
        }
    }
}

fn cpu() -> &'static InstepKernels {
    entries::kernels(Isa::Baseline)
}

unsafe fn launch_tiles(kernel: &CStr, args: &InstepStepArgs, shape: Shape) {
    let blocks = shape.blocks.min(args.tile_count as u32 + 2);
    let args = InstepStepArgs { share: args.tile_count.div_ceil(blocks.into()), ..*args };
    // SAFETY: the caller's promise. A norm takes the first field alone; zeros are records.
    unsafe {
        let args = InstepStepLaunch { args, given: std::mem::zeroed() };
        launch(kernel, &args, blocks, INSTEP_GPU_THREADS, shape.order)
    }
}
