//! Copies lists of float32 and bfloat16 tensors into other lists, or adds them, on all threads at once.
//!
//! A sum is computed in float32, and is rounded only when it is stored, to the nearest value (ties to even). The caller
//! must have checked all tensors. If the tensors do not fit in the last-level cache, the stores of a copy bypass the
//! caches. With such stores, the processor does not read a cache line before it writes the line (Intel's optimization
//! manual, "Non-temporal stores").
#![allow(unsafe_code)]

use std::ptr::with_exposed_provenance_mut;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fs, ptr, thread};

use instep::Team;

use crate::openmp::OpenMp;
use crate::tensors::Word;

/// The number of elements that a thread processes at a time.
const CHUNK: usize = 1 << 15;
/// The smallest number of elements for which a second thread saves time.
pub(super) const LEAST_SHARED: usize = 1 << 17;
/// If the mean length of the tensors is below this number, a second thread saves no time. For shorter tensors, reading
/// the list from Python takes longer than copying the elements.
pub(super) const LEAST_MEAN: usize = 256;
/// The smallest number of elements for which the GIL is released. With fewer elements, the work takes less time than
/// releasing the GIL.
pub(super) const LEAST_DETACHED: usize = 1 << 12;

/// The number of elements of a block. Loops over a block are unrolled.
const BLOCK: usize = 64;
/// The number of bytes between a block and the memory that is prefetched while the block is processed.
#[cfg(target_arch = "x86_64")]
const AHEAD_BYTES: usize = 2048;

/// The number of elements of the shortest run that is copied with stores that bypass the caches.
#[cfg(target_arch = "x86_64")]
const LEAST_STREAMED: usize = 1 << 11;

/// The size in bytes of the first processor's last-level cache, if Linux reports the size.
pub(super) static CACHE_BYTES: LazyLock<Option<usize>> = LazyLock::new(|| {
    let text = fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size").ok()?;
    let bytes = text.trim().strip_suffix('K')?.parse::<usize>().ok()? << 10;
    Some(bytes).filter(|bytes| *bytes > 0)
});

/// What happens to each element.
#[derive(Clone, Copy, PartialEq)]
enum Work {
    Add,
    Copy,
    /// A copy with stores that bypass the caches.
    Stream,
}

/// A tensor to write, and the tensor from which its values come.
pub(super) struct Move {
    pub(super) into: (usize, Word),
    pub(super) from: (usize, Word),
    pub(super) len: usize,
}

impl Move {
    fn bytes(&self) -> usize {
        self.len * (self.into.1.size() + self.from.1.size())
    }
}

/// Consecutive elements of one tensor.
#[derive(Clone, Copy)]
struct Run<'a> {
    of: &'a Move,
    start: usize,
    len: usize,
}

/// Copies each `from` tensor into its `into` tensor. If `adds` is true, adds each `from` tensor to its `into` tensor
/// instead.
///
/// # Safety
/// Each address is that of `len` initialised elements of float32 or bfloat16, and is aligned for their type. The
/// written elements do not overlap any other memory that this call reads or writes.
pub(super) unsafe fn run(moves: &[Move], adds: bool, threads: usize, openmp: Option<OpenMp>) {
    let work = if adds { Work::Add } else { kind_of_copy(moves) };
    let mut elements = 0;
    let ends: Vec<usize> = moves
        .iter()
        .map(|one| {
            elements += one.len;
            elements
        })
        .collect();
    // Works on the elements from `first` to `last`, counted through all tensors. These elements may belong to several
    // tensors.
    let each = |mut first: usize, last: usize| {
        let at = ends.partition_point(|end| *end <= first);
        let these = moves[at..].iter().zip(&ends[at..]).take_while(|(of, end)| **end - of.len < last);
        for (of, end) in these.filter(|(of, _)| of.len > 0) {
            let run = Run { of, start: first - (end - of.len), len: last.min(*end) - first };
            // SAFETY: guaranteed by the caller. Only one thread works on each element.
            unsafe { run.on_this_processor(work) };
            first = *end;
        }
        // Other threads may read the elements once this call has ended.
        #[cfg(target_arch = "x86_64")]
        if work == Work::Stream {
            // SAFETY: every x86-64 processor has the instruction.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
    };
    if threads == 1 || elements < LEAST_SHARED {
        return each(0, elements);
    }
    let next = AtomicUsize::new(0);
    let share = || {
        loop {
            let first = next.fetch_add(CHUNK, Ordering::Relaxed);
            if first >= elements {
                return;
            }
            each(first, elements.min(first + CHUNK));
        }
    };
    match openmp {
        Some(team) => {
            team.run(threads, &share);
            share(); // A team may make no call at all.
        }
        None => thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(share);
            }
            share();
        }),
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> bool {
    false
}

