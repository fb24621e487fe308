//! The groups of a hybrid strategy: neighbours, whose shards together are a full tensor, and replicas, which have one
//! shard.
//!
//! Each rank is in one group of either kind, and the two have no other rank in common. Together they reach all ranks, so what
//! both kinds compare, all ranks agree on.
//! (Zhao et al., VLDB 2023, "PyTorch FSDP", section 3.2.2, hybrid sharding.)

use std::sync::Arc;

use crate::collective::Collective;
use crate::error::{Error, Result};
use crate::op::Group;

/// One rank's communicators of its two groups.
#[derive(Clone)]
pub(crate) struct Groups {
    shards: Arc<dyn Collective>,
    replicas: Arc<dyn Collective>,
}

impl Groups {
    /// Makes both groups. All ranks of `world` call it at the same point, with the same size of a group of neighbours.
    pub(crate) fn new(world: &dyn Collective, shard_size: u32) -> Result<Groups> {
        let (rank, ranks) = (world.rank(), world.world_size());
        let first = rank - rank % shard_size;
        let shards: Vec<u32> = (first..first + shard_size).collect();
        let replicas: Vec<u32> = (rank % shard_size..ranks).step_by(shard_size as usize).collect();
        Ok(Groups { shards: world.subgroup(&shards)?, replicas: world.subgroup(&replicas)? })
    }

    /// Makes a second communicator of this rank's neighbours.
    pub(crate) fn duplicate_of_shards(&self) -> Result<Arc<dyn Collective>> {
        self.shards.duplicate()
    }

    /// The communicator of a group, where that is not the world.
    pub(crate) fn of(&self, group: Group) -> Option<&Arc<dyn Collective>> {
        match group {
            Group::World => None,
            Group::Shards => Some(&self.shards),
            Group::Replicas => Some(&self.replicas),
        }
    }

    /// Returns both.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &dyn Collective> {
        [&*self.shards, &*self.replicas].into_iter()
    }

    /// Ends both.
    pub(crate) fn abort(&self, cause: &Error) {
        self.shards.abort(cause);
        self.replicas.abort(cause);
    }
}

/// Returns the place of a rank in a group of some of so many ranks.
///
/// # Errors
/// `Layout` unless the group names this rank and others, each once.
pub(crate) fn place_in(group: &[u32], rank: u32, world_size: u32) -> Result<u32> {
    let is_new = |(k, other): (usize, &u32)| *other < world_size && !group[..k].contains(other);
    let place = group.iter().position(|other| *other == rank);
    place.filter(|_| group.iter().enumerate().all(is_new)).map(|place| place as u32).ok_or_else(|| {
        let wrong = format_args!("made by rank {rank} of {world_size}");
        Error::layout(
            format_args!("group of ranks {group:?}"),
            wrong,
            "name each of its ranks once, this one too",
        )
    })
}
