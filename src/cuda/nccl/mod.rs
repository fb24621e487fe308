//! NCCL as a [`Collective`](crate::Collective): ranks that are processes, each with a GPU of its own.
//!
//! NCCL moves the sums; who is there, whether all mean the same, and who is gone, ranks tell each other over TCP
//! connections that the bootstrap opens and the group keeps. The library is found at run time, so a build needs none.
//! Must never let a rank hang where another one could tell it why.

#[cfg(feature = "cuda")]
mod bindings;
#[cfg(any(feature = "cuda", test))]
mod bootstrap;
#[cfg(feature = "cuda")]
mod communicator;
#[cfg(any(feature = "cuda", test))]
mod group;
#[cfg(any(feature = "cuda", test))]
mod handshake;
#[cfg(feature = "cuda")]
mod library;
#[cfg(any(feature = "cuda", test))]
mod link;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(any(feature = "cuda", test))]
mod message;
mod options;
#[cfg(feature = "cuda")]
mod raw;
mod secret;
#[cfg(feature = "cuda")]
mod shared;
#[cfg(not(feature = "cuda"))]
mod stub;
#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
pub use communicator::Nccl;
#[cfg(feature = "cuda")]
pub use library::{unique_id, version};
pub use options::Options;
pub use secret::Secret;
#[cfg(not(feature = "cuda"))]
pub use stub::{Nccl, unique_id, version};

use crate::error::Result;

/// What ranks need in common to find each other through NCCL; [`unique_id`] makes one.
pub type UniqueId = [u8; 128];

impl Nccl {
    /// Joins the group that the environment describes, as torchrun and its like set it up
    /// ([`Options::from_environment`]), on the GPU of this rank. Every process of the group calls it.
    ///
    /// ```no_run
    /// use instep::Collective;
    /// use instep::cuda::Nccl;
    ///
    /// let comm = Nccl::from_environment()?; // torchrun --nproc-per-node 8 --no-python ./my_program
    /// println!("rank {} of {}", comm.rank(), comm.world_size());
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Returns once all ranks have come. Groups of one process that share a port are made in the same order everywhere.
    ///
    /// # Errors
    /// `Config` names a variable; `NcclUnavailable`, `DriverUnavailable` or `Unsupported` if this machine lacks what it
    /// takes; `Deadline` names the ranks that have not come; `Mismatch` if rank 0 expects another number of ranks;
    /// `PeerLost` if a rank failed meanwhile; `Collective` if NCCL cannot connect. Nothing is left behind.
    pub fn from_environment() -> Result<Nccl> {
        Nccl::connect(&Options::from_environment()?)
    }

    /// Joins the group that the options describe.
    ///
    /// # Errors
    /// As [`from_environment`](Self::from_environment).
    pub fn connect(options: &Options) -> Result<Nccl> {
        Nccl::open(options, None)
    }

    /// Joins the ranks that hold the same id, which the caller has brought to all of them. Address, port, job and
    /// secret are not used: without connections of their own, ranks cannot compare what they do
    /// ([`agree`](crate::Collective::agree) accepts everything) nor tell each other why they end, so a rank that
    /// disagrees or dies may be a hang.
    ///
    /// # Errors
    /// As [`from_environment`](Self::from_environment); `Config` if the options ask for the ledger.
    pub fn with_id(options: &Options, id: UniqueId) -> Result<Nccl> {
        Nccl::open(options, Some(id))
    }
}
