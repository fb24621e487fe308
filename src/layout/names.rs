//! Finds the index of a name in a list by the name's hash. This module stores no copy of a name.
//!
//! [`NameIndex`] is a hash table of indices with open addressing. The table is at most half full, so a search compares
//! only a few names, even in a long list. Like the layout's fingerprint, the table uses FNV-1a without a random key, so
//! equal lists have equal tables.

/// The FNV-1a hash of an empty string.
pub(super) const EMPTY: u64 = 0xcbf2_9ce4_8422_2325;

/// Folds bytes into an FNV-1a hash.
pub(crate) fn fold(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// A slot without a name.
const FREE: u32 = u32::MAX;

/// A hash table of the names in a list. The caller owns the list. The table stores only the names' indices in the list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NameIndex {
    /// Each slot has the index of a name, or [`FREE`]. The number of slots is a power of two, or 0.
    slots: Vec<u32>,
    len: usize,
}

impl NameIndex {
    /// Returns the index of `name` in the list that `name_at` reads.
    pub(super) fn find<'a>(&self, name: &str, name_at: impl Fn(u32) -> &'a str) -> Option<u32> {
        let found = *self.slots.get(self.slot(name, name_at)?)?;
        (found != FREE).then_some(found)
    }

    /// Adds a name, which the caller must then append to the list. If the list already has the name, returns the name's
    /// index and adds nothing.
    pub(super) fn insert<'a>(&mut self, name: &str, name_at: impl Fn(u32) -> &'a str) -> Option<u32> {
        if 2 * (self.len + 1) > self.slots.len() {
            self.grow(&name_at);
        }
        let slot = self.slot(name, &name_at)?;
        if self.slots[slot] != FREE {
            return Some(self.slots[slot]);
        }
        self.slots[slot] = self.len as u32;
        self.len += 1;
        None
    }

    /// Returns the slot of the name, or the free slot in which the name belongs. Returns `None` if there are no slots.
    fn slot<'a>(&self, name: &str, name_at: impl Fn(u32) -> &'a str) -> Option<usize> {
        let mask = self.slots.len().checked_sub(1)?;
        let hash = fold(EMPTY, name.as_bytes());
        // FNV-1a mixes the upper bits better than the lower bits, so the slot depends on both.
        let mut slot = (hash ^ hash >> 32) as usize & mask;
        while self.slots[slot] != FREE && name_at(self.slots[slot]) != name {
            slot = (slot + 1) & mask;
        }
        Some(slot)
    }

    fn grow<'a>(&mut self, name_at: impl Fn(u32) -> &'a str) {
        self.slots = vec![FREE; (self.slots.len() * 2).max(16)];
        for index in 0..self.len as u32 {
            if let Some(slot) = self.slot(name_at(index), &name_at) {
                self.slots[slot] = index;
            }
        }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/layout/names.rs"]
mod tests;
