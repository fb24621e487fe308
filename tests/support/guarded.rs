//! A tensor between guard bands: a write beside it shows.
//!
//! The bands hold a NaN that no kernel makes, so a read of them shows in the results. A tensor is never resized,
//! because tests vary its place relative to a cache line.

const GUARD: u32 = 0x7fc0_beef;
/// The smallest number of elements on each side: more than any vector is wide.
const BAND: usize = 48;
const LINE: usize = 16;

/// One tensor, `offset` elements after a 64-byte boundary.
pub(crate) struct Guarded {
    memory: Vec<f32>,
    start: usize,
    len: usize,
}

impl Guarded {
    /// Returns a tensor of zeros.
    pub(crate) fn new(len: usize, offset: usize) -> Guarded {
        let mut memory = vec![f32::from_bits(GUARD); len + 2 * (BAND + LINE) + offset];
        let start = BAND + memory[BAND..].as_ptr().align_offset(64) + offset;
        memory[start..start + len].fill(0.0);
        Guarded { memory, start, len }
    }

    pub(crate) fn address(&mut self) -> *mut f32 {
        self.memory[self.start..].as_mut_ptr()
    }

    pub(crate) fn values(&self) -> &[f32] {
        &self.memory[self.start..self.start + self.len]
    }

    pub(crate) fn values_mut(&mut self) -> &mut [f32] {
        &mut self.memory[self.start..self.start + self.len]
    }

    pub(crate) fn assert_bands_stand(&self, what: &str) {
        let around = self.memory[..self.start].iter().chain(&self.memory[self.start + self.len..]);
        assert!(around.map(|x| x.to_bits()).all(|bits| bits == GUARD), "{what} was written around");
    }
}
