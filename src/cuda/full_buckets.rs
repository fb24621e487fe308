//! The memory of sharded buckets while they are full on this GPU. The memory of the shards is separate.
//!
//! The address of a shard never changes. A full bucket has an address only from its all-gather to its release. The
//! memory of a full bucket is allocated and freed in stream order, so the host never waits (Zhao et al., VLDB 2023,
//! "PyTorch FSDP"; CUDA's stream-ordered allocator). Ops access the shard, and the trainer accesses the full bucket
//! while it exists. With offload, the host has the shard. The GPU then has memory for the bucket only from the bucket's
//! upload to its release.

use std::sync::Arc;

use super::driver::Driver;
use super::owned::{Arena, pointer};
use crate::error::Result;
use crate::handle::{Address, StreamHandle};
use crate::launch::{Piece, Region};
use crate::layout::{Bucket, Plan};
use crate::op::{Memory, Span};

/// The buckets that are full now.
#[derive(Default)]
pub(super) struct Unsharded(Vec<Whole>);

struct Whole {
    span: Span,
    shard: Span,
    arena: Arena,
}

impl Whole {
    fn has(&self, span: Span) -> bool {
        self.span.memory == span.memory && self.span.start <= span.start && span.end <= self.span.end
    }
}

impl Unsharded {
    fn of(&self, span: Span) -> Option<&Whole> {
        self.0.iter().find(|whole| whole.has(span))
    }

    /// Returns the address of a span of a full bucket.
    pub(super) fn find(&self, span: Span) -> Option<*mut u8> {
        let whole = self.of(span).filter(|_| span.start < span.end)?;
        Some(whole.arena.base().wrapping_add((span.start - whole.span.start) as usize))
    }

    /// Returns the part of a full bucket's span that is also in the shard's memory.
    pub(super) fn also_in_shard(&self, span: Span) -> Option<Span> {
        let shard = self.of(span)?.shard;
        let (start, end) = (span.start.max(shard.start), span.end.min(shard.end));
        (start < end).then_some(Span { start, end, ..span })
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.0.iter().map(|whole| (whole.arena.base().addr(), whole.span.bytes()))
    }

    /// Changes the stream on which the memory is freed. Before the memory is freed, the caller makes that stream wait
    /// for all streams that use the memory.
    pub(super) fn free_on(&mut self, stream: StreamHandle) {
        self.0.iter_mut().for_each(|whole| whole.arena.free_on(stream));
    }

    /// Allocates memory for a bucket that is about to be unsharded. The memory is allocated in the order of `stream`,
    /// and freed in the order of `freed_on`.
    pub(super) fn take(
        &mut self,
        driver: &Arc<dyn Driver>,
        [shard, span]: [Span; 2],
        [stream, freed_on]: [StreamHandle; 2],
    ) -> Result<()> {
        if self.of(span).is_none() {
            let mut arena = Arena::new(driver, span.bytes(), stream)?;
            arena.free_on(freed_on);
            self.0.push(Whole { span, shard, arena });
        }
        Ok(())
    }

    /// Frees the memory of the full bucket that contains this span. The memory is freed after all earlier work of the
    /// stream that frees it. If two spans of a bucket are released, the first release frees the memory of the full
    /// bucket.
    pub(super) fn release(&mut self, span: Span) {
        self.0.retain(|whole| !whole.has(span));
    }

    /// Returns the size of `memory` in bytes, as if all its sharded buckets were full. The shard of a bucket that is
    /// full now counts twice, because it is stored in two places. From this size, the stepper subtracts the bytes that
    /// are not on this GPU now.
    pub(super) fn bytes_with(&self, memory: Memory, plan: &Plan) -> u64 {
        let whole = plan.buckets().iter().map(|bucket| {
            let others = Span::others(memory, bucket).into_iter().filter(|_| !bucket.is_local);
            Span::shard(memory, bucket).bytes() + others.map(|others| others.bytes()).sum::<u64>()
        });
        let twice = self.0.iter().filter(|whole| whole.span.memory == memory);
        whole.sum::<u64>() + twice.map(|whole| whole.shard.bytes()).sum::<u64>()
    }
}

/// Returns whether the buckets in `memory` are sharded over the ranks.
pub(super) fn is_sharded(memory: Memory, plan: &Plan) -> bool {
    plan.shards_params() && matches!(memory, Memory::Params | Memory::Copy)
}

/// Returns whether the GPU has no memory for this bucket's parameters except from the bucket's upload to its release.
/// If so, the host has the shard.
pub(super) fn is_resharded(bucket: &Bucket, plan: &Plan) -> bool {
    plan.is_offloaded() && plan.shards_params() && !bucket.is_local
}

/// Returns the spans of the shards in `memory`, except shards that are on the host.
fn spans_of_shards(memory: Memory, plan: &Plan) -> impl Iterator<Item = Span> + '_ {
    let here = plan.buckets().iter().filter(|bucket| !is_resharded(bucket, plan));
    here.map(move |bucket| Span::shard(memory, bucket))
}

pub(super) fn shard_bytes(memory: Memory, plan: &Plan) -> u64 {
    spans_of_shards(memory, plan).map(|span| span.bytes()).sum()
}

/// Returns the addresses of the shards in `memory`. The shards are stored in `arena` one after the other, each at a
/// multiple of 256 elements. The result omits shards that are on the host.
pub(super) fn shards(memory: Memory, plan: &Plan, arena: &Arena) -> Result<Region> {
    let mut next = arena.address();
    let spans = spans_of_shards(memory, plan).filter(|span| span.bytes() > 0);
    let pieces = spans.map(|span| {
        let piece = Piece { start: span.start, bytes: span.bytes(), base: Address::of(pointer(next)?) };
        next.0 += span.bytes();
        Ok(piece)
    });
    Ok(Region::scattered(pieces.collect::<Result<_>>()?))
}
