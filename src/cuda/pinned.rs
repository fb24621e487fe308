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
use crate::abi::{InstepHyper, InstepStatus};
use crate::error::Result;
use crate::handle::{DevicePtr, EventHandle, StreamHandle};
use crate::launch::{Assignment, Counts, first_actions, first_lr_multipliers};
use crate::layout::Plan;

/// Passes that the host may be ahead of the GPU.
pub(super) const SLOTS: usize = 8;

/// The settings that the trainer changes between passes, and the slots that carry them to the GPU.
pub(super) struct Settings {
    driver: Arc<dyn Driver>,
    ring: Mapped,
    /// The latest settings, at the offsets of [`Counts`].
    words: Vec<u32>,
    counts: Counts,
    /// Per slot, the event after its Begin, and whether it was ever recorded.
    read: [(EventHandle, bool); SLOTS],
}

impl Settings {
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        (plan, assignment): (&Plan, &Assignment),
        counts: Counts,
    ) -> Result<Settings> {
        let words = vec![0; counts.settings_bytes() / size_of::<u32>()];
        let ring = driver.allocate_mapped((SLOTS * size_of_val(&*words)) as u64)?;
        let none = (EventHandle::default(), false);
        let mut settings = Settings { driver: Arc::clone(driver), ring, words, counts, read: [none; SLOTS] };
        for (event, _) in &mut settings.read {
            *event = driver.create_event(false)?;
        }
        for (group, hyper) in assignment.hypers().enumerate() {
            settings.set_group(group, &hyper);
        }
        for (record, action) in first_actions(plan, assignment).enumerate() {
            settings.set_action(record, action);
        }
        for (record, multiplier) in first_lr_multipliers(assignment).enumerate() {
            settings.set_lr_multiplier(record, multiplier);
        }
        Ok(settings)
    }

    pub(super) fn set_group(&mut self, group: usize, hyper: &InstepHyper) {
        const WORDS: usize = size_of::<InstepHyper>() / size_of::<u32>();
        assert!(group < self.counts.groups, "there is no such group");
        let to = &mut self.words[group * WORDS..][..WORDS];
        // SAFETY: a union of plain numbers without padding, as long as the slice.
        unsafe { ptr::copy_nonoverlapping(ptr::from_ref(hyper).cast(), to.as_mut_ptr(), WORDS) }
    }

    pub(super) fn set_action(&mut self, record: usize, action: u32) {
        assert!(record < self.counts.records, "there is no such record");
        self.words[self.counts.actions_at() / size_of::<u32>() + record] = action;
    }

    pub(super) fn set_lr_multiplier(&mut self, record: usize, multiplier: f64) {
        assert!(record < self.counts.records, "there is no such record");
        let at = self.counts.multipliers_at() / size_of::<u32>() + record * 2;
        let bits = multiplier.to_bits().to_ne_bytes();
        for (word, bytes) in self.words[at..][..2].iter_mut().zip(bits.as_chunks().0) {
            *word = u32::from_ne_bytes(*bytes);
        }
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

impl Drop for Settings {
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
