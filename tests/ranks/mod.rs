//! Several ranks: the bits of one rank that gets the sums, hooks and compression, and events that end a group.
//!
//! Ranks are threads of this process; tests that need GPUs are in `cuda::gpu`.

#[cfg(not(kernels_only))]
mod broken;
mod calls;
pub(crate) mod compression;
#[cfg(not(kernels_only))]
mod conformance;
#[cfg(not(kernels_only))]
mod custom_calls;
mod divisors;
pub(crate) mod failures;
#[cfg(not(kernels_only))]
mod fsdp;
#[cfg(not(kernels_only))]
mod fsdp_hostile;
pub(crate) mod hooks;
#[cfg(not(kernels_only))]
mod hsdp;
#[cfg(not(kernels_only))]
mod lent_memory;
pub(crate) mod loaded;
mod local;
#[cfg(not(kernels_only))]
mod micro_batches;
#[cfg(not(kernels_only))]
mod micro_batches_hostile;
pub(crate) mod multirank;
#[cfg(not(kernels_only))]
mod offload;
#[cfg(not(kernels_only))]
mod readers;
mod rescue;
pub(crate) mod splits;
#[cfg(not(kernels_only))]
mod strangers;
#[cfg(not(kernels_only))]
mod sum_hooks;
mod sums_by_caller;
#[cfg(not(kernels_only))]
mod together;
pub(crate) mod uneven;
#[cfg(not(kernels_only))]
mod written;
pub(crate) mod zero;
#[cfg(not(kernels_only))]
mod zero_failures;
#[cfg(not(kernels_only))]
mod zero_lamb;
#[cfg(not(kernels_only))]
mod zero_local;
#[cfg(not(kernels_only))]
mod zero_random;
#[cfg(not(kernels_only))]
mod zero_shares;
