//! NCCL without a GPU: programs load it as `libnccl.so.2`; ranks are processes that meet in shared memory.
//!
//! It is harder than the real one. A call of a communicator that does not block stays in progress for some looks, and
//! its work is on the stream only after the last of them; calls of a group are sorted by size. Sums are in rank order, so every rank gets the same bits.

#[rustfmt::skip]
mod header;

mod communicator;
mod driver;
mod exports;
mod group;
mod pieces;
mod prototypes;
mod settings;
mod shared;
mod sums;
mod transfer;
