//! NCCL as a [`Collective`](crate::Collective): ranks are processes, each with its own GPU.
//!
//! NCCL moves the sums. The bootstrap opens TCP connections, and the group keeps them: over them ranks compare what
//! they do and learn that a rank has failed or gone. The library is found at run time, so a build needs none. No rank
//! hangs where another could tell it why.

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
#[cfg(any(feature = "cuda", test))]
mod polling;
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

/// The number by which ranks find each other through NCCL; [`unique_id`] makes one.
pub type UniqueId = [u8; 128];

impl Nccl {
    /// Joins the group that the environment describes, as torchrun sets it ([`Options::from_environment`]), on this
    /// rank's GPU. Every process of the group calls it.
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
    /// Returns once all ranks have joined. A process that makes several groups on one port makes them in the same order
    /// on every rank.
    ///
    /// # Errors
    /// `Config` names a variable, or says that another process has this rank. `NcclUnavailable`, `DriverUnavailable`
    /// and `Unsupported` say what this machine lacks. `Deadline` names the ranks that did not join, `Mismatch` another
    /// world size, `PeerLost` a rank that failed meanwhile; `Collective` if NCCL cannot connect. An error leaves
    /// nothing open.
    pub fn from_environment() -> Result<Nccl> {
        Nccl::connect(&Options::from_environment()?)
    }

    /// Joins the group that the options describe.
    ///
    /// # Errors
    /// As for [`from_environment`](Self::from_environment).
    pub fn connect(options: &Options) -> Result<Nccl> {
        Nccl::open(options, None)
    }

    /// Joins the ranks that hold the same id, which the caller has brought to all of them. Address, port, job and
    /// secret are not used. Without their own connections, ranks cannot compare what they do
    /// ([`agree`](crate::Collective::agree) accepts everything) or tell each other why they end, so a rank that
    /// disagrees or dies may be a hang.
    ///
    /// # Errors
    /// As for [`from_environment`](Self::from_environment); `Config` if the options ask for the ledger.
    pub fn with_id(options: &Options, id: UniqueId) -> Result<Nccl> {
        Nccl::open(options, Some(id))
    }
}
