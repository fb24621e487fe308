//! Rendezvous of the ranks of a group: rank 0 listens until all have come, the others connect to it.
//!
//! Anything can connect: a port scanner, a rank of yesterday's job, a second process with the same rank. None of them
//! ends the other ranks' wait. With a secret ([`Options::secret`]) a rank gets a seat, and NCCL's id, only after both
//! ends have proven that they know it. Without one nothing is authenticated, so the port belongs on a trusted network.

mod gather;
mod join;
mod listen;

use std::time::Duration;

use crate::cuda::nccl::group::Group;
use crate::cuda::nccl::{Options, UniqueId};
use crate::error::Result;
use crate::layout::fold;

#[cfg(test)]
pub(super) use gather::{Gathering, MOST_GUESTS};
#[cfg(test)]
pub(super) use join::{Attempt, attempt, repeat};
#[cfg(test)]
pub(super) use listen::{interfaces, listen};

/// Longest time from a connection until its rank has a seat or a refusal.
const INTRODUCTION: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(1);

/// Meets the other ranks. Rank 0 makes the id that all of them return.
pub(super) fn meet(
    options: &Options,
    make_id: impl FnOnce() -> Result<UniqueId>,
) -> Result<(Group, UniqueId)> {
    if options.rank > 0 {
        return join::join(options);
    }
    let id = make_id()?;
    let peers = if options.world_size > 1 {
        gather::gather(listen::listen(options)?, options, id)?
    } else {
        Vec::new()
    };
    Ok((Group::new(options.rank, options.world_size, peers), id))
}

/// Returns the number that tells jobs apart. It keeps them from meeting by mistake; it does not authenticate.
pub(super) fn job(options: &Options) -> u64 {
    fold(0xcbf2_9ce4_8422_2325, options.job.as_bytes())
}
