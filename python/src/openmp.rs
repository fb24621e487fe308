//! Runs steps on the threads of the OpenMP runtime that runs PyTorch's own loops.
//!
//! After each of PyTorch's loops, the runtime's threads spin. If a step had its own threads, the spinning threads would
//! compete with them for the cores. A step therefore uses the runtime's threads. `GOMP_parallel` is the function of
//! GNU's runtime that compiled code calls. Intel's and LLVM's runtimes have this function too.
#![allow(unsafe_code)]

use std::ffi::{c_uint, c_void};
use std::ptr::with_exposed_provenance;

use instep::Team;

/// `void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags)`.
type Parallel = unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

/// An OpenMP runtime.
#[derive(Clone, Copy)]
pub(crate) struct OpenMp(Parallel);

impl OpenMp {
    /// Returns the OpenMP runtime with `GOMP_parallel` at this address, or `None` if the address is 0.
    ///
    /// # Safety
    /// The address is 0, or it is the address of `GOMP_parallel` in a library that stays loaded.
    pub(crate) unsafe fn at(address: usize) -> Option<OpenMp> {
        let function = with_exposed_provenance::<c_void>(address);
        // SAFETY: the caller's promise; a null pointer is `None`.
        unsafe { std::mem::transmute::<*const c_void, Option<Parallel>>(function) }.map(OpenMp)
    }

    pub(crate) fn address(self) -> usize {
        self.0 as usize
    }
}

impl Team for OpenMp {
    fn run(&self, threads: usize, work: &(dyn Fn() + Sync)) {
        unsafe extern "C" fn call(work: *mut c_void) {
            // SAFETY: this is the pointer that is passed below. It leads to a reference that lives until the parallel
            // region has ended.
            unsafe { (*work.cast::<&(dyn Fn() + Sync)>().cast_const())() }
        }
        let mut work = work;
        let threads = c_uint::try_from(threads).unwrap_or(c_uint::MAX);
        // SAFETY: the signature is the function's own. The function returns after the last call, and the calls only
        // read `work`.
        unsafe { (self.0)(call, (&raw mut work).cast(), threads, 0) }
    }
}
