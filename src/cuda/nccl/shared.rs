//! One rank's shared state: its communicators, its host collective and its first failure. The rank's handles,
//! allocations and threads all use it.
//!
//! A call to NCCL holds its communicator's lock. A thread that ends a communicator first takes the communicator out of
//! its mutex. A communicator is therefore ended only once, and never during a call. After the first failure, calls on
//! all communicators return that failure. A drop does not block.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::cuda::driver::Driver;
use crate::cuda::nccl::ending::detached;
use crate::cuda::nccl::entry::Record;
use crate::cuda::nccl::host::Host;
use crate::cuda::nccl::raw::{Raw, Seat};
use crate::error::{Error, Result};

/// One communicator, or `None` once it is being ended.
pub(super) type Slot = Mutex<Option<Raw>>;

pub(super) struct Shared {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) seat: Seat,
    pub(super) deadline: Duration,
    pub(super) ledger: bool,
    pub(super) warnings: Vec<String>,
    /// The host collective. Without a host collective, ranks learn of each other's failures only from NCCL and from
    /// their deadlines.
    pub(super) host: Option<Host>,
    pub(super) first: Arc<Slot>,
    /// The further communicators, for steppers with shards. All ranks make these communicators in the same order.
    pub(super) further: Mutex<Vec<Weak<Slot>>>,
    /// Each thread that ends a dropped further communicator has a clone of this `Arc`, so `close` can count these
    /// threads.
    pub(super) ending: Arc<()>,
    /// Each live captured pass has a clone of this `Arc` for each communicator of its stepper, so `close` can find out
    /// whether such passes exist.
    pub(super) captured: Arc<()>,
    /// The first failure.
    pub(super) failure: Mutex<Option<Error>>,
}

impl Shared {
    /// Runs `call` with a communicator. If the communicator has ended, returns the group's first failure instead. If
    /// the group has not failed, the error says that the communicator is closed.
    pub(super) fn with_raw<T>(&self, slot: &Slot, call: impl FnOnce(&Raw) -> Result<T>) -> Result<T> {
        match lock(slot).as_ref() {
            Some(raw) => call(raw),
            None => Err(self.refuse().err().unwrap_or_else(closed)),
        }
    }

    pub(super) fn slots(&self) -> Vec<Arc<Slot>> {
        let further = lock(&self.further);
        [Arc::clone(&self.first)].into_iter().chain(further.iter().filter_map(Weak::upgrade)).collect()
    }

    /// Sends every rank's record to all ranks over the first communicator. Returns the records in the order of the
    /// ranks.
    ///
    /// # Errors
    /// `Mismatch`, `PeerLost`, `Deadline`, or an error of NCCL. Later calls of the group return the same error.
    pub(super) fn exchange(&self, own: &Record, deadline: Duration) -> Result<Vec<Record>> {
        let Seat { rank, ranks, .. } = self.seat;
        let own_bytes = own.encode();
        if ranks == 1 {
            return Record::read_all(&own_bytes);
        }
        let gather = |raw: &Raw| raw.gather(&own_bytes, deadline, || self.wanted());
        let late = || Error::deadline(rank, own.entry, deadline, Vec::new());
        let told = self.with_raw(&self.first, gather).and_then(|told| told.ok_or_else(late));
        told.and_then(|bytes| Record::read_all(&bytes)).map_err(|error| self.fail(error))
    }

    pub(super) fn refuse(&self) -> Result<()> {
        lock(&self.failure).clone().map_or(Ok(()), Err)
    }

    /// Returns an error if a rank has failed or left.
    pub(super) fn look(&self) -> Result<()> {
        self.host.as_ref().map_or(Ok(()), |host| host.0.check())
    }

    pub(super) fn wanted(&self) -> Result<()> {
        self.refuse().and_then(|()| self.look())
    }

    /// Stores `error` if there is no earlier error, and returns the stored error.
    pub(super) fn remember(&self, error: Error) -> Error {
        lock(&self.failure).get_or_insert(error).clone()
    }

    /// Stores a failure of this rank or of NCCL. If another rank has reported a failure or has left, the error about
    /// that rank is stored instead, because it explains NCCL's error. A `Mismatch` or `LeftPass` is never replaced: all
    /// ranks get this error, and a rank may have left because of it.
    pub(super) fn fail(&self, error: Error) -> Error {
        let is_told = matches!(error, Error::Mismatch { .. } | Error::LeftPass { .. });
        let cause = if is_told { None } else { self.look().err() };
        let error = self.remember(cause.unwrap_or(error));
        self.send_failure(&error);
        error
    }

    /// Reports to the other ranks why the group ends.
    pub(super) fn send_failure(&self, cause: &Error) {
        self.host.iter().for_each(|host| host.0.abort(cause));
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Every further communicator keeps this state alive, so all of them have been ended.
        let raw = lock(&self.first).take();
        let is_well = self.refuse().is_ok() && !std::thread::panicking();
        if std::thread::panicking() {
            self.send_failure(&Error::Rank {
                rank: self.seat.rank,
                message: "its thread panicked".to_owned(),
            });
        }
        let (Some(raw), deadline) = (raw, self.deadline) else {
            return;
        };
        if !is_well {
            raw.abort_detached();
            return;
        }
        let host = self.host.take();
        detached(move || {
            let look = || host.as_ref().map_or(Ok(()), |host| host.0.check());
            if let (Ok(()), Some(host)) = (raw.finish(deadline, look), &host) {
                // If a rank does not take part, it has reported the reason already.
                let _ = host.part(deadline);
            }
        });
    }
}

/// A further communicator, of all ranks or of some ranks. The communicator ends when its last handle is dropped.
pub(super) struct Further {
    pub(super) shared: Arc<Shared>,
    pub(super) slot: Arc<Slot>,
    /// For each rank of this communicator, its number in the first communicator.
    pub(super) ranks: Vec<u32>,
    /// This rank's number in this communicator.
    pub(super) rank: u32,
}

impl Further {
    pub(super) fn new(shared: &Arc<Shared>, raw: Raw, ranks: Vec<u32>, rank: u32) -> Further {
        let slot = Arc::new(Mutex::new(Some(raw)));
        let mut further = lock(&shared.further);
        further.retain(|slot| slot.strong_count() > 0);
        further.push(Arc::downgrade(&slot));
        Further { shared: Arc::clone(shared), slot, ranks, rank }
    }
}

impl Drop for Further {
    fn drop(&mut self) {
        let Some(raw) = lock(&self.slot).take() else { return };
        if std::thread::panicking() || self.shared.refuse().is_err() {
            raw.abort_detached();
            return;
        }
        let (shared, ending) = (Arc::clone(&self.shared), Arc::clone(&self.shared.ending));
        detached(move || {
            // No call needs this communicator any more. If a peer is lost, the first communicator's next call reports
            // it.
            let _ = raw.finish(shared.deadline, || shared.look());
            drop(ending);
        });
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn closed() -> Error {
    Error::order("communicator", "closed already", "connect again")
}
