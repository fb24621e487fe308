//! Buckets that are stepped alone: the bits of a stepper, on anybody's memory, in any order.

mod bits;
mod memory;
mod norms;
mod refusals;
mod scaling;
