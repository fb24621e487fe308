//! The system's allocator, which also records how much was requested.
//!
//! Requests are counted before they are served, because a request that the system refuses is the worst of all. This
//! file must not allocate.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the requests that go through it.
pub(crate) struct Counting;

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);
static PEAK_BYTES: AtomicUsize = AtomicUsize::new(0);
static LARGEST_BYTES: AtomicUsize = AtomicUsize::new(0);

/// The requests since the last [`reset`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    /// The largest single request.
    pub(crate) largest_bytes: usize,
    /// The most bytes that were allocated at a time, beyond those at the reset.
    pub(crate) peak_bytes: usize,
}

/// Starts a new count, and returns the bytes that are allocated now.
pub(crate) fn reset() -> usize {
    let live = LIVE_BYTES.load(Ordering::Relaxed);
    PEAK_BYTES.store(live, Ordering::Relaxed);
    LARGEST_BYTES.store(0, Ordering::Relaxed);
    live
}

/// Returns the requests since [`reset`] returned `held_bytes`.
pub(crate) fn asked(held_bytes: usize) -> Asked {
    Asked {
        largest_bytes: LARGEST_BYTES.load(Ordering::Relaxed),
        peak_bytes: PEAK_BYTES.load(Ordering::Relaxed).saturating_sub(held_bytes),
    }
}

fn note(bytes: usize) {
    LARGEST_BYTES.fetch_max(bytes, Ordering::Relaxed);
    let live = LIVE_BYTES.fetch_add(bytes, Ordering::Relaxed).wrapping_add(bytes);
    PEAK_BYTES.fetch_max(live, Ordering::Relaxed);
}

// SAFETY: forwards to the system's allocator and counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's contract is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's contract is the system's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract is the system's.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_bytes: usize) -> *mut u8 {
        note(new_bytes);
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract is the system's.
        unsafe { System.realloc(pointer, layout, new_bytes) }
    }
}
