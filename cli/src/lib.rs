//! The subcommands of `instep`, as functions. Tests and the fuzzer call these functions without starting a process.
//!
//! The functions use only the library's public interface. No input makes them panic. For a short file, the functions
//! never allocate much memory.

pub mod bench;
pub mod console;
pub mod diff;
pub mod environment;
mod failure;
pub mod info;
pub mod plan;
pub mod replay;

pub use failure::Failure;
