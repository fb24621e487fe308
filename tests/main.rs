//! All integration tests in one binary, so that they share helpers and link once.
//!
//! Everything goes through the public interface. This file holds only the list of folders; `.ci/run` selects tests by
//! module path, as in `schedule::ordering`.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, unsafe_code)]

mod checkpoint;
mod cuda;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod host_run;
mod house;
mod kernels;
mod numerics;
mod parity;
mod precision;
mod ranks;
mod schedule;
mod stepper;
mod support;
