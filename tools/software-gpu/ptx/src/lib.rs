//! Runs the kernels of a PTX text on the CPU, in warps of 32 lanes, and reports faults that a GPU would not report.
//!
//! A [`Module`] is decoded once; [`Kernel::launch`] runs a grid over a [`Memory`] of the caller. An instruction that
//! this crate does not know is refused by name when the text is parsed, never skipped.

mod decode;
mod error;
mod memory;
mod module;
mod run;
mod syntax;

pub use decode::forms;
pub use error::{Error, Fault, What};
pub use memory::{Memory, Refusal};
pub use module::{Kernel, Module, Param, Space, Variable};
pub use run::{Launch, Tally};
