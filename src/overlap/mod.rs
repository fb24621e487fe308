//! The original systems' vocabulary on top of a stepper.
//!
//! What PyTorch's overlapped optimizers call a registry, a communication hook, an optimizer in backward. Must add no
//! schedule and touch no memory of its own: all of it is options of a stepper, or a collective around another one.

mod registry;

pub use registry::{Keywords, Registry, Resolved};
