//! The subcommands of `instep` as functions, which tests and the fuzzer call without a process.
//!
//! They use only the library's public interface. No input makes them panic. They never allocate more memory than the
//! length of a file justifies.

pub mod bench;
pub mod console;
pub mod diff;
pub mod environment;
mod failure;
pub mod info;
pub mod plan;
pub mod replay;

pub use failure::Failure;
