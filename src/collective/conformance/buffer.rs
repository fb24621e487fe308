//! Memory for one call: at a chosen distance from a cache line, between bytes that nothing may touch.
//!
//! The allocation never moves, so an address stays valid as long as the buffer.

/// Bytes around the contents, and the alignment that a [`Call`](crate::collective::Call) promises at most.
const MARGIN: usize = 64;
const UNTOUCHED: u8 = 0xa5;

pub(super) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// Holds `contents`, `offset` bytes after a multiple of 64.
    pub(super) fn new(contents: &[u8], offset: usize) -> Buffer {
        let mut bytes = vec![UNTOUCHED; contents.len() + offset + 3 * MARGIN];
        let start = MARGIN + bytes[MARGIN..].as_ptr().align_offset(MARGIN) + offset;
        bytes[start..start + contents.len()].copy_from_slice(contents);
        Buffer { bytes, start, len: contents.len() }
    }

    pub(super) fn contents_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    pub(super) fn contents(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    /// Whether nothing was written before or after the contents.
    pub(super) fn is_intact_around(&self) -> bool {
        let (before, rest) = self.bytes.split_at(self.start);
        before.iter().chain(&rest[self.len..]).all(|byte| *byte == UNTOUCHED)
    }
}
