//! The GPU's kernels on the CPU, for the stand-in that the library's tests share.
//!
//! This file has no code.

#[path = "../../tests/host_run/launch.rs"]
#[allow(dead_code)]
pub(crate) mod launch;
