//! Memory for gradients. NCCL allocates the memory if the loaded NCCL has the functions to do so. NCCL then registers
//! the memory with the group's first communicator, unless NCCL has no functions for this, refuses the registration, or
//! the communicator is borrowed from a framework.
//!
//! Registered memory is deregistered before it is freed.
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::collective::Allocation;
use crate::cuda::driver::Entered;
use crate::cuda::nccl::bindings::ncclResult_t;
use crate::cuda::nccl::library::Library;
use crate::cuda::nccl::raw::Registration;
use crate::cuda::nccl::shared::Shared;
use crate::error::{Error, Result};
use crate::handle::Address;

struct Memory {
    shared: Arc<Shared>,
    library: &'static Library,
    address: Address,
    registration: Option<Registration>,
}

/// Allocates memory, or returns `None` if the library cannot allocate memory.
pub(super) fn allocate(shared: &Arc<Shared>, bytes: u64) -> Result<Option<Allocation>> {
    let too_much = || Error::range("bytes", bytes, "less than this machine's address space");
    let bytes = usize::try_from(bytes.max(1)).map_err(|_| too_much())?;
    shared.with_raw(&shared.first, |raw| {
        let (library, functions) = (raw.library, &raw.library.functions);
        if functions.ncclMemAlloc.is_none() || functions.ncclMemFree.is_none() {
            return Ok(None);
        }
        let _entered = Entered::new(&*shared.driver)?;
        let mut address = ptr::null_mut();
        // SAFETY: the device is current, and the call writes one address.
        let code = unsafe { functions.ncclMemAlloc(&mut address, bytes) };
        if code != ncclResult_t::ncclSuccess {
            return Err(library.error(shared.seat.rank, "ncclMemAlloc", code));
        }
        let Some(base) = NonNull::new(address.cast()) else { return Ok(None) };
        let registration = raw.register(address, bytes);
        let memory = Memory { shared: Arc::clone(shared), library, address: Address::of(base), registration };
        // SAFETY: this is memory of this device, with the requested length, and its owner frees it.
        Ok(Some(unsafe { Allocation::new(base.as_ptr(), Box::new(memory)) }))
    })
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(own) = self.registration.take() {
            // A communicator that has ended has no registrations.
            let _ = self.shared.with_raw(&self.shared.first, |raw| {
                raw.deregister(own);
                Ok(())
            });
        }
        // A failure here means that the device is lost, and the memory with it.
        if let Ok(_entered) = Entered::new(&*self.shared.driver) {
            // SAFETY: `ncclMemAlloc` made this memory, and its user has dropped it.
            unsafe { self.library.functions.ncclMemFree(self.address.as_ptr().cast()) };
        }
    }
}
