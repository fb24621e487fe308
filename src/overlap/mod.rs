//! The original systems' vocabulary on top of the stepper: optimizers by name, and what stands between a bucket's
//! gradients and its fused step.
//!
//! A hook is a communicator around another one, so a stepper takes it like any other and schedules nothing anew. This
//! file must never step a parameter itself.

mod bucket;
mod calls;
mod compress;
mod hooks;
mod registry;
mod sums;

pub use bucket::GradBucket;
pub use bucket::{BucketSum, EnqueuedSum};
pub use calls::CustomCalls;
pub use compress::Compressed;
pub use hooks::Hooked;
pub use registry::{Keywords, Registry, Resolved};
pub use sums::SumHooked;