/// Returns how tensors are copied. With AVX2, stores bypass the caches if the tensors are larger than the last-level
/// cache. The size of this cache must be known.
fn kind_of_copy(moves: &[Move]) -> Work {
    let bytes = moves.iter().map(Move::bytes).sum();
    let is_small = |cache_bytes: usize| cache_bytes < bytes;
    if has_avx2() && CACHE_BYTES.is_some_and(is_small) { Work::Stream } else { Work::Copy }
}

impl Run<'_> {
    #[cfg(target_arch = "x86_64")]
    unsafe fn on_this_processor(self, work: Work) {
        #[target_feature(enable = "avx2")]
        unsafe fn wide(run: Run<'_>, work: Work) {
            // SAFETY: the caller's promise.
            unsafe { run.each(work) }
        }
        // SAFETY: the caller's promise; the processor has the instructions.
        unsafe { if has_avx2() { wide(self, work) } else { self.each(work) } }
    }

    #[cfg(not(target_arch = "x86_64"))]
    unsafe fn on_this_processor(self, work: Work) {
        // SAFETY: the caller's promise.
        unsafe { self.each(work) }
    }

    #[inline(always)]
    unsafe fn each(self, work: Work) {
        let Move { into, from, .. } = self.of;
        // SAFETY: the caller's promise.
        unsafe {
            match (into.1 == Word::F32, from.1 == Word::F32, work == Work::Add) {
                (true, true, false) => self.copy::<u32, u32>(work, |into, from| into.copy_from_slice(from)),
                (false, false, false) => self.copy::<u16, u16>(work, |into, from| into.copy_from_slice(from)),
                (true, false, false) => self.copy::<f32, u16>(work, each(|_, value| wide(value))),
                (false, true, false) => self.copy::<u16, f32>(work, |into, from| {
                    // NaNs are rare, and without them a block takes fewer instructions.
                    if from.iter().fold(0, |most, value| magnitude(*value).max(most)) > INFINITY_BITS {
                        each(|_, value| narrow(value))(into, from);
                    } else {
                        each(|_, value| rounded(value))(into, from);
                    }
                }),
                (true, true, true) => self.blocks::<f32, f32>(each(|own, value| own + value)),
                (true, false, true) => self.blocks::<f32, u16>(each(|own, value| own + wide(value))),
                (false, true, true) => self.blocks::<u16, f32>(each(|own, value| narrow(wide(own) + value))),
                (false, false, true) => {
                    self.blocks::<u16, u16>(each(|own, value| narrow(wide(own) + wide(value))))
                }
            }
        }
    }

    /// Returns the elements to write and the elements to read.
    #[inline(always)]
    unsafe fn slices<'s, T, U>(self) -> (&'s mut [T], &'s [U]) {
        // SAFETY: the caller's promise.
        unsafe {
            let into = with_exposed_provenance_mut::<T>(self.of.into.0).add(self.start);
            let from = with_exposed_provenance_mut::<U>(self.of.from.0).add(self.start);
            (std::slice::from_raw_parts_mut(into, self.len), std::slice::from_raw_parts(from, self.len))
        }
    }

    /// Calls `made` for each block of the run in turn, and prefetches later blocks.
    #[inline(always)]
    unsafe fn blocks<T, U>(self, made: impl Fn(&mut [T], &[U])) {
        // SAFETY: the caller's promise.
        let (into, from) = unsafe { self.slices::<T, U>() };
        let (mut into, mut from) = (into.chunks_exact_mut(BLOCK), from.chunks_exact(BLOCK));
        for (into, from) in into.by_ref().zip(from.by_ref()) {
            prefetch(into);
            prefetch(from);
            made(into, from);
        }
        made(into.into_remainder(), from.remainder());
    }

    /// Copies the run. `made` computes the new elements, and does not read the old elements.
    #[inline(always)]
    unsafe fn copy<T: Copy + Default, U>(self, work: Work, made: impl Fn(&mut [T], &[U])) {
        // SAFETY: the caller's promise.
        unsafe {
            match work {
                #[cfg(target_arch = "x86_64")]
                Work::Stream if self.len >= LEAST_STREAMED => self.stream(made),
                // The C library's copy is the fastest of its kind.
                _ if self.of.into.1 == self.of.from.1 => {
                    let (into, from) = self.slices::<T, T>();
                    ptr::copy_nonoverlapping(from.as_ptr(), into.as_mut_ptr(), self.len);
                }
                _ => self.blocks(made),
            }
        }
    }

    /// Copies the run with stores that bypass the caches. After the call, the caller must execute a fence, so that
    /// other threads see the stores.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn stream<T: Copy + Default, U>(self, made: impl Fn(&mut [T], &[U])) {
        // SAFETY: the caller's promise.
        let (into, from) = unsafe { self.slices::<T, U>() };
        let lead = into.as_ptr().align_offset(LINE_BYTES).min(into.len());
        let ((first, into), (first_from, from)) = (into.split_at_mut(lead), from.split_at(lead));
        made(first, first_from);
        let (mut into, mut from) = (into.chunks_exact_mut(BLOCK), from.chunks_exact(BLOCK));
        for (into, from) in into.by_ref().zip(from.by_ref()) {
            prefetch(from);
            let mut block = Line([T::default(); BLOCK]);
            made(&mut block.0, from);
            // SAFETY: both have BLOCK elements and begin with a cache line. Only processors with AVX2 stream.
            unsafe { store_past_caches(&block, into) };
        }
        made(into.into_remainder(), from.remainder());
    }
}

