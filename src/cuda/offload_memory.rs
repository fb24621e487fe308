//! The host's memory of steps that a GPU leaves to the host: page-locked where the GPU reaches it, ordinary elsewhere.
//!
//! Copies and collectives reach parameters, gradients and control memory alone; states are the largest part and stay
//! pageable. Freed only when the GPU is idle. (Ren et al., USENIX ATC 2021, "ZeRO-Offload".)

use std::ptr::NonNull;
use std::sync::Arc;

use super::driver::Driver;
use super::owned::OwnedMapped;
use crate::error::{Error, Result};
use crate::host::memories::Arena;
use crate::host::stagger::Stagger;
use crate::launch::Region;
use crate::op::Memory;

/// See the module.
pub(super) struct HostMemory {
    /// Whether what is copied is page-locked; control memory always is.
    is_pinned: bool,
    stagger: Stagger,
    pinned: Vec<OwnedMapped>,
    pageable: Vec<Arena>,
}

impl HostMemory {
    pub(super) fn new(is_pinned: bool) -> HostMemory {
        let (stagger, pinned, pageable) = (Stagger::default(), Vec::new(), Vec::new());
        HostMemory { is_pinned, stagger, pinned, pageable }
    }

    /// Allocates zeros for a memory.
    pub(super) fn zeroed(&mut self, driver: &Arc<dyn Driver>, memory: Memory, bytes: u64) -> Result<Region> {
        let offset = self.stagger.next(bytes);
        let is_pinned = match memory {
            Memory::Control => true,
            Memory::HostParams | Memory::HostGrads => self.is_pinned,
            _ => false,
        };
        if !is_pinned {
            let arena = Arena::zeroed(bytes, offset)?;
            let (base, bytes) = arena.run();
            self.pageable.push(arena);
            return Ok(Region::whole(base, bytes));
        }
        let mapped = OwnedMapped::new(driver, (bytes + offset) as usize)?;
        if mapped.host().addr().get() as u64 != mapped.device().0 {
            let wrong = "the driver maps page-locked memory to other addresses than the host's";
            return Err(Error::unsupported("offload", wrong, "leave StepperBuilder::offload out"));
        }
        let base = mapped.host().as_ptr().wrapping_add(offset as usize);
        let base = NonNull::new(base).unwrap_or(mapped.host());
        self.pinned.push(mapped);
        Ok(Region::whole(base, bytes))
    }
}
