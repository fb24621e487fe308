//! The CPU device: streams as threads, SIMD kernels on a shared pool, ranks in one process.
//!
//! CPU training, offloaded steps and every test use this device. The device executes ops and does not depend on modes:
//! `schedule` decides which ops may overlap, and `hazard` proves that the overlap is safe.
#![allow(unsafe_code)]

pub(crate) mod bucket_job;
mod cast;
mod custom;
#[cfg(all(test, shuttle))]
#[path = "../../tests/interleavings/mod.rs"]
mod interleavings;
pub(crate) mod kernels;
pub(crate) mod memories;
#[cfg(feature = "mpi")]
mod mpi;
mod ranks;
mod rendezvous;
pub(crate) mod runner;
pub(crate) mod stagger;
pub(crate) mod streams;

pub use cast::cast;
pub use kernels::Isa;
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
pub use ranks::{InProcess, Solo, in_process};

use std::sync::{Arc, LazyLock};
use std::time::Instant;

use crate::abi::{InstepControl, InstepStatus};
use crate::device::{Claimed, Device, Executor};
use crate::error::Result;
use crate::handle::Place;
use crate::launch::{Assignment, BorrowedPieces, Progress, Settings, without_bucket};
use crate::layout::Plan;
use crate::op::{Memory, Op, Span, Ticket, TimedOp, Words};
use memories::Memories;
use runner::{AwaitedSum, Parts, Runner};
use streams::Streams;

/// The origin of measured times. All ranks of a process measure times from this origin, so one diagram can show the
/// times of several ranks.
static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// One rank's CPU device.
pub struct HostDevice {
    streams: Arc<Streams<Runner>>,
    memories: Arc<Memories>,
    isa: Isa,
    started: bool,
}

impl HostDevice {
    /// # Errors
    /// `Config` if `INSTEP_PREFETCH` is neither `on` nor `off`.
    pub(crate) fn new(parts: Parts, timed: bool, is_inline: bool) -> Result<Self> {
        let (memories, isa) = (Arc::clone(&parts.memories), parts.kernels.isa());
        let streams = Streams::new(Runner::new(parts)?, *ORIGIN, timed, is_inline);
        Ok(HostDevice { streams, memories, isa, started: false })
    }

    pub(crate) fn isa(&self) -> Isa {
        self.isa
    }
}

impl Executor for HostDevice {
    const TRAINER_IS_A_STREAM: bool = false;

    type Sum = AwaitedSum;

    fn place(&self) -> Place {
        Place::Host
    }

    fn resolve(&self, span: Span) -> *mut u8 {
        self.memories.resolve(span)
    }

    fn sizes(&self) -> Vec<(Memory, u64)> {
        self.memories.regions().sizes().collect()
    }

    fn write_settings(&mut self, settings: &Settings, _: Claimed) {
        // SAFETY: by `Claimed`, no op that touches this memory runs.
        unsafe { self.memories.write_settings(settings) }
    }

    fn write_progress(&mut self, record: usize, progress: Progress, _: Claimed) -> Result<()> {
        // SAFETY: by `Claimed`, no op that touches this memory runs.
        unsafe { self.memories.write_progress(record, progress) };
        Ok(())
    }

    fn read_progress(&mut self, record: usize, _: Claimed) -> Result<Progress> {
        // SAFETY: by `Claimed`, no op that touches this memory runs.
        Ok(Progress::of(&unsafe { self.memories.read_record(record) }))
    }

    fn read_control(&mut self, _: Claimed) -> Result<InstepControl> {
        // SAFETY: by `Claimed`, no op that touches this memory runs.
        Ok(unsafe { self.memories.read_control() })
    }

    fn is_partly_gathered(&self, bucket: u32) -> bool {
        self.streams.executor().is_partly_gathered(bucket)
    }

    fn latest(&self) -> Option<InstepStatus> {
        self.memories.latest()
    }

    fn read(&mut self, span: Span, into: &mut [u8], _: Claimed) -> Result<()> {
        // SAFETY: by `Claimed`, no op that touches this memory runs.
        unsafe { self.memories.read(span, into) };
        Ok(())
    }

    fn write(&mut self, span: Span, from: &[u8], _: Claimed) -> Result<()> {
        // SAFETY: by `Claimed`, no op that touches this memory runs.
        unsafe { self.memories.write(span, from) };
        Ok(())
    }

    fn rebind(&mut self, pieces: BorrowedPieces, _: Claimed) -> Result<()> {
        // SAFETY: by `Claimed`, no op that touches this memory runs.
        unsafe { self.streams.executor().rebind(pieces) };
        Ok(())
    }

    fn rebuilt(
        &mut self,
        plan: &Arc<Plan>,
        assignment: &Arc<Assignment>,
        borrowed: Option<BorrowedPieces>,
        words: &Arc<Words>,
        _: Claimed,
    ) -> Result<Self> {
        let parts = self.streams.executor().parts_for(plan, assignment, borrowed, words)?;
        let device = HostDevice::new(parts, self.streams.is_timed(), self.streams.is_inline())?;
        // SAFETY: by `Claimed`, no op touches our memory. Nothing has been submitted to the new device.
        unsafe {
            device.memories.write_control_block(without_bucket(self.memories.read_control()));
        }
        device.memories.set_latest(self.memories.latest());
        Ok(device)
    }

    fn take_timed_ops(&mut self) -> Result<Vec<TimedOp>> {
        Ok(self.streams.take_timed_ops())
    }
}

impl Device for HostDevice {
    fn submit(&mut self, ops: &[Op], sum: Option<AwaitedSum>) {
        if !self.started {
            // Threads start at the first submission. A process that forks before its first pass would lose threads that
            // were started earlier.
            self.started = true;
            self.streams.start();
        }
        sum.into_iter().for_each(|sum| self.streams.executor().expect_sum(sum));
        self.streams.submit(ops);
    }

    fn wait(&mut self, ticket: Ticket) -> Result<()> {
        self.streams.wait(ticket)
    }

    fn end(&mut self) -> Result<()> {
        self.streams.end();
        Ok(())
    }

    fn now_ns(&self) -> u64 {
        self.streams.now_ns()
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        if self.memories.are_borrowed() {
            // The caller may free borrowed memory as soon as this function returns.
            self.streams.end();
        }
        self.streams.close();
    }
}
