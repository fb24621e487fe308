//! Separate buckets have the bits of a stepper, in memory of any owner, in any order.
//!
//! `memory.rs` puts tensors between guards, which every step must leave unchanged.

mod bits;
mod counts;
mod frozen;
#[cfg(not(kernels_only))]
mod gpu;
mod hostile;
mod hypers;
mod marks;
mod memory;
mod missing;
mod neighbours;
mod norms;
#[cfg(not(kernels_only))]
mod one_launch;
#[cfg(not(kernels_only))]
mod random;
mod refusals;
mod rows;
mod scaling;
