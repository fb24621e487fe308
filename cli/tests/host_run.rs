//! Runs the GPU's kernels on the CPU, for the stand-in driver of the library's tests.
//!
//! This file has no code.

#[path = "../../tests/host_run/launch.rs"]
#[allow(dead_code)]
pub(crate) mod launch;
