//! The memory that kernels reach through global and generic addresses. The pointer belongs to the caller, who checks
//! every access.
//!
//! Addresses are those of the caller's allocations. An access by the lanes of a warp comes as one call if their
//! addresses follow each other.

/// The global memory of a launch.
pub trait Memory {
    /// Reads the bytes from this address on.
    ///
    /// # Errors
    /// The first byte that may not be read, and the reason.
    fn load(&mut self, address: u64, into: &mut [u8]) -> Result<(), Refusal>;

    /// Writes the bytes from this address on. Writes none if it fails.
    ///
    /// # Errors
    /// The first byte that may not be written, and the reason.
    fn store(&mut self, address: u64, from: &[u8]) -> Result<(), Refusal>;

    /// Replaces the little-endian integer of 4 or 8 bytes by the result of `change`, atomically, and returns the old
    /// value.
    ///
    /// # Errors
    /// The first byte that may not be read or written, and the reason.
    fn update(
        &mut self,
        address: u64,
        bytes: usize,
        change: &mut dyn FnMut(u64) -> u64,
    ) -> Result<u64, Refusal>;
}

/// The reason why a memory refuses an access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The first byte that is refused.
    pub address: u64,
    /// The reason in lower case, without the address.
    pub why: String,
}
