//! One allocation of a GPU's memory, in the order of a stream: freed after the work that is on the stream then.
//!
//! Neither call waits, nor takes memory from a kernel in flight. (CUDA's stream-ordered allocator.)
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::driver::Driver;
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, StreamHandle};

/// One allocation, freed after the work that is on its stream.
pub(super) struct Arena {
    driver: Arc<dyn Driver>,
    stream: StreamHandle,
    pub(super) address: DevicePtr,
}

impl Arena {
    /// Allocates memory with arbitrary contents, for work that comes after what is on the stream.
    pub(super) fn new(driver: &Arc<dyn Driver>, bytes: u64, stream: StreamHandle) -> Result<Arena> {
        let address = driver.allocate(bytes, stream)?;
        pointer(address)?;
        Ok(Arena { driver: Arc::clone(driver), stream, address })
    }

    pub(super) fn zeroed(driver: &Arc<dyn Driver>, bytes: u64, stream: StreamHandle) -> Result<Arena> {
        let arena = Arena::new(driver, bytes, stream)?;
        if bytes > 0 {
            // SAFETY: just allocated, so many bytes long, on this stream.
            unsafe { driver.zero(arena.address, bytes, stream)? };
        }
        Ok(arena)
    }

    /// Returns its first byte.
    pub(super) fn base(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.address.0 as usize)
    }

    /// Lets it be freed on another stream, which has come after all that use it.
    pub(super) fn free_on(&mut self, stream: StreamHandle) {
        self.stream = stream;
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated by this driver; `CudaDevice` has made this stream wait for all others that use it.
        unsafe { self.driver.free(self.address, self.stream) }
    }
}

/// Returns an address as a pointer, which is not null.
pub(super) fn pointer(address: DevicePtr) -> Result<NonNull<u8>> {
    let none =
        || Error::Device { call: "cuMemAllocFromPoolAsync", code: 0, name: "a null address".to_owned() };
    // Exposed, because in tests the device's memory is host memory.
    NonNull::new(ptr::with_exposed_provenance_mut(address.0 as usize)).ok_or_else(none)
}
