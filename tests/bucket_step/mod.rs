//! Buckets that are stepped alone: the bits of a stepper, on anybody's memory, in any order.
//!
//! `memory.rs` holds tensors between guards, which every step must leave as they are.

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
mod norms;
#[cfg(not(kernels_only))]
mod one_launch;
#[cfg(not(kernels_only))]
mod random;
mod refusals;
mod rows;
mod scaling;
