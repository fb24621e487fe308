//! The counterpart of PyTorch's overlapped optimizers: a registry that finds optimizers by name, and hooks. A hook runs
//! after a bucket's gradients are complete, and before the bucket's fused step.
//!
//! To add a hook, wrap a communicator. A stepper uses the wrapper like any other communicator, and the schedule does
//! not change. This module never steps a parameter itself.

mod bucket;
mod calls;
mod compress;
mod hooks;
mod registry;
mod sums;

pub use bucket::{BucketSum, EnqueuedSum, GradBucket};
pub use calls::CustomCalls;
pub use compress::Compressed;
pub use hooks::Hooked;
pub use registry::{Keywords, Registry, Resolved};
pub use sums::SumHooked;
