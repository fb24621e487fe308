//! Steppers on a GPU: the host's bits, the driver's calls, captures and failures.
//!
//! They run on a stand-in for the driver, or on a real GPU with `INSTEP_REQUIRE_GPU=1`; `gpu` needs a real one.

pub(crate) mod addresses;
pub(crate) mod bitexact;
pub(crate) mod captures;
mod casts;
pub(crate) mod driver_calls;
pub(crate) mod failures;
#[cfg(feature = "cuda")]
pub(crate) mod gpu;
pub(crate) mod mixed;
mod offload;
mod offload_random;
pub(crate) mod rebinding;
pub(crate) mod shard_cases;
mod shards;
mod sum_hooks;
pub(crate) mod training;
pub(crate) mod unsharded;
