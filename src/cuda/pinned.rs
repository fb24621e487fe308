//! Two ring buffers in pinned memory, through which host and GPU exchange data without a synchronization.
//!
//! Settings go to the GPU: the host writes a slot when it opens a pass, and that pass's Begin reads it, so a learning
//! rate changes without waiting for earlier passes. Status comes back: one seqlock per slot, written after the last
//! step. The host never writes a slot that a Begin has still to read.
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::driver::{Driver, Mapped};
use crate::abi::InstepStatus;
use crate::error::Result;
use crate::handle::{DevicePtr, EventHandle, StreamHandle};
use crate::launch::Settings;

/// Passes that the host may be ahead of the GPU.
pub(super) const SLOTS: usize = 8;

/// The settings that the trainer changes between passes, and the slots that carry them to the GPU.
pub(super) struct SettingsRing {
    driver: Arc<dyn Driver>,
    ring: Mapped,
    /// The latest settings.
    words: Vec<u32>,
    /// Per slot, the event after its Begin, and whether it was ever recorded.
    read: [(EventHandle, bool); SLOTS],
}

impl SettingsRing {
    pub(super) fn new(driver: &Arc<dyn Driver>, settings: &Settings) -> Result<SettingsRing> {
        let words = settings.words().to_vec();
        let ring = driver.allocate_mapped((SLOTS * size_of_val(&*words)) as u64)?;
        let none = (EventHandle::default(), false);
        let mut settings = SettingsRing { driver: Arc::clone(driver), ring, words, read: [none; SLOTS] };
        for (event, _) in &mut settings.read {
            *event = driver.create_event(false)?;
        }
        Ok(settings)
    }

    /// Replaces the settings. Each pass's Begin has a slot of its own, so no Begin that is still to run sees this.
    pub(super) fn set(&mut self, settings: &Settings) {
        self.words.copy_from_slice(settings.words());
    }

    /// Returns the event that must have passed before the slot of this pass is written again.
    pub(super) fn reader(&self, pass: u64) -> Option<EventHandle> {
        let (event, used) = self.read[slot(pass)];
        used.then_some(event)
    }

    /// Writes the slot of a pass, whose last reader has finished.
    pub(super) fn write(&mut self, pass: u64) {
        let at = slot(pass) * self.words.len();
        // SAFETY: the ring has SLOTS of them, aligned to a page; its last reader has finished, by the contract.
        unsafe {
            let to = self.ring.host.as_ptr().cast::<u32>().add(at);
            ptr::copy_nonoverlapping(self.words.as_ptr(), to, self.words.len());
        }
    }

    /// Records the event after the Begin that reads the slot.
    pub(super) fn mark_read(&mut self, pass: u64, stream: StreamHandle) -> Result<()> {
        let (event, used) = &mut self.read[slot(pass)];
        *used = true;
        // SAFETY: both are alive as long as the device.
        unsafe { self.driver.record(*event, stream) }
    }

    pub(super) fn ring(&self) -> DevicePtr {
        self.ring.device
    }

    pub(super) fn slot_words(&self) -> u64 {
        self.words.len() as u64
    }
}

impl Drop for SettingsRing {
    fn drop(&mut self) {
        // SAFETY: made by `new`; a device with work still in flight forgets its settings instead.
        unsafe {
            self.driver.free_mapped(self.ring);
            for (event, _) in self.read.into_iter().filter(|(event, _)| *event != EventHandle::default()) {
                self.driver.destroy_event(event);
            }
        }
    }
}

/// The results of passes, as the GPU publishes them.
pub(super) struct StatusRing {
    driver: Arc<dyn Driver>,
    ring: Mapped,
}

impl StatusRing {
    pub(super) fn new(driver: &Arc<dyn Driver>) -> Result<StatusRing> {
        let bytes = SLOTS * size_of::<InstepStatus>();
        let ring = driver.allocate_mapped(bytes as u64)?;
        // SAFETY: allocated for them; nothing else has the address yet.
        unsafe { ring.host.as_ptr().write_bytes(0, bytes) };
        Ok(StatusRing { driver: Arc::clone(driver), ring })
    }

    pub(super) fn ring(&self) -> *mut InstepStatus {
        ptr::with_exposed_provenance_mut(self.ring.device.0 as usize)
    }

    /// Returns the newest status that is complete.
    pub(super) fn latest(&self) -> Option<InstepStatus> {
        let slots = (0..SLOTS).filter_map(|k| self.read(k));
        slots.max_by_key(|status| status.sequence)
    }

    /// Reads one slot, unless it is empty or being written.
    fn read(&self, slot: usize) -> Option<InstepStatus> {
        let at: NonNull<InstepStatus> = self.ring.host.cast();
        // SAFETY: inside the ring, aligned, written by the GPU only: volatile, because it does so at any time.
        unsafe {
            let at = at.add(slot).as_ptr();
            let before = (&raw const (*at).sequence).read_volatile();
            fence(Ordering::Acquire);
            let copy = at.read_volatile();
            fence(Ordering::Acquire);
            let after = (&raw const (*at).sequence).read_volatile();
            (before != 0 && before == after && copy.sequence == before).then_some(copy)
        }
    }
}

impl Drop for StatusRing {
    fn drop(&mut self) {
        // SAFETY: as for `Settings`.
        unsafe { self.driver.free_mapped(self.ring) };
    }
}

fn slot(pass: u64) -> usize {
    (pass % SLOTS as u64) as usize
}
