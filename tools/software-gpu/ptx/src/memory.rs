//! The memory that kernels reach through global and generic addresses; the caller's, who judges every access.
//!
//! Addresses are those of the caller's allocations. An access by the lanes of a warp comes as one call if their
//! addresses follow each other.

/// The global memory of a launch.
pub trait Memory {
    /// Reads the bytes from this address on.
    ///
    /// # Errors
    /// The first byte that may not be read, and why.
    fn load(&mut self, address: u64, into: &mut [u8]) -> Result<(), Refusal>;

    /// Writes the bytes from this address on; writes none if it fails.
    ///
    /// # Errors
    /// The first byte that may not be written, and why.
    fn store(&mut self, address: u64, from: &[u8]) -> Result<(), Refusal>;

    /// Replaces the little-endian integer of 4 or 8 bytes by what `change` makes of it, atomically; returns the old one.
    ///
    /// # Errors
    /// The first byte that may not be read or written, and why.
    fn update(
        &mut self,
        address: u64,
        bytes: usize,
        change: &mut dyn FnMut(u64) -> u64,
    ) -> Result<u64, Refusal>;
}

/// Why a memory refuses an access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The first byte that is refused.
    pub address: u64,
    /// Lower case, without the address.
    pub why: String,
}
