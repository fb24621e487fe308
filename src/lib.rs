//! Fused optimizer steps over whole gradient buckets, in step with backward.
//!
//! A [`Layout`] names the parameters; a [`Stepper`] owns them, their gradients and the optimizer's state in flat
//! buckets. Inside a [`Pass`] the trainer reads parameters, writes gradients and hands them over; a complete bucket is
//! summed over the ranks of a [`Collective`] and stepped in one launch, beside the rest of backward. The README has a
//! whole program.
//!
//! Trainers need what stands at the crate's root. The modules are for tools that look inside: [`layout`] (where a
//! parameter lies), [`op`] and [`schedule`] (what runs when), [`hazard`] (the proof that nothing races), [`timeline`]
//! (when it ran).

#[doc(hidden)]
pub mod abi;
#[doc(hidden)]
pub mod bench;
pub mod dtype;
mod error;
pub mod hazard;
mod host;
pub mod layout;
pub mod op;
pub mod optim;
mod pool;
pub mod schedule;
mod stepper;
mod sync;
pub mod timeline;

pub use error::{Error, Result};
pub use host::{HostDevice, InProcess, Isa, Solo, in_process};
pub use layout::{Layout, LayoutBuilder, ParamId, SegmentAction};
pub use op::Collective;
pub use optim::{Adam, AdamW, Optimizer, Sgd};
pub use pool::Pool;
pub use schedule::Mode;
pub use stepper::{
    Abandoned, Borrowed, Divisor, Grads, Params, ParamsMut, Pass, Recording, Status, Stepper, StepperBuilder,
    Unused,
};

/// Runs the README's example as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
