//! One bucket's launch without a schedule, and the work beside a step, for benches to time.
//!
//! Not part of the documented interface. A bench runs what a user runs: `BucketStep` on the host, a device's own ops on a
//! GPU. This file must add nothing to a launch.

mod distant;
mod gpu;
mod host;
mod load;
mod public;
mod samples;
mod trainer;

pub use distant::Distant;
pub use gpu::{GpuCase, GpuLauncher};
pub use host::Launcher;
pub use load::{Load, LoadKind, LoadSize, PacedReduce, Pacing};
pub use public::{Alone, Moving};
pub use samples::{MOST_BEGINS, Sample, Work};
pub use trainer::{Mark, Times, Trainer};

use std::sync::Arc;

use crate::cuda::CudaDevice;
use crate::error::Result;
use crate::handle::EventHandle;
use crate::launch::StepConstants;
use crate::layout::{BucketCaps, Layout, Plan, Storage, Tails};
use crate::stepper::Stepper;

/// Returns the event at which the times of a stepper's recorded ops are zero, if it records: a bench times the trainer's own
/// stream by the same clock.
pub fn clock_zero(stepper: &Stepper<CudaDevice>) -> Option<EventHandle> {
    stepper.clock_zero()
}

/// Buckets of `cap_bytes`, the first one included, without tails.
fn plan(layout: &Layout, cap_bytes: u64, world_size: u32, storage: Storage) -> Result<Arc<Plan>> {
    let caps = BucketCaps { first_bytes: cap_bytes, rest_bytes: cap_bytes };
    Ok(Arc::new(Plan::new(layout, world_size, caps, Tails::default(), storage)?))
}

/// A step that takes the mean over `world_size` ranks and does nothing else on the way.
fn constants(world_size: u32) -> StepConstants {
    StepConstants { divisor: f64::from(world_size), ema_decay: 0.999, ..StepConstants::PLAIN }
}
