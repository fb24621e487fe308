//! What only a GPU can show. Ignored unless asked for: `cargo test --features cuda --test main -- --ignored gpu::`.
//!
//! Memory and streams come straight from the driver, so that a fault of the library's cannot hide one here. Must fail,
//! and not pass, on a machine without a GPU.

mod memory;
mod nccl;
