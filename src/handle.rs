//! Types for raw handles of a GPU's driver: addresses, streams and events. A handle may belong to this crate or to a
//! framework.
//!
//! Handles are numbers, so frameworks of any CUDA version can exchange them with this crate. Making a handle is safe,
//! and does not prove that its target exists. Each function that uses a handle documents its conditions. This file
//! calls no driver.

use std::fmt;
use std::ptr::{self, NonNull};

/// The memory in which an address lies. The memory determines whether the CPU or a GPU can access the bytes.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The CPU's memory.
    Host,
    /// The memory of the CUDA device with this ordinal.
    Cuda(u32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.write_str("host memory"),
            Place::Cuda(ordinal) => write!(f, "memory of cuda:{ordinal}"),
        }
    }
}

/// The address of the first byte of a range, in the CPU's or a GPU's memory. The address is stored as a number, so it
/// may move between threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address(usize);

impl Address {
    /// Exposes the pointer's provenance, so that [`as_ptr`](Self::as_ptr) can restore it.
    pub(crate) fn of(pointer: NonNull<u8>) -> Address {
        Address(pointer.as_ptr().expose_provenance())
    }

    pub(crate) fn get(self) -> u64 {
        self.0 as u64
    }

    pub(crate) fn as_ptr(self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.0)
    }
}

/// An address in a GPU's memory (`CUdeviceptr`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

/// A stream (`CUstream`, `cudaStream_t`). Handles 0 and 1 are the legacy default stream. Handle 2 is the calling
/// thread's own default stream, so handle 2 is a different stream on every thread. If a program is compiled for
/// per-thread default streams, use handle 2 for the program's stream 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct StreamHandle(pub usize);

/// An event (`CUevent`, `cudaEvent_t`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct EventHandle(pub usize);

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
