//! One rank's end of a group of GPUs: NCCL for the sums, the group's connections for everything that may go wrong.
//!
//! Every failure is kept, told to the other ranks, and is the answer to every later call. Must enqueue on the caller's
//! stream only, and on one thread at a time per device.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Duration;

use crate::collective::{Allocation, Call, Collective};
use crate::cuda::context::with_device;
use crate::cuda::nccl::group::Group;
use crate::cuda::nccl::library::{Library, unique_id};
use crate::cuda::nccl::raw::{Raw, detached};
use crate::cuda::nccl::shared::{Shared, closed, lock};
use crate::cuda::nccl::{Options, UniqueId, bootstrap, memory};
use crate::error::{Error, Result};
use crate::handle::Place;

/// One rank's end of a group of GPUs, each in a process of its own. A clone is another handle of the same communicator:
/// keep one to [`close`](Self::close) the group after the stepper that has the other.
///
/// Sums are NCCL's: every rank gets the same bits, but their order, and with it the last bit, is NCCL's choice and may
/// differ between world sizes, machines and versions.
///
/// Layout and options are compared with the other ranks' when a stepper is built. What comes later is compared only
/// with [`Options::ledger`]: learning rates, frozen parameters, abandoned passes. Where other calls promise a
/// `Mismatch`, ranks that differ without it drift apart, or hang until the stepper's deadline. Replays of captured
/// passes are never compared.
///
/// # Ordering
/// One thread at a time issues on a device, so several steppers may share one, each with a communicator of its own;
/// their first passes, in which NCCL connects, begin in one order on every rank. Communicators of the program's own on
/// the same device are not among those: NCCL wants their collectives issued in one order with the stepper's hand-overs
/// on every rank, and by no other thread meanwhile. [`External`](crate::cuda::External) does with the program's own
/// alone.
///
/// Dropping the last handle closes the group on a thread of its own; if that thread does not get to the end before the
/// program does, or if the drop is a panic's, peers that still wait get `PeerLost`.
#[derive(Clone)]
pub struct Nccl {
    shared: Arc<Shared>,
}

/// Held while issuing on a device, by its ordinal: NCCL wants one thread at a time there, over all communicators.
static ISSUING: Mutex<BTreeMap<u32, &'static Mutex<()>>> = Mutex::new(BTreeMap::new());

impl Nccl {
    pub(super) fn open(options: &Options, id: Option<UniqueId>) -> Result<Nccl> {
        options.refuse()?;
        if id.is_some() && options.ledger {
            let why = "ranks that share an id of the caller's have no connection to compare over";
            return Err(Error::config("ledger", true, why));
        }
        // What this machine lacks is known before others wait for it.
        let library = Library::get()?;
        with_device(options.device, || Ok(()))?;
        let (group, id) = match id {
            Some(id) => (None, id),
            None => bootstrap::meet(options, unique_id).map(|(group, id)| (Some(group), id))?,
        };
        let wanted = || group.as_ref().map_or(Ok(()), Group::check);
        let raw = Raw::connect(library, options, &id, wanted).inspect_err(|error| {
            if let Some(group) = &group {
                group.tell(error);
            }
        })?;
        let shared = Shared {
            rank: options.rank,
            device: options.device,
            world_size: options.world_size,
            deadline: options.deadline,
            ledger: options.ledger,
            warnings: warnings(std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok()),
            group,
            raw: Mutex::new(Some(raw)),
            failure: Mutex::new(None),
        };
        Ok(Nccl { shared: Arc::new(shared) })
    }

    /// What is likely to make it slow, a line each; for the program to show, since nothing is printed here.
    pub fn warnings(&self) -> &[String] {
        &self.shared.warnings
    }

    /// Waits until every collective has ended on all ranks of this machine, and ends the group. All ranks call it, up
    /// to the deadline apart; other handles of it are of no use afterwards.
    ///
    /// # Errors
    /// What has ended the group before, if anything has; `PeerLost` or `Collective` if a rank does not take part.
    pub fn close(self) -> Result<()> {
        self.shared.refuse()?;
        let Some(raw) = lock(&self.shared.raw).take() else {
            return Err(closed());
        };
        self.shared.remember(closed());
        let outcome = raw.finish(self.shared.deadline, || self.shared.look());
        if let Some(group) = &self.shared.group {
            match &outcome {
                Ok(()) => group.leave(),
                Err(error) => group.tell(error),
            }
        }
        outcome
    }
}

impl Collective for Nccl {
    fn rank(&self) -> u32 {
        self.shared.rank
    }

    fn world_size(&self) -> u32 {
        self.shared.world_size
    }

    fn reaches(&self, place: Place) -> bool {
        place == Place::Cuda(self.shared.device)
    }

    fn allocate(&self, bytes: u64) -> Result<Option<Allocation>> {
        memory::allocate(&self.shared, bytes)
    }

    fn agree(&self, number: u64, deadline: Duration) -> Result<()> {
        self.shared.refuse()?;
        let Some(group) = &self.shared.group else {
            return Ok(());
        };
        let entry = format!("a stepper of agreement {number:016x}");
        group.compare(&entry, deadline).map_err(|error| self.shared.fail(error))
    }

    unsafe fn enqueue(&self, call: &Call) -> Result<()> {
        let shared = &self.shared;
        shared.refuse()?;
        if shared.ledger
            && let Some(group) = &shared.group
        {
            group.compare(&call.to_string(), call.deadline).map_err(|error| shared.fail(error))?;
        }
        let issuing = *lock(&ISSUING).entry(shared.device).or_insert_with(|| Box::leak(Box::default()));
        let _issuing = lock(issuing);
        let wanted = || shared.refuse().and_then(|()| shared.look());
        // SAFETY: by the contract.
        shared.with_raw(|raw| unsafe { raw.enqueue(call, wanted) }).map_err(|error| shared.fail(error))
    }

    fn check(&self) -> Result<()> {
        self.shared.refuse()?;
        self.shared.look().map_err(|error| self.shared.fail(error))?;
        let raw = match self.shared.raw.try_lock() {
            Ok(raw) => raw,
            Err(TryLockError::Poisoned(raw)) => raw.into_inner(),
            // Somebody is inside NCCL, and learns there what there is to learn.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let outcome = raw.as_ref().map_or(Ok(()), Raw::check);
        drop(raw);
        outcome.map_err(|error| self.shared.fail(error))
    }

    fn abort(&self, cause: &Error) {
        // What has ended it already has been told already.
        if self.shared.refuse().is_ok() {
            let cause = self.shared.remember(cause.clone());
            self.shared.group.iter().for_each(|group| group.tell(&cause));
        }
        // Whoever is inside NCCL leaves at the next look at the failure; until then the lock is theirs.
        let shared = Arc::clone(&self.shared);
        detached(move || {
            let raw = lock(&shared.raw).take();
            drop(shared);
            if let Some(raw) = raw {
                raw.abort();
            }
        });
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { rank, world_size, device, .. } = &*self.shared;
        write!(f, "rank {rank} of {world_size} by NCCL on cuda:{device}")
    }
}

fn warnings(max_connections: Option<String>) -> Vec<String> {
    let one_queue = "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one queue of the GPU's, so sums and steps cannot run \
                     beside backward; unset it";
    max_connections.filter(|value| value.trim() == "1").map(|_| one_queue.to_owned()).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_hardware_queue_is_warned_of() {
        assert_eq!(warnings(Some("1".to_owned())).len(), 1);
        assert!(warnings(Some("32".to_owned())).is_empty() && warnings(None).is_empty());
    }
}
