//! Device memory that NCCL allocates, so that it can reduce it in place on every rank.
//!
//! It is registered with the communicator if both support that. It is freed exactly once, whether the memory or the
//! communicator goes first.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use crate::collective::Allocation;
use crate::cuda::context::with_device;
use crate::cuda::nccl::bindings::ncclResult_t;
use crate::cuda::nccl::library::Library;
use crate::cuda::nccl::raw::Registration;
use crate::cuda::nccl::shared::Shared;
use crate::error::{Error, Result};

struct Owner {
    shared: Arc<Shared>,
    library: &'static Library,
    address: *mut c_void,
    registration: Option<Registration>,
}

// SAFETY: only this frees the address.
unsafe impl Send for Owner {}
// SAFETY: as above; a shared reference allows nothing.
unsafe impl Sync for Owner {}

/// Allocates memory, or returns `None` if the library cannot.
pub(super) fn allocate(shared: &Arc<Shared>, bytes: u64) -> Result<Option<Allocation>> {
    let too_much = || Error::range("bytes", bytes, "less than this machine's address space");
    let bytes = usize::try_from(bytes.max(1)).map_err(|_| too_much())?;
    let (address, library, registration) = shared.with_raw(|raw| {
        let library = raw.library();
        if library.functions.ncclMemAlloc.is_err() || library.functions.ncclMemFree.is_err() {
            return Ok((ptr::null_mut(), library, None));
        }
        with_device(shared.device, || {
            let mut address = ptr::null_mut();
            // SAFETY: the device is current; writes one address.
            match unsafe { library.functions.ncclMemAlloc(&mut address, bytes) } {
                ncclResult_t::ncclSuccess => Ok((address, library, raw.register(address, bytes))),
                code => Err(library.error(shared.rank, "ncclMemAlloc", code)),
            }
        })
    })?;
    if address.is_null() {
        return Ok(None);
    }
    let owner = Owner { shared: Arc::clone(shared), library, address, registration };
    // SAFETY: that many bytes of this device, which the owner frees.
    Ok(Some(unsafe { Allocation::new(address.cast(), Box::new(owner)) }))
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(registration) = self.registration.take() {
            // A communicator that has ended has no registrations.
            let _ = self.shared.with_raw(|raw| {
                raw.deregister(registration);
                Ok(())
            });
        }
        // A failure here means that the device is gone, and the memory with it.
        let _ = with_device(self.shared.device, || {
            // SAFETY: `ncclMemAlloc` made it, and its user has dropped it.
            unsafe { self.library.functions.ncclMemFree(self.address) };
            Ok(())
        });
    }
}
