//! Work of another library on a stream, such as a collective of NCCL: the interface between the two libraries.
//!
//! A library describes the work and the memory that it touches. This driver asks it to continue until it has ended. The
//! real driver has no such functions, so only the software GPU's own libraries may call them.
#![allow(unsafe_code, missing_docs)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

/// Work of another library. It reads one range and writes another.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ForeignWork {
    pub name: *const c_char,
    pub source: u64,
    pub source_bytes: usize,
    pub target: u64,
    pub target_bytes: usize,
    /// Work of one order runs in the order in which it was enqueued, even on several streams.
    pub order: u64,
    /// The number of works of this one's launch; a line of the trace shows it if there are several.
    pub together: usize,
    /// Goes on with one run of the work; 0 if it cannot end yet. Runs of one call have different tickets.
    pub step:
        unsafe extern "C" fn(call: *mut c_void, ticket: u64, source: *const u8, target: *mut u8) -> c_int,
    /// Frees the call, once nothing can run it any more.
    pub release: unsafe extern "C" fn(call: *mut c_void),
    pub call: *mut c_void,
}

pub(crate) struct Foreign {
    pub(crate) name: String,
    pub(crate) work: ForeignWork,
    /// The run whose accesses were judged.
    judged: AtomicU64,
}

// SAFETY: a library that describes work lets any thread run it; the lock of the GPU keeps runs apart.
unsafe impl Send for Foreign {}
// SAFETY: a library that describes work lets any thread run it; the lock of the GPU keeps runs apart.
unsafe impl Sync for Foreign {}

impl Foreign {
    /// # Safety
    /// The fields meet their documented conditions.
    pub(crate) unsafe fn new(work: ForeignWork) -> Foreign {
        // SAFETY: by the contract.
        let name = unsafe { CStr::from_ptr(work.name) }.to_string_lossy().into_owned();
        Foreign { name, work, judged: AtomicU64::new(0) }
    }

    /// Returns whether the run of a ticket is one whose accesses must be judged.
    pub(crate) fn is_new(&self, ticket: u64) -> bool {
        self.judged.swap(ticket, Ordering::Relaxed) != ticket
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: the last owner of the call.
        unsafe { (self.work.release)(self.work.call) };
    }
}
