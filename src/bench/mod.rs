//! One bucket's launch without a schedule, and the work beside a step, for benches to time.
//!
//! Not part of the documented interface. A bench runs what a user runs: `BucketStep` on the host, a device's own ops on a
//! GPU. This file must add nothing to a launch.

mod alone;
mod distant;
mod gpu;
mod host;
mod load;
mod samples;
mod trainer;

pub use alone::Alone;
pub use distant::Distant;
pub use gpu::{GpuCase, GpuLauncher};
pub use host::Launcher;
pub use load::{Load, LoadKind, LoadSize, PacedReduce, Pacing};
pub use samples::{MOST_BEGINS, Sample, Work};
pub use trainer::{Mark, Times, Trainer};

use std::sync::Arc;

use crate::error::Result;
use crate::launch::StepConstants;
use crate::layout::{BucketCaps, Layout, Plan, Storage, Tails};
use crate::op::{Action, Frozen, Memory, Op, Part, Stream};

/// Buckets of `cap_bytes`, the first one included, without tails.
fn plan(layout: &Layout, cap_bytes: u64, world_size: u32, storage: Storage) -> Result<Arc<Plan>> {
    let caps = BucketCaps { first_bytes: cap_bytes, rest_bytes: cap_bytes };
    Ok(Arc::new(Plan::new(layout, world_size, caps, Tails::default(), storage)?))
}

/// A step that takes the mean over `world_size` ranks and does nothing else on the way.
fn constants(world_size: u32) -> StepConstants {
    StepConstants { divisor: f64::from(world_size), ema_decay: 0.999, ..StepConstants::PLAIN }
}

/// Bytes that one step of a bucket reads and writes, by the accesses that the checker judges.
fn step_bytes(plan: &Plan, states: usize, parts: &[Part], bucket: u32) -> u64 {
    let mut bytes = 0;
    let op = Op { stream: Stream::Optim, action: Action::Step { bucket } };
    op.accesses(plan, states, &Frozen::default(), &mut |access| {
        if access.span.memory != Memory::Control {
            bytes += parts.iter().map(|part| access.moved_bytes(plan, *part)).sum::<u64>();
        }
    });
    bytes
}
