//! All integration tests are in one binary, so that they share helpers and link once.
//!
//! The tests use only the public interface. This file has only the list of folders; `.ci/run` selects tests by module
//! path, such as `schedule::ordering`. `--cfg kernels_only` leaves out tests that do not depend on the compiler of the
//! kernels. `stepper` and `ranks` stay, because kernels also begin and decide passes, and sum. `--cfg threads_only`
//! leaves out the folders in which no threads meet. `--cfg gpu_only` keeps only what tests of a GPU need.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, unsafe_code)]
#![cfg_attr(any(gpu_only, kernels_only, threads_only), allow(dead_code))] // helpers of the folders that are left out

mod bucket_step;
#[cfg(not(any(gpu_only, kernels_only, threads_only)))]
mod checkpoint;
#[cfg(not(kernels_only))]
mod cuda;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod host_run;
#[cfg(not(any(gpu_only, kernels_only, threads_only)))]
mod house;
mod kernels;
#[cfg(not(gpu_only))]
mod numerics;
#[cfg(not(any(gpu_only, kernels_only, threads_only)))]
mod parity;
mod precision;
#[cfg(not(gpu_only))]
mod ranks;
#[cfg(not(kernels_only))]
mod schedule;
#[cfg(not(gpu_only))]
mod stepper;
mod support;
