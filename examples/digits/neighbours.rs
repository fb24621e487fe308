//! A collective for ranks without shards. This collective adds gradients in the same order as ranks that shard in
//! groups.
//!
//! A sum of floats depends on the order, so both runs that are compared must add in the same order.

use std::sync::Arc;

use instep::collective::{Call, CollectiveKind};
use instep::{Collective, Error, Result};

/// Adds up the gradients of neighbouring ranks first, and then the resulting sums.
pub(crate) struct Neighbours<C> {
    all: C,
    neighbours: Arc<dyn Collective>,
    replicas: Arc<dyn Collective>,
}

impl<C: Collective> Neighbours<C> {
    pub(crate) fn new(all: C, shard_size: u32) -> Result<Neighbours<C>> {
        let (rank, ranks) = (all.rank(), all.world_size());
        let group = |is_in: &dyn Fn(u32) -> bool| {
            all.subgroup(&(0..ranks).filter(|k| is_in(*k)).collect::<Vec<u32>>())
        };
        let neighbours = group(&|other| other / shard_size == rank / shard_size)?;
        let replicas = group(&|other| other % shard_size == rank % shard_size)?;
        Ok(Neighbours { all, neighbours, replicas })
    }
}

impl<C: Collective> Collective for Neighbours<C> {
    fn inner(&self) -> Option<&dyn Collective> {
        Some(&self.all)
    }

    fn rank(&self) -> u32 {
        self.all.rank()
    }

    fn world_size(&self) -> u32 {
        self.all.world_size()
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        if call.kind != CollectiveKind::AllReduce {
            return self.all.enqueue(call);
        }
        self.neighbours.enqueue(call)?;
        // A stepper's sums are in place.
        self.replicas.enqueue(call)
    }

    fn abort(&self, cause: &Error) {
        self.all.abort(cause);
        self.neighbours.abort(cause);
        self.replicas.abort(cause);
    }
}
