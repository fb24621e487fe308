//! The interpreter through its public interface: launches of small texts, and planted faults.
//!
//! None of these tests needs a compiler of kernels.
#![allow(clippy::unwrap_used)] // a test may panic

mod accesses;
mod arena;
mod expected;
mod faults;
mod forms;
mod launches;
mod matrix;
