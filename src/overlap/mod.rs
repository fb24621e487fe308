//! The counterpart of PyTorch's overlapped optimizers: optimizers by name, and hooks that run between a bucket's
//! gradients and its fused step.
//!
//! A hook is a communicator that wraps another one. A stepper uses a hook like any other communicator, and the schedule
//! does not change. This module never steps a parameter itself.

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