#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;

/// A block that is aligned to a cache line.
#[cfg(target_arch = "x86_64")]
#[repr(align(64))]
struct Line<T>([T; BLOCK]);

/// Stores a block. The processor does not read the block's memory into a cache first.
///
/// # Safety
/// `into` has BLOCK elements of 2 or 4 bytes and is aligned to 32 bytes. The processor has AVX.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn store_past_caches<T>(block: &Line<T>, into: &mut [T]) {
    use std::arch::x86_64::{_mm256_load_si256, _mm256_stream_si256};
    for at in (0..size_of_val(&block.0)).step_by(32) {
        // SAFETY: the caller's promise.
        unsafe {
            let values = _mm256_load_si256(block.0.as_ptr().byte_add(at).cast());
            _mm256_stream_si256(into.as_mut_ptr().byte_add(at).cast(), values);
        }
    }
}

/// Returns a function that computes each element of a block. `made` gets the element's old value and the other tensor's
/// value.
#[inline(always)]
fn each<T: Copy, U: Copy>(made: impl Fn(T, U) -> T) -> impl Fn(&mut [T], &[U]) {
    move |into, from| into.iter_mut().zip(from).for_each(|(own, value)| *own = made(*own, *value))
}

/// Prefetches the memory that lies `AHEAD_BYTES` after this block. A prefetch past the end of a tensor is harmless.
#[inline(always)]
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
fn prefetch<T>(block: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of_val(block)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(block.as_ptr().cast::<i8>().wrapping_add(AHEAD_BYTES + line)) }
    }
}

/// The bits of infinity. Without the sign bit, the bits of every NaN are a larger number than this.
const INFINITY_BITS: u32 = f32::INFINITY.to_bits();

#[inline(always)]
fn magnitude(value: f32) -> u32 {
    value.to_bits() & !(1 << 31)
}

/// Converts the bits of a bfloat16 to f32.
#[inline(always)]
fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Returns the bits of the nearest bfloat16. Every NaN becomes the one NaN that PyTorch stores.
#[inline(always)]
fn narrow(value: f32) -> u16 {
    if value.is_nan() { 0x7fc0 } else { rounded(value) }
}

/// Returns the bits of the bfloat16 nearest to `value`, which must not be NaN.
#[inline(always)]
fn rounded(value: f32) -> u16 {
    let bits = value.to_bits();
    (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16
}
