//! The CPU device: streams as threads, SIMD kernels on a shared pool, ranks in one process.
//!
//! A product, not a mock: laptops, CPU-offloaded steps and every test run on it. It executes ops and knows nothing of
//! modes; what may overlap is decided in `schedule` and proven by `hazard`.

pub(crate) mod arena;
pub(crate) mod execute;
#[cfg(all(test, shuttle))]
mod interleavings;
pub(crate) mod kernels;
mod ranks;
mod rendezvous;
mod solo;
mod streams;

pub use kernels::Isa;
pub use ranks::{InProcess, in_process};
pub use solo::Solo;

use std::sync::{Arc, LazyLock};
use std::time::Instant;

use crate::error::Result;
use crate::op::{Device, Op, Sealed, Ticket};
use crate::timeline::Ran;
use arena::Memories;
use execute::{Executor, Parts};
use streams::Streams;

/// Zero of measured times. One for the process, so that those of its ranks stand side by side in one picture.
static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// One rank's CPU device.
pub struct HostDevice {
    streams: Arc<Streams>,
    memories: Arc<Memories>,
    started: bool,
}

impl HostDevice {
    pub(crate) fn new(parts: Parts, timed: bool) -> Self {
        let memories = Arc::clone(&parts.memories);
        HostDevice { streams: Streams::new(Executor::new(parts), *ORIGIN, timed), memories, started: false }
    }

    pub(crate) fn memories(&self) -> &Memories {
        &self.memories
    }

    pub(crate) fn take_ran(&self) -> Vec<Ran> {
        self.streams.take_ran()
    }
}

impl Sealed for HostDevice {}

impl Device for HostDevice {
    fn submit(&mut self, ops: &[Op]) {
        if !self.started {
            // Not earlier: a process that forks before its first pass must not lose these threads.
            self.started = true;
            self.streams.start();
        }
        self.streams.submit(ops);
    }

    fn wait(&mut self, ticket: Ticket) -> Result<()> {
        self.streams.wait(ticket)
    }

    fn end(&mut self) {
        self.streams.end();
    }

    fn now_ns(&self) -> u64 {
        self.streams.now_ns()
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        if self.memories.are_borrowed() {
            // The caller may free its memory as soon as this returns.
            self.streams.end();
        }
        self.streams.close();
    }
}
