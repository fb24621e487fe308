//! Copies and sums between lists of float32 and bfloat16 tensors, on all threads at once.
//!
//! A sum is of float32 and is rounded once, to the nearest even, when it is stored. No tensor is written before all have been
//! checked.
#![allow(unsafe_code)]

use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use instep::Team;

use crate::openmp::OpenMp;
use crate::tensors::Word;

/// Elements that a thread takes at a time.
const CHUNK: usize = 1 << 15;
/// The number of elements from which a second thread is worth its start.
pub(super) const LEAST_SHARED: usize = 1 << 17;

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
/// The addresses are those of `len` initialised elements of float32 or bfloat16, aligned to them, and no other memory that
/// is read or written here overlaps what is written.
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
                (true, true, false) => self.elements::<u32, u32>(|_, value| value),
                (false, false, false) => self.elements::<u16, u16>(|_, value| value),
                (true, true, true) => self.elements::<f32, f32>(|own, value| own + value),
                (true, false, false) => self.elements::<f32, u16>(|_, value| wide(value)),
                (true, false, true) => self.elements::<f32, u16>(|own, value| own + wide(value)),
                (false, true, false) => self.elements::<u16, f32>(|_, value| narrow(value)),
                (false, true, true) => self.elements::<u16, f32>(|own, value| narrow(wide(own) + value)),
                (false, false, true) => {
                    self.elements::<u16, u16>(|own, value| narrow(wide(own) + wide(value)))
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn elements<T: Copy, U: Copy>(&self, made: impl Fn(T, U) -> T) {
        // SAFETY: the caller's promise.
        unsafe {
            let into = with_exposed_provenance_mut::<T>(self.of.into.0).add(self.start);
            let from = with_exposed_provenance_mut::<U>(self.of.from.0).add(self.start);
            let into = std::slice::from_raw_parts_mut(into, self.len);
            let from = std::slice::from_raw_parts(from, self.len);
            for (own, value) in into.iter_mut().zip(from) {
                *own = made(*own, *value);
            }
        }
    }
}

/// A bfloat16's value.
#[inline(always)]
fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bfloat16, or its one NaN that PyTorch stores.
#[inline(always)]
fn narrow(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if value.is_nan() { 0x7fc0 } else { rounded as u16 }
}
