//! Locks and threads of the host device and the pool: the standard library's, or shuttle's in its tests.
//!
//! Shuttle runs the same code on one thread and chooses who goes next at every lock, wait and notification
//! (`src/host/interleavings/`). This file holds only names; shuttle does not control anything else.

#[cfg(not(all(test, shuttle)))]
pub(crate) use std::{
    sync::atomic::AtomicUsize,
    sync::{Condvar, Mutex, MutexGuard},
    thread::Builder,
};

#[cfg(all(test, shuttle))]
pub(crate) use shuttle::{
    sync::atomic::AtomicUsize,
    sync::{Condvar, Mutex, MutexGuard},
    thread::Builder,
};
