//! What the `instep` command does, as functions: tests and the fuzzer call them without a process.
//!
//! Nothing here computes what a user of the library could not. Must never panic on input from outside, and never ask
//! for more memory than the length of a file justifies.

pub mod bench;
pub mod console;
pub mod diff;
mod failure;
pub mod info;
pub mod replay;

pub use failure::Failure;
