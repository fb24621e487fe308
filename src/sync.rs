//! Locks and threads of the host device and the pool. These types come from the standard library or, in tests that run
//! under shuttle, from the crate shuttle.
//!
//! Shuttle runs the same code on one thread, and chooses the next task at every lock, wait and notification
//! (`tests/interleavings/`). Shuttle does not control anything else.

use std::time::{Duration, Instant};

#[cfg(not(all(test, shuttle)))]
pub(crate) use std::{
    sync::atomic::{AtomicU64, AtomicUsize},
    sync::{Condvar, Mutex, MutexGuard},
    thread::Builder,
};

#[cfg(all(test, shuttle))]
pub(crate) use shuttle::{
    sync::atomic::{AtomicU64, AtomicUsize},
    sync::{Condvar, Mutex, MutexGuard},
    thread::Builder,
};

/// Returns the time since the first call.
#[cfg(not(all(test, shuttle)))]
pub(crate) fn now_ns() -> u64 {
    static ORIGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Returns one of two very different times at random, because shuttle has no clock.
#[cfg(all(test, shuttle))]
pub(crate) fn now_ns() -> u64 {
    use shuttle::rand::Rng;
    if shuttle::rand::thread_rng().gen_bool(0.5) { u64::MAX / 2 } else { 0 }
}

/// Pauses between two reads of an atomic, until a given time has passed.
pub(crate) struct Spin {
    length: Duration,
    start: Option<Instant>,
    looks: u32,
}

impl Spin {
    pub(crate) fn new(length: Duration) -> Spin {
        Spin { length, start: None, looks: 0 }
    }

    /// Pauses, and returns whether to read again. The first pause starts the clock.
    #[cfg(not(all(test, shuttle)))]
    pub(crate) fn again(&mut self) -> bool {
        // After this many pauses, reads the clock and yields the core to other threads.
        const PAUSES: u32 = 64;
        std::hint::spin_loop();
        self.looks = self.looks.wrapping_add(1);
        if self.looks % PAUSES != 1 {
            return true;
        }
        let now = Instant::now();
        let is_early = now - *self.start.get_or_insert(now) < self.length;
        if is_early && self.looks > 1 {
            std::thread::yield_now();
        }
        is_early
    }

    /// Pauses, and allows two reads. Shuttle has no clock, so the two reads represent any number of reads.
    #[cfg(all(test, shuttle))]
    pub(crate) fn again(&mut self) -> bool {
        shuttle::thread::yield_now();
        self.looks += 1;
        !self.length.is_zero() && self.looks < 2
    }
}
