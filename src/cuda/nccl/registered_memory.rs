//! Device memory that NCCL allocates, so that it can reduce it in place on every rank.
//!
//! It is registered with the communicator if both support that. The registration ends before the memory is freed, whether
//! the memory or the communicator goes first.

use std::sync::Arc;

use crate::collective::Allocation;
use crate::cuda::context::with_device;
use crate::cuda::nccl::library::Memory;
use crate::cuda::nccl::raw::Registration;
use crate::cuda::nccl::shared::Shared;
use crate::error::{Error, Result};

struct Owner {
    shared: Arc<Shared>,
    registration: Option<Registration>,
    /// Dropped after the registration has been removed.
    memory: Memory,
}

impl AsRef<Memory> for Owner {
    fn as_ref(&self) -> &Memory {
        &self.memory
    }
}

/// Allocates memory, or returns `None` if the library cannot.
pub(super) fn allocate(shared: &Arc<Shared>, bytes: u64) -> Result<Option<Allocation>> {
    let too_much = || Error::range("bytes", bytes, "less than this machine's address space");
    let bytes = usize::try_from(bytes.max(1)).map_err(|_| too_much())?;
    let allocated = shared.with_raw(&shared.first, |raw| {
        let Some(memory) = raw.library().allocate(shared.seat.rank, shared.seat.device, bytes)? else {
            return Ok(None);
        };
        let registration = with_device(shared.seat.device, || Ok(raw.register(memory.address(), bytes)))?;
        Ok(Some((memory, registration)))
    })?;
    Ok(allocated.map(|(memory, registration)| {
        Memory::lend(Owner { shared: Arc::clone(shared), registration, memory })
    }))
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(registration) = self.registration.take() {
            // A communicator that has ended has no registrations.
            let _ = self.shared.with_raw(&self.shared.first, |raw| {
                raw.deregister(registration);
                Ok(())
            });
        }
    }
}
