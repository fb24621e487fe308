//! The state that one rank's handles, allocations and ending threads share: communicator, connections, first failure.
//!
//! A call to NCCL holds the communicator's lock. Ending it takes it out of the lock, so it is ended once and never
//! during a call. A drop does not block.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cuda::nccl::group::Group;
use crate::cuda::nccl::raw::{Raw, detached};
use crate::error::{Error, Result};

/// See the module: every handle holds one reference.
pub(super) struct Shared {
    pub(super) rank: u32,
    pub(super) device: u32,
    pub(super) world_size: u32,
    pub(super) deadline: Duration,
    pub(super) ledger: bool,
    pub(super) warnings: Vec<String>,
    /// `None` with the caller's own id.
    pub(super) group: Option<Group>,
    /// `None` once it is being ended.
    pub(super) raw: Mutex<Option<Raw>>,
    /// Every live captured pass with calls of this communicator has a clone.
    pub(super) captured: Arc<()>,
    /// The first failure.
    pub(super) failure: Mutex<Option<Error>>,
}

impl Shared {
    /// Runs `call` with the communicator, unless it has ended.
    pub(super) fn with_raw<T>(&self, call: impl FnOnce(&Raw) -> Result<T>) -> Result<T> {
        match lock(&self.raw).as_ref() {
            Some(raw) => call(raw),
            None => Err(self.refuse().err().unwrap_or_else(closed)),
        }
    }

    pub(super) fn refuse(&self) -> Result<()> {
        lock(&self.failure).clone().map_or(Ok(()), Err)
    }

    /// Returns an error if a rank has failed or gone.
    pub(super) fn look(&self) -> Result<()> {
        self.group.as_ref().map_or(Ok(()), Group::check)
    }

    /// Keeps the first error, and returns it.
    pub(super) fn remember(&self, error: Error) -> Error {
        lock(&self.failure).get_or_insert(error).clone()
    }

    /// Records a failure of this rank or of NCCL. If a rank has reported a cause or gone, that explains what NCCL saw.
    pub(super) fn fail(&self, error: Error) -> Error {
        let error = self.remember(self.look().err().unwrap_or(error));
        if let Some(group) = &self.group {
            group.tell(&error);
        }
        error
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let raw = self.raw.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let failure = self.failure.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let panics = std::thread::panicking();
        let group = self.group.take();
        if let (true, Some(group)) = (panics, &group) {
            group.tell(&Error::Rank { rank: self.rank, message: "its thread panicked".to_owned() });
        }
        let (Some(raw), deadline) = (raw, self.deadline) else {
            return;
        };
        if panics || failure.is_some() {
            raw.abort_detached();
            return;
        }
        detached(move || {
            let look = || group.as_ref().map_or(Ok(()), Group::check);
            let outcome = raw.finish(deadline, look);
            if let (Ok(()), Some(group)) = (outcome, &group) {
                group.leave();
            }
        });
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn closed() -> Error {
    Error::order("communicator", "closed already", "connect again")
}
