//! Steps that the host runs for a GPU. Each op that the host runs is enqueued on its stream as a host function.
//!
//! The driver calls these functions on a separate thread. On that thread, the host device's runner runs the op, so
//! results have the same bits as on the host device. Events order these functions with copies, collectives and kernels.
//! The driver's thread must not make driver calls, so it only stores a failure. The trainer's thread finds the failure
//! at its next call. (`cuLaunchHostFunc`; Ren et al., USENIX ATC 2021, "ZeRO-Offload".)
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::driver::Driver;
use super::pinned::{SLOTS, SettingsRing};
use crate::collective::{Comms, NoCalls};
use crate::error::{Error, Result};
use crate::handle::StreamHandle;
use crate::host::kernels::Kernels;
use crate::host::memories::Memories;
use crate::host::runner::{Parts, Runner};
use crate::host::streams::{Run, caught};
use crate::launch::{Assignment, Regions};
use crate::layout::Plan;
use crate::op::{Action, Op, Phase};
use crate::pool::Pool;

/// The kernels and threads of the host's steps.
pub(crate) struct HostSide {
    pub(crate) kernels: Kernels,
    pub(crate) pool: Pool,
    pub(crate) is_pinned: bool,
}

pub(super) struct HostSteps {
    /// Whether the memory that is copied to or from the GPU is page-locked.
    pub(super) is_pinned: bool,
    shared: Arc<Shared>,
    /// The calls that were enqueued. The calls live as long as the device, because a graph may repeat a call at any
    /// time.
    calls: HashMap<Action, Arc<HostCall>>,
}

struct HostCall {
    shared: Arc<Shared>,
    op: Op,
}

struct Shared {
    runner: Runner,
    memories: Arc<Memories>,
    /// The first slot of the ring of settings (`pinned.rs`).
    first_slot: *const u32,
    slot_words: usize,
    /// Number of Begins so far. This number selects the slot.
    begun: AtomicU64,
    failed: Mutex<Option<(Op, Error)>>,
    is_busy: AtomicBool,
}

// SAFETY: the slots outlive the device's calls, and the trainer's thread writes no slot that a Begin must still read.
unsafe impl Send for Shared {}
// SAFETY: a Begin only reads its slot, and no thread writes the slot until then. All other fields are `Sync`.
unsafe impl Sync for Shared {}

impl HostSteps {
    /// Makes the runner, which writes the initial control memory and settings.
    pub(super) fn new(
        side: HostSide,
        regions: &Regions,
        (plan, assignment): (&Arc<Plan>, &Arc<Assignment>),
        comms: &Comms,
        settings: &SettingsRing,
    ) -> Result<HostSteps> {
        let memories = Arc::new(Memories::at(regions.clone()));
        // The runner does not get the device's communicators. If the device hangs, its drop leaks the runner, which
        // would keep them alive.
        let no_calls =
            NoCalls { rank: comms.world.rank(), world_size: comms.world.world_size(), supports_all: false };
        let parts = Parts {
            plan: Arc::clone(plan),
            memories: Arc::clone(&memories),
            assignment: Arc::clone(assignment),
            kernels: side.kernels,
            pool: side.pool,
            comms: Comms::new(Arc::new(no_calls), Duration::ZERO, Arc::clone(&comms.words)),
        };
        let shared = Shared {
            runner: Runner::new(parts)?,
            memories,
            first_slot: settings.ring.host().as_ptr().cast_const().cast(),
            slot_words: settings.words.len(),
            begun: AtomicU64::new(0),
            failed: Mutex::new(None),
            is_busy: AtomicBool::new(false),
        };
        Ok(HostSteps { is_pinned: side.is_pinned, shared: Arc::new(shared), calls: HashMap::new() })
    }

    /// Returns whether the host runs an op of this plan.
    pub(super) fn runs(&self, op: &Op, plan: &Plan) -> bool {
        match op.action {
            Action::Control(_)
            | Action::Norm { .. }
            | Action::Measure { .. }
            | Action::Step { .. }
            | Action::Leave { .. } => true,
            Action::Zero(span) | Action::Count(span) | Action::Release(span) => {
                span.memory.is_offloaded(plan)
            }
            Action::Wait(_)
            | Action::Record(_)
            | Action::AwaitSum { .. }
            | Action::Collective { .. }
            | Action::Copy { .. }
            | Action::Add { .. } => false,
        }
    }

    pub(super) fn enqueue(&mut self, driver: &dyn Driver, op: &Op, stream: StreamHandle) -> Result<()> {
        let shared = &self.shared;
        let call = self
            .calls
            .entry(op.action)
            .or_insert_with(|| Arc::new(HostCall { shared: Arc::clone(shared), op: *op }));
        let argument = Arc::as_ptr(call);
        // SAFETY: the call stays at its address until the device is dropped while the GPU is idle, or forever. It uses
        // only the host's memory, which lives equally long, and makes no driver call.
        unsafe { driver.call_host(run, argument.cast_mut().cast(), stream) }
    }

    pub(super) fn failed(&self) -> Option<(Op, Error)> {
        self.shared.failed()
    }

    /// Returns whether the host is running an op. While the host runs an op, the GPU may be waiting for the host, not
    /// for other ranks.
    pub(super) fn is_busy(&self) -> bool {
        self.shared.is_busy.load(Ordering::Relaxed)
    }

    pub(super) fn memories(&self) -> &Memories {
        &self.shared.memories
    }
}

impl Shared {
    fn failed(&self) -> Option<(Op, Error)> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Runs an op. If an earlier op has failed, this function does nothing.
    fn run(&self, op: &Op) {
        if self.failed().is_some() {
            return;
        }
        self.is_busy.store(true, Ordering::Relaxed);
        let outcome = caught(self.runner.rank(), || {
            if op.action == Action::Control(Phase::Begin) {
                self.take_settings();
            }
            self.runner.run(op)
        });
        self.is_busy.store(false, Ordering::Relaxed);
        if let Err(error) = outcome {
            self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((*op, error));
        }
    }

    /// Copies the new pass's settings out of their slot.
    fn take_settings(&self) {
        let slot = (self.begun.fetch_add(1, Ordering::Relaxed) % SLOTS as u64) as usize;
        // SAFETY: this is a slot of the ring, which the trainer's thread has written for this pass. The settings have
        // the slot's length, and only Begins touch them, one after the other.
        unsafe {
            let from = self.first_slot.add(slot * self.slot_words);
            self.memories.regions().settings().copy_from_nonoverlapping(from, self.slot_words);
        }
    }
}

/// The function that the driver calls.
///
/// # Safety
/// The argument points to a [`HostCall`] that is alive.
unsafe extern "C" fn run(argument: *mut c_void) {
    // SAFETY: guaranteed by the caller.
    let call = unsafe { &*argument.cast::<HostCall>() };
    call.shared.run(&call.op);
}
