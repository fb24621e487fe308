//! The GPU's kernels on the CPU, for the stand-in that the library's tests share.
//!
//! Must hold nothing of its own.

#[path = "../../tests/host_run/launch.rs"]
#[allow(dead_code)]
pub(crate) mod launch;
