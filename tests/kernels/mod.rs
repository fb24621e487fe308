//! The compiled kernels: their C interface, memory accesses, traffic and machine code.
//!
//! Most of these tests call the C functions directly, without a stepper between.

pub(crate) mod bitpatterns;
mod element_numbers;
mod launcher;
pub(crate) mod machine_code;
pub(crate) mod out_of_bounds;
pub(crate) mod out_of_bounds_narrow;
mod shared_launches;
mod special;
pub(crate) mod step_options;
pub(crate) mod traffic;
