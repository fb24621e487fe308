//! Memory in which a kernel may touch some runs and nothing between them.
//!
//! The gaps hold a NaN in every dtype and must not change; AddressSanitizer even forbids reads of them during a launch.
//! The memory never moves, because structs of the kernels hold its addresses.

use std::ops::{DerefMut, Range};

use super::launch;

/// A NaN as f16, as bf16 and, in pairs, as f32; it differs from the NaN that kernels store.
const GUARD: u64 = 0x7fe1_7fe1_7fe1_7fe1;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Runs start at multiples of this number of elements, as a layout aligns states, and at least this number lies between
/// two runs.
const QUANTUM: usize = instep::abi::INSTEP_QUANTUM as usize;
/// A band is wider than any access.
const BAND: usize = 256;

/// Returns the element ranges of runs of these lengths.
fn places(lens: &[usize]) -> impl Iterator<Item = Range<usize>> {
    lens.iter().scan(0, |next, len| {
        let start = *next;
        *next = (start + len + QUANTUM).next_multiple_of(QUANTUM);
        Some(start..start + len)
    })
}

pub(crate) struct Bands {
    pub name: &'static str,
    memory: Box<dyn DerefMut<Target = [u64]>>,
    /// Byte ranges of `memory`.
    runs: Vec<Range<usize>>,
}

impl Bands {
    /// Makes runs of these lengths, each starting `misalignment` elements (less than a cache line) after the beginning
    /// of a cache line. Memories with other element sizes and misalignments have the same offsets, because offsets
    /// depend only on the lengths.
    pub(crate) fn new(
        name: &'static str,
        lens: &[usize],
        element_bytes: usize,
        misalignment: usize,
    ) -> Bands {
        Bands::placed(name, places(lens), element_bytes, misalignment)
    }

    /// Makes an f32 for each block of such runs.
    pub(crate) fn per_block(name: &'static str, lens: &[usize], block: usize, misalignment: usize) -> Bands {
        let blocks = places(lens).map(|run| run.start / block..run.end.div_ceil(block));
        Bands::placed(name, blocks, size_of::<f32>(), misalignment)
    }

    fn placed(
        name: &'static str,
        elements: impl Iterator<Item = Range<usize>>,
        element_bytes: usize,
        misalignment: usize,
    ) -> Bands {
        let bytes = |run: Range<usize>| run.start * element_bytes..run.end * element_bytes;
        let mut runs: Vec<_> = elements.map(bytes).collect();
        let end = runs.last().map_or(0, |run| run.end) + misalignment * element_bytes;
        let memory = launch::words(GUARD, (end + 2 * BAND + 2 * LINE).div_ceil(8));
        let base = memory.as_ptr().addr();
        let first = (base + BAND).next_multiple_of(LINE) - base + misalignment * element_bytes;
        runs.iter_mut().for_each(|run| *run = run.start + first..run.end + first);
        Bands { name, memory, runs }
    }

    /// Makes one run of these values.
    pub(crate) fn of<T: Copy>(name: &'static str, values: &[T]) -> Bands {
        let mut bands = Bands::new(name, &[size_of_val(values)], 1, 0);
        for (k, value) in values.iter().enumerate() {
            bands.set(0, k, *value);
        }
        bands
    }

    pub(crate) fn address<T>(&mut self, run: usize) -> *mut T {
        self.memory.as_mut_ptr().wrapping_byte_add(self.runs[run].start).cast()
    }

    /// Returns the elements of this size between the start of the first run and that of another.
    pub(crate) fn distance(&self, run: usize, element_bytes: usize) -> u64 {
        ((self.runs[run].start - self.runs[0].start) / element_bytes) as u64
    }

    pub(crate) fn run_bytes(&self, run: usize) -> usize {
        self.runs[run].len()
    }

    fn place<T>(&self, run: usize, at: usize) -> usize {
        let start = self.runs[run].start + at * size_of::<T>();
        assert!(start + size_of::<T>() <= self.runs[run].end, "{}: run {run} has no element {at}", self.name);
        start
    }

    pub(crate) fn set<T: Copy>(&mut self, run: usize, at: usize, value: T) {
        let place = self.place::<T>(run, at);
        // SAFETY: inside the memory, by `place`.
        unsafe { self.memory.as_mut_ptr().byte_add(place).cast::<T>().write_unaligned(value) }
    }

    pub(crate) fn get<T: Copy>(&self, run: usize, at: usize) -> T {
        // SAFETY: inside the memory, by `place`; what is read was set, or written by a kernel as this type.
        unsafe { self.memory.as_ptr().byte_add(self.place::<T>(run, at)).cast::<T>().read_unaligned() }
    }

    /// Zeroes all runs.
    pub(crate) fn clear_runs(&mut self) {
        for run in 0..self.runs.len() {
            (0..self.run_bytes(run)).for_each(|at| self.set(run, at, 0u8));
        }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: words as bytes.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), size_of_val(self.words())) }
    }

    fn gaps(&self) -> impl Iterator<Item = Range<usize>> {
        let starts = std::iter::once(0).chain(self.runs.iter().map(|run| run.end));
        let ends = self.runs.iter().map(|run| run.start).chain([self.bytes().len()]);
        starts.zip(ends).map(|(start, end)| start..end)
    }

    pub(crate) fn forbid_gaps(&self, forbidden: bool) {
        self.gaps().for_each(|gap| launch::forbid(&self.bytes()[gap], forbidden));
    }

    pub(crate) fn words(&self) -> &[u64] {
        &self.memory
    }

    pub(crate) fn restore(&mut self, words: &[u64]) {
        self.memory.copy_from_slice(words);
    }

    /// Asserts that this is `expected` in every bit, guards included, and that the guards are unchanged. The message
    /// names the owner of `expected`.
    pub(crate) fn assert_same(&self, expected: &[u64], owner: &str, what: &str) {
        for gap in self.gaps() {
            let stands = gap.clone().all(|k| self.bytes()[k] == GUARD.to_ne_bytes()[k % 8]);
            assert!(stands, "{what}: {}: written outside its runs, in bytes {gap:?}", self.name);
        }
        let Some(word) = (0..expected.len()).find(|k| self.memory[*k] != expected[*k]) else { return };
        let inside = |run: &Range<usize>| run.start < 8 * word + 8 && 8 * word < run.end;
        let run = self.runs.iter().position(inside).unwrap_or(usize::MAX);
        panic!(
            "{what}: {} differs from {owner}'s: run {run}, byte {} of it: {:016x}, not {:016x}",
            self.name,
            (8 * word).saturating_sub(self.runs[run].start),
            self.memory[word],
            expected[word],
        );
    }
}
