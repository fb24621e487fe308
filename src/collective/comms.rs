//! The communicators of one rank, and the calls that the rank's stepper makes on them. One communicator contains all
//! ranks. A sharded plan needs further communicators.
//!
//! A hybrid strategy has two kinds of group: neighbours and replicas. The shards of all neighbours in a group together
//! form a full tensor. Replicas have the same shard. Each rank is in one group of each kind, and any two ranks have at
//! most one group in common. If a value is equal within every group of both kinds, it is equal on all ranks. (Zhao et
//! al., VLDB 2023, "PyTorch FSDP", section 3.2.2, hybrid sharding.)

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use crate::collective::{Call, CallKey, Collective};
use crate::error::{Error, Result};
use crate::layout::Plan;
use crate::op::{Action, Group, Op, Span, Stream, Words};

#[derive(Clone)]
pub(crate) struct Comms {
    pub(crate) world: Arc<dyn Collective>,
    /// The communicator of the gather stream, if the plan is sharded.
    gathers: Option<Arc<dyn Collective>>,
    /// The communicators of neighbours and of replicas, if there are several groups.
    groups: Option<[Arc<dyn Collective>; 2]>,
    /// How long this rank may wait for other ranks.
    pub(crate) deadline: Duration,
    /// The text that this rank adds to an error about ranks that differ.
    pub(crate) words: Arc<Words>,
}

impl Comms {
    /// Returns the communicators of a plan without shards. Such a plan needs only the communicator `world`.
    pub(crate) fn new(world: Arc<dyn Collective>, deadline: Duration, words: Arc<Words>) -> Comms {
        Comms { world, gathers: None, groups: None, deadline, words }
    }

    /// Returns the same communicators with another text for errors about ranks that differ.
    pub(crate) fn with_words(&self, words: &Arc<Words>) -> Comms {
        Comms { words: Arc::clone(words), ..self.clone() }
    }

    /// Makes the communicators of the gather stream and of the groups. All ranks make this call together. Before this
    /// call, the caller must therefore finish every check that can refuse the plan.
    pub(crate) fn split(&mut self, plan: &Plan) -> Result<()> {
        if plan.replicas() > 1 {
            let (rank, ranks, size) = (self.world.rank(), self.world.world_size(), plan.shards().0);
            let first = rank - rank % size;
            let neighbours: Vec<u32> = (first..first + size).collect();
            let replicas: Vec<u32> = (rank % size..ranks).step_by(size as usize).collect();
            self.groups = Some([self.world.subgroup(&neighbours)?, self.world.subgroup(&replicas)?]);
        }
        if plan.is_sharded() {
            self.gathers = Some(self.of(Stream::Reduce, Group::Shards).duplicate()?);
        }
        Ok(())
    }

    /// Returns the communicator for ops of this stream and group.
    fn of(&self, stream: Stream, group: Group) -> &dyn Collective {
        let gathers = self.gathers.as_deref().filter(|_| stream == Stream::Gather);
        let of_group = match (group, &self.groups) {
            (Group::World, _) | (_, None) => &self.world,
            (Group::Shards, Some([neighbours, _])) => neighbours,
            (Group::Replicas, Some([_, replicas])) => replicas,
        };
        gathers.unwrap_or(&**of_group)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &dyn Collective> {
        let of_groups = self.groups.iter().flatten().map(|comm| &**comm);
        std::iter::once(&*self.world).chain(self.gathers.as_deref()).chain(of_groups)
    }

    pub(crate) fn abort(&self, cause: &Error) {
        self.iter().for_each(|comm| comm.abort(cause));
    }

    /// Compares a number with the numbers of the other ranks, and returns an error if they differ.
    ///
    /// # Errors
    /// Errors as for [`Collective::agree`].
    pub(crate) fn agree(&self, number: u64) -> Result<()> {
        self.world.agree(number, self.deadline).map_err(|error| self.words.add_to(error, number))
    }

    /// Takes part in the collectives of `ops`. A GPU may run these collectives as one launch. `call` makes a [`Call`]
    /// from a key, the number of ranks, the source and the destination.
    ///
    /// # Errors
    /// Errors as for [`Collective::enqueue`].
    pub(crate) fn enqueue<'a>(
        &'a self,
        ops: &[Op],
        plan: &Plan,
        call: impl Fn(CallKey, u32, [Span; 2]) -> Call<'a>,
    ) -> Result<()> {
        let Some((Op { stream, action: Action::Collective { group, .. } }, rest)) = ops.split_first() else {
            return Ok(());
        };
        let (comm, latest) = (self.of(*stream, *group), Cell::new(0));
        let mut calls = ops.iter().filter_map(|op| {
            let Action::Collective { kind, pass, agreement, bucket, src, dst, .. } = op.action else {
                return None;
            };
            latest.set(agreement);
            let (dtype, bytes) = (Span::dtype_of_call(kind, [src, dst], plan), src.bytes().max(dst.bytes()));
            let key = CallKey { kind, pass, bucket, dtype, bytes, agreement };
            Some(call(key, comm.world_size(), [src, dst]).with_words(&self.words))
        });
        let outcome = match calls.next() {
            Some(mut only) if rest.is_empty() => comm.enqueue(&mut only),
            first => comm.enqueue_all(&mut first.into_iter().chain(calls)),
        };
        outcome.map_err(|error| self.words.add_to(error, latest.get()))
    }
}

/// Returns the index of `rank` in `group`, a list of ranks.
///
/// # Errors
/// `Layout` if the list lacks `rank`, contains a rank twice, or contains a rank that is not below `world_size`.
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
