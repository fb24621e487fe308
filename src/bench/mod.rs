//! Runs launches of single buckets without a schedule, and runs other work at the same time as steps. Benches time
//! both.
//!
//! This module is not part of the documented interface. A bench runs the same code as a user's program: `BucketStep`
//! on the host, and the device's ops on a GPU. This module must add no work to a launch.

mod gpu;
mod host;
mod load;
mod public;
mod samples;

use std::sync::Arc;

use crate::cuda::CudaDevice;
use crate::error::Result;
use crate::handle::EventHandle;
use crate::host::Isa;
use crate::host::kernels::Kernels;
use crate::host::memories::Arena;
use crate::host::stagger::Stagger;
use crate::launch::StepConstants;
use crate::layout::{BucketCaps, Layout, Plan, Storage, Tails};
use crate::stepper::Stepper;

pub use gpu::{GpuCase, GpuLauncher};
pub use host::Launcher;
pub use load::{Load, LoadKind, LoadSize, PacedReduce, Pacing};
pub use public::{Alone, Moving};
pub use samples::{MOST_BEGINS, Mark, Sample, Times, Trainer, Work};

/// Returns the event at which the clock of a stepper's ops starts, or `None` if the stepper does not record the times
/// of its ops. With this event, a bench can time the trainer's stream on the clock of the ops.
pub fn clock_zero(stepper: &Stepper<CudaDevice>) -> Option<EventHandle> {
    stepper.clock_zero()
}

/// Makes a plan without tail blocks, in which every bucket has the cap `cap_bytes`, even the first.
fn plan(layout: &Layout, cap_bytes: u64, world_size: u32, storage: Storage) -> Result<Arc<Plan>> {
    let caps = BucketCaps { first_bytes: cap_bytes, rest_bytes: cap_bytes };
    Ok(Arc::new(Plan::new(layout, world_size, caps, Tails::default(), storage)?))
}

/// Returns the constants of a step that averages gradients over `world_size` ranks, without clipping or skipping.
fn constants(world_size: u32) -> StepConstants {
    StepConstants { divisor: f64::from(world_size), ema_decay: 0.999, ..StepConstants::PLAIN }
}

const MIB: u64 = 1 << 20;

/// Four f32 arrays: a gradient, a parameter and two states. Each array starts [`Distant::DISTANCE`] bytes after the
/// previous array, plus a small offset if the arrays are staggered.
pub struct Distant {
    kernels: Kernels,
    arena: Arena,
    starts: [usize; 4],
}

impl Distant {
    /// The number of bytes from one array to the next: 2^28. AMD's way predictor hashes only the address bits below bit
    /// 28, so arrays at this distance get equal hashes.
    pub const DISTANCE: u64 = 256 * MIB;

    /// Number of elements of each array.
    pub const ELEMENTS: usize = 64 << 10;

    /// Allocates the arrays. If `staggered` is true, the arrays start at different offsets in a page, like a stepper's
    /// arrays. Otherwise all arrays start at the same offset.
    ///
    /// # Errors
    /// `Unsupported` if this CPU lacks the instruction set. `Layout` if 769 MiB of address space cannot be allocated.
    pub fn new(isa: Isa, staggered: bool) -> Result<Distant> {
        let mut stagger = Stagger::default();
        let starts = [0, 1, 2, 3].map(|k| {
            let start = if staggered { stagger.next(4 * Distant::ELEMENTS as u64) } else { 0 };
            (k * Distant::DISTANCE + start) as usize / size_of::<f32>()
        });
        let mut arena = Arena::zeroed(3 * Distant::DISTANCE + MIB, 0)?;
        for start in starts {
            arena.f32s()[start..][..Distant::ELEMENTS].fill(1.0);
        }
        Ok(Distant { kernels: Kernels::load(isa)?, arena, starts })
    }

    /// Moves as many bytes as a step with two states, but changes no value.
    pub fn stream(&mut self) {
        let ranges = self.starts.map(|start| start..start + Distant::ELEMENTS);
        if let Ok(mut arrays) = self.arena.f32s().get_disjoint_mut(ranges) {
            self.kernels.stream(&mut arrays, 0);
        }
    }
}
