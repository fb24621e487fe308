//! What only a GPU can show. Ignored unless asked for: `cargo test --features cuda --test main -- --ignored cuda::gpu::`.
//!
//! benches/gpu/run.sh runs all of it; what runs on a stand-in too is in the files beside this
//! folder. Where it can, memory comes straight from the driver, so that a fault of the library's cannot hide one here.
//! Must fail, and not pass, on a machine without a GPU.

mod conversions;
mod large;
mod memory;
mod nccl;
