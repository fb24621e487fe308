//! Tests that need a GPU, ignored by default: `cargo test --features cuda --test main -- --ignored cuda::gpu::`.
//!
//! benches/gpu/run.sh runs all of them except `calls` and `events`, which need the software GPU; tests that also run on
//! the stand-in are in the parent folder. The tests take memory directly from the driver where possible, so that a
//! fault of the library cannot hide. Without a GPU these tests fail.

mod calls;
mod captures;
mod conversions;
#[cfg(feature = "cuda")]
mod cudarc;
mod doors;
mod events;
mod large;
mod memory;
mod nccl;
mod shards;
