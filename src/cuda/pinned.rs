//! Two ring buffers in pinned memory, through which host and GPU exchange data without a synchronization.
//!
//! One ring carries settings to the GPU. The host writes a slot when it opens a pass, and the Begin of this pass reads
//! the slot. The host can therefore change a learning rate without a wait for earlier passes. The host never writes a
//! slot that a Begin must still read. The other ring carries the status of passes to the host. After the last step of a
//! pass, the GPU writes the status into a slot. Each slot of this ring has a seqlock.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::driver::Driver;
use super::owned::{Event, OwnedMapped};
use crate::abi::InstepStatus;
use crate::error::Result;
use crate::handle::StreamHandle;
use crate::launch::Settings;

/// How many passes the host may be ahead of the GPU.
pub(super) const SLOTS: usize = 8;

/// The settings that the trainer changes between passes, and the slots that carry them to the GPU.
pub(super) struct SettingsRing {
    pub(super) ring: OwnedMapped,
    pub(super) words: Vec<u32>,
    /// The settings in the latest written slot. [`claims`](super::claims) reads the frozen segments from them. Only
    /// builds with debug assertions update this field.
    pub(super) of_pass: Vec<u32>,
    /// For each slot, the event that is recorded after the Begin that reads the slot.
    read: Vec<Event>,
    /// Number of Begins so far. This number selects the slot of the next Begin.
    pub(super) begun: u64,
}

impl SettingsRing {
    pub(super) fn new(driver: &Arc<dyn Driver>, settings: &Settings) -> Result<SettingsRing> {
        let words = settings.words().to_vec();
        let ring = OwnedMapped::new(driver, SLOTS * size_of_val(&*words))?;
        let read = (0..SLOTS).map(|_| Event::new(driver, false)).collect::<Result<_>>()?;
        Ok(SettingsRing { ring, of_pass: words.clone(), words, read, begun: 0 })
    }

    /// Replaces the settings. Each pass's Begin has a separate slot, so a Begin that is already enqueued still reads
    /// the old settings.
    pub(super) fn set(&mut self, settings: &Settings) {
        self.words.copy_from_slice(settings.words());
    }

    /// Returns the event that must have passed before the next slot may be written again.
    pub(super) fn reader(&self) -> &Event {
        &self.read[slot(self.begun)]
    }

    /// Writes the settings into the next slot. The slot's last reader must have finished.
    pub(super) fn write(&mut self) {
        self.ring.write(slot(self.begun) * self.words.len(), &self.words);
        if cfg!(debug_assertions) {
            self.of_pass.copy_from_slice(&self.words);
        }
    }

    /// Records the event after the Begin that reads the slot, returns the event, and moves to the next slot.
    pub(super) fn mark_read(&mut self, stream: StreamHandle) -> Result<&Event> {
        let event = &self.read[slot(self.begun)];
        event.record(stream)?;
        self.begun += 1;
        Ok(event)
    }
}

/// The ring in which the GPU publishes the results of passes.
pub(super) struct StatusRing {
    pub(super) ring: OwnedMapped,
}

impl StatusRing {
    pub(super) fn new(driver: &Arc<dyn Driver>) -> Result<StatusRing> {
        Ok(StatusRing { ring: OwnedMapped::new(driver, SLOTS * size_of::<InstepStatus>())? })
    }

    /// Returns the newest status that is complete.
    pub(super) fn latest(&self) -> Option<InstepStatus> {
        // Slots that are empty or being written are left out.
        let slots = (0..SLOTS).filter_map(|slot| {
            let (before, copy, after) = self.ring.status(slot, || fence(Ordering::Acquire));
            (before != 0 && before == after && copy.sequence == before).then_some(copy)
        });
        slots.max_by_key(|status| status.sequence)
    }
}

fn slot(pass: u64) -> usize {
    (pass % SLOTS as u64) as usize
}
