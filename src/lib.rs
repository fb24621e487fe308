//! Fused optimizer steps over whole gradient buckets, in step with backward.
//!
//! A [`Layout`] names the parameters; a [`Stepper`] owns them, their gradients and the optimizer's state in flat
//! buckets. Inside a [`Pass`] the trainer reads parameters, writes gradients and hands them over; a complete bucket is
//! summed over ranks and stepped in one fused pass over its bytes, beside the rest of backward.
//!
#![doc = include_str!("../README.md")]

#[doc(hidden)]
pub mod abi;
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
pub mod timeline;

pub use error::{Error, Result};
pub use host::{HostDevice, InProcess, Isa, Solo, in_process};
pub use layout::{Layout, LayoutBuilder, ParamId, SegmentAction};
pub use op::Collective;
pub use optim::{Adam, AdamW, Optimizer, Sgd};
pub use pool::Pool;
pub use schedule::Mode;
pub use stepper::{
    Abandoned, Grads, Params, ParamsMut, Pass, Recording, Status, Stepper, StepperBuilder, Unused,
};
