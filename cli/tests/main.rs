//! Tests of the `instep` command, most of them through the built binary, as a shell would call it.
//!
//! The `safetensors` crate writes inputs and reads outputs, so the tests do not depend on the command's own reader and
//! writer.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod support;

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod host_run;

mod arbitrary;
mod bits;
mod checkpoints;
mod diff;
mod files;
mod golden;
mod gpu_bench;
#[cfg(target_os = "linux")]
mod gpu_bundle;
mod growth_bench;
mod host_bench;
mod info;
mod plan;
mod precision;
mod readme;
mod refusals;
mod resume;
