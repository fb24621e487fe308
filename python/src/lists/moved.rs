//! Copies and sums between lists of float32 and bfloat16 tensors, on all threads at once.
//!
//! A sum is of float32 and is rounded once, to the nearest even, when it is stored. No tensor is written before all
//! have been checked.
#![allow(unsafe_code)]

use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use instep::Team;

use crate::openmp::OpenMp;
use crate::tensors::Word;

/// Elements that a thread takes at a time.
const CHUNK: usize = 1 << 15;
/// The smallest number of elements for which a second thread saves time.
pub(super) const LEAST_SHARED: usize = 1 << 17;
/// The smallest mean length of a tensor for which it does: shorter ones take longer to read from Python than to copy.
pub(super) const LEAST_MEAN: usize = 256;
/// The smallest number of elements for which the GIL is released. Fewer take less time than to release it.
pub(super) const LEAST_DETACHED: usize = 1 << 12;

/// Elements of a block, in which loops are unrolled.
const BLOCK: usize = 64;
/// How far ahead of its loads a loop prefetches.
const AHEAD_BYTES: usize = 2048;

/// One tensor, and where its values come from.
pub(super) struct Move {
    pub(super) into: (usize, Word),
    pub(super) from: (usize, Word),
    pub(super) len: usize,
}

/// A run of elements of one tensor.
struct Run<'a> {
    of: &'a Move,
    start: usize,
    len: usize,
}

/// Copies every tensor, or adds it.
///
/// # Safety
/// The addresses belong to `len` initialised elements of float32 or bfloat16, and are aligned to them. No other memory
/// that is read or written here overlaps the written elements.
pub(super) unsafe fn run(moves: &[Move], adds: bool, threads: usize, openmp: Option<OpenMp>) {
    let mut elements = 0;
    let ends: Vec<usize> = moves
        .iter()
        .map(|one| {
            elements += one.len;
            elements
        })
        .collect();
    // Some elements of all, which may be those of many tensors.
    let each = |mut first: usize, last: usize| {
        let at = ends.partition_point(|end| *end <= first);
        for (of, end) in moves[at..].iter().zip(&ends[at..]).take_while(|(of, end)| **end - of.len < last) {
            let run = Run { of, start: first - (end - of.len), len: last.min(*end) - first };
            // SAFETY: the caller's promise; each element is one thread's.
            unsafe { run.on_this_processor(adds) };
            first = *end;
        }
    };
    if threads == 1 || elements < LEAST_SHARED {
        return each(0, elements);
    }
    let next = AtomicUsize::new(0);
    let work = || {
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
            team.run(threads, &work);
            work(); // A team may make no call at all.
        }
        None => thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(work);
            }
            work();
        }),
    }
}

impl Run<'_> {
    #[cfg(target_arch = "x86_64")]
    unsafe fn on_this_processor(&self, adds: bool) {
        #[target_feature(enable = "avx2")]
        unsafe fn wide(run: &Run<'_>, adds: bool) {
            // SAFETY: the caller's promise.
            unsafe { run.each(adds) }
        }
        // SAFETY: the caller's promise; the processor has the instructions.
        unsafe { if is_x86_feature_detected!("avx2") { wide(self, adds) } else { self.each(adds) } }
    }

    #[cfg(not(target_arch = "x86_64"))]
    unsafe fn on_this_processor(&self, adds: bool) {
        // SAFETY: the caller's promise.
        unsafe { self.each(adds) }
    }

    #[inline(always)]
    unsafe fn each(&self, adds: bool) {
        let Move { into, from, .. } = self.of;
        // SAFETY: the caller's promise.
        unsafe {
            match (into.1 == Word::F32, from.1 == Word::F32, adds) {
                (true, true, false) => self.blocks::<u32, u32>(each(|_, value| value)),
                (false, false, false) => self.blocks::<u16, u16>(each(|_, value| value)),
                (true, true, true) => self.blocks::<f32, f32>(each(|own, value| own + value)),
                (true, false, false) => self.blocks::<f32, u16>(each(|_, value| wide(value))),
                (true, false, true) => self.blocks::<f32, u16>(each(|own, value| own + wide(value))),
                (false, true, false) => self.blocks::<u16, f32>(|into, from| {
                    // NaNs are rare, and without them a block takes fewer instructions.
                    if from.iter().fold(false, |any, value| any | value.is_nan()) {
                        each(|_, value| narrow(value))(into, from);
                    } else {
                        each(|_, value| rounded(value))(into, from);
                    }
                }),
                (false, true, true) => self.blocks::<u16, f32>(each(|own, value| narrow(wide(own) + value))),
                (false, false, true) => {
                    self.blocks::<u16, u16>(each(|own, value| narrow(wide(own) + wide(value))))
                }
            }
        }
    }

    /// Calls `made` with short parts of the run, one after the other, and prefetches later ones.
    #[inline(always)]
    unsafe fn blocks<T, U>(&self, made: impl Fn(&mut [T], &[U])) {
        // SAFETY: the caller's promise.
        let (into, from) = unsafe {
            let into = with_exposed_provenance_mut::<T>(self.of.into.0).add(self.start);
            let from = with_exposed_provenance_mut::<U>(self.of.from.0).add(self.start);
            (std::slice::from_raw_parts_mut(into, self.len), std::slice::from_raw_parts(from, self.len))
        };
        let (mut into, mut from) = (into.chunks_exact_mut(BLOCK), from.chunks_exact(BLOCK));
        for (into, from) in into.by_ref().zip(from.by_ref()) {
            prefetch(into);
            prefetch(from);
            made(into, from);
        }
        made(into.into_remainder(), from.remainder());
    }
}

/// Returns a function that makes each element of a block from its own value and the other tensor's value.
#[inline(always)]
fn each<T: Copy, U: Copy>(made: impl Fn(T, U) -> T) -> impl Fn(&mut [T], &[U]) {
    move |into, from| into.iter_mut().zip(from).for_each(|(own, value)| *own = made(*own, *value))
}

/// Asks for the memory some blocks after this one. Past the end of a tensor it does nothing.
#[inline(always)]
fn prefetch<T>(block: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of_val(block)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(block.as_ptr().cast::<i8>().wrapping_add(AHEAD_BYTES + line)) }
    }
}

/// Returns a bfloat16's value.
#[inline(always)]
fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Returns the nearest bfloat16, or the one NaN that PyTorch stores.
#[inline(always)]
fn narrow(value: f32) -> u16 {
    if value.is_nan() { 0x7fc0 } else { rounded(value) }
}

/// Returns the nearest bfloat16 of a value that is not NaN.
#[inline(always)]
fn rounded(value: f32) -> u16 {
    let bits = value.to_bits();
    (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16
}
