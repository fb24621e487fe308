//! Cuts a layout into buckets, for given bucket caps and a world size.
//!
//! A bucket holds parameters of one precision and one clip set, up to a cap. Parameters are added to buckets in a given
//! order. As DDP has for each type, each combination of storage and clip set has its own open bucket. A bucket closes
//! at the parameter that reaches the cap. Buckets are in the order of their last parameters, which is the order in
//! which backward completes them. Buckets of local parameters come after all other buckets. Every segment starts at a
//! multiple of 256 elements, and every bucket is padded to a multiple of 256 times the number of shards. Shards, norm
//! leaves and vectors are therefore aligned for any cap. Every sum and product is checked, and a plan of 2^56 elements
//! or more is an error.

use std::ops::Range;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::bucket::{Cut, FirstBytes};
use crate::layout::element_types::{Kind, Resolved};
use crate::layout::plan::{QUANTUM, TOO_MANY_ELEMENTS};
use crate::layout::{Bucket, BucketCaps, Layout, Parameter, Plan, Storages, Tails};

impl Plan {
    /// Cuts `layout` into buckets. In each bucket that has elements, the counts that `tails` requests follow the
    /// gradients. Buckets of local parameters do not count contributing ranks. Parameters of different precisions never
    /// share a bucket. Buckets are in the order in which backward completes them, and buckets of local parameters come
    /// last.
    ///
    /// # Errors
    /// `Config` if a cap or the world size is zero, if a [precision](crate::Precision) has no kernel, or if `tails`
    /// requests counts and the gradients' type cannot represent all counts up to the world size. Also returns `Config`
    /// if `storages` names an unknown group, or one group twice. `Layout` if a parameter's own type does not fit its
    /// precision, or if the padded buckets hold 2^56 elements or more.
    pub fn new(
        layout: &Layout,
        world_size: u32,
        caps: BucketCaps,
        tails: Tails,
        storages: impl Into<Storages>,
    ) -> Result<Plan> {
        let storages = storages.into();
        let resolved = storages.resolve(layout)?;
        if world_size == 0 {
            return Err(Error::range("world_size", 0, "1 or more"));
        }
        if caps.first_bytes == 0 || caps.rest_bytes == 0 {
            return Err(Error::range("bucket_cap_bytes", 0, "1 or more"));
        }
        if tails.used || tails.contributors {
            let grads = resolved.kinds.iter().map(|kind| kind.storage.precision.grad);
            if let Some(grad) = { grads }.find(|grad| world_size > largest_count(*grad)) {
                let wrong = format_args!("too few bits to count {world_size} ranks");
                let remedy = "use Unused::StepZero and no uneven_inputs";
                return Err(Error::config("grad", grad, wrong, remedy));
            }
        }
        let backward = (0..layout.parameters().len() as u32).rev();
        let cut = Cut { world_size, shards: world_size, caps, tails, place: None };
        Plan::filled(layout, cut, storages, backward)
    }

    /// Returns a plan with the same buckets, in which this rank steps only one shard of each bucket and has only this
    /// shard's states. All shards of a bucket have the same length. If a shard ends inside a parameter, it ends at a
    /// multiple of 256 elements from the parameter's start. [Local](crate::LayoutBuilder::local) parameters stay full.
    ///
    /// # Errors
    /// `Config` if the rank is not below the world size. `Layout` if the buckets hold 2^56 elements or more.
    /// `Unsupported` if the caller chose the buckets.
    pub fn sharded(&self, layout: &Layout, rank: u32) -> Result<Plan> {
        self.sharded_among(layout, rank, self.cut.map_or(1, |cut| cut.world_size))
    }

    /// Returns a plan like that of [`sharded`](Self::sharded), but with buckets sharded inside groups of `shards`
    /// neighbouring ranks. Ranks with the same index in their groups have the same shard.
    ///
    /// # Errors
    /// Errors as for [`sharded`](Self::sharded). `Config` if the world size is not a multiple of `shards`.
    pub fn sharded_among(&self, layout: &Layout, rank: u32, shards: u32) -> Result<Plan> {
        let Some(cut) = self.cut else {
            let wrong = "the caller's buckets cannot be padded to equal shards";
            return Err(Error::unsupported("sharded plan", wrong, "let the stepper own its buckets"));
        };
        if rank >= cut.world_size {
            let allowed = format_args!("a rank below the world size, {}", cut.world_size);
            return Err(Error::range("rank", rank, allowed));
        }
        if shards == 0 || !cut.world_size.is_multiple_of(shards) {
            let allowed = format_args!("a number that divides the world size, {}", cut.world_size);
            return Err(Error::range("shard_size", shards, allowed));
        }
        let backward = (0..layout.parameters().len() as u32).rev();
        let cut = Cut { place: Some(rank % shards), shards, ..cut };
        let plan = Plan::filled(layout, cut, self.asked.clone(), backward)?;
        Ok(plan.with_gradients(self.gradients).with_actions_of(self))
    }

    /// Cuts `layout` again with the caps of this plan, and fills buckets with the parameters in the given order.
    /// `order` is a list of registration indices.
    ///
    /// # Errors
    /// `Layout` if `order` does not name each parameter exactly once, or if the buckets hold 2^56 elements or more.
    /// `Unsupported` if the caller chose the buckets.
    pub fn reordered(&self, layout: &Layout, order: &[u32]) -> Result<Plan> {
        let Some(cut) = self.cut else {
            let wrong = "buckets that the caller owns cannot be reordered";
            return Err(Error::unsupported("plan", wrong, "add them in the order that you want"));
        };
        let mut named = vec![false; layout.parameters().len()];
        let mut is_new =
            |param: &u32| named.get_mut(*param as usize).is_some_and(|named| !std::mem::replace(named, true));
        if order.len() != layout.parameters().len() || !order.iter().all(&mut is_new) {
            let wrong = "does not name each parameter once";
            return Err(Error::layout("order of parameters", wrong, "pass each registration index once"));
        }
        let plan = Plan::filled(layout, cut, self.asked.clone(), order.iter().copied())?;
        Ok(plan.with_gradients(self.gradients).with_actions_of(self))
    }

    fn filled(
        layout: &Layout,
        cut: Cut,
        storages: Storages,
        order: impl Iterator<Item = u32>,
    ) -> Result<Plan> {
        let (parameters, resolved) = (layout.parameters(), storages.resolve(layout)?);
        let mut plan = Plan { cut: Some(cut), ..Plan::empty(parameters.len(), storages, &resolved) };
        let elements = layout.first_elements();
        // Local parameters come last, so that all elements that are broadcast or reduced form one piece before them.
        let (summed, local): (Vec<u32>, Vec<u32>) =
            order.partition(|param| !parameters[*param as usize].local);
        let mut filling = Filling::new(&resolved, cut.caps);
        for (params, is_local) in [(summed, false), (local, true)] {
            for filled in filling.fill(&params, parameters) {
                let opened = plan.segments.len() as u32;
                for param in filled.params {
                    let index = param as usize;
                    plan.push_segment(&parameters[index], param, elements[index], [0, 0]);
                }
                let segments = opened..plan.segments.len() as u32;
                let last = plan.segments.last().map_or("", |last| &parameters[last.param as usize].name);
                plan.close_bucket(segments, cut, resolved.kinds[filled.kind as usize], is_local)
                    .ok_or_else(|| too_large(last, cut.shards))?;
            }
        }
        Ok(plan)
    }

    /// Closes a bucket. Sets the offsets of the segments that were collected since the last bucket. Returns `None` if
    /// the plan grows too large.
    fn close_bucket(
        &mut self,
        segments: Range<u32>,
        cut: Cut,
        Kind { storage, clip_set }: Kind,
        is_local: bool,
    ) -> Option<()> {
        let Cut { shards, tails, .. } = cut;
        let start = self.len;
        let mut next = start;
        let mut take = |len: u64| {
            let at = next;
            next = at.checked_add(len)?;
            Some(at)
        };
        let of_bucket = &mut self.segments[segments.start as usize..segments.end as usize];
        for segment in of_bucket.iter_mut() {
            let offset = take(segment.len.checked_next_multiple_of(QUANTUM)?)?;
            (segment.start, segment.grad_start) = (offset, offset);
        }
        let quantum = QUANTUM.checked_mul(shards.into())?;
        let shared = cut.place.filter(|_| !is_local);
        if shared.is_some() {
            // All shards have the same length, and no shard includes counts of ranks.
            let filled = take(0)? - start;
            take(filled.checked_next_multiple_of(quantum)? - filled)?;
        }
        let tail_start = take(0)?;
        // A bucket without elements needs no tail, because it is not stepped.
        let is_counted = tail_start > start;
        let contributors = if tails.contributors && is_counted && !is_local { Some(take(1)?) } else { None };
        if tails.used && is_counted {
            for segment in of_bucket {
                segment.tail = Some(take(1)?);
            }
        }
        let tail = tail_start..next;
        let len = (next - start).checked_next_multiple_of(quantum)?;
        let end = start.checked_add(len).filter(|end| *end < TOO_MANY_ELEMENTS)?;
        (self.len, self.grads_len) = (end, end);
        let params = start..end;
        let shard = match shared {
            Some(place) => {
                let len = (tail.start - start) / u64::from(shards);
                start + u64::from(place) * len..start + (u64::from(place) + 1) * len
            }
            None => params.clone(),
        };
        let first_bytes = FirstBytes::default();
        self.push(Bucket {
            start,
            len,
            params,
            shard,
            segments,
            tail,
            contributors,
            is_local,
            storage,
            clip_set,
            first_bytes,
        });
        Some(())
    }
}

/// Returns the error for a plan that is too large. The error names the parameter that closes the bucket, because
/// buckets have no names.
fn too_large(name: &str, world_size: u32) -> Error {
    let wrong = format_args!("its bucket, padded for {world_size} ranks, takes the plan past 2^56 elements");
    Error::layout(format_args!("`{name}`"), wrong, "use fewer ranks or larger buckets")
}

/// Returns the largest n such that this type represents every integer up to n.
fn largest_count(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 1 << 24,
        DType::F16 => 1 << 11,
        DType::BF16 => 1 << 8,
    }
}

/// Fills buckets with parameters. Each kind (storage and clip set) has one open bucket.
pub(super) struct Filling<'a> {
    resolved: &'a Resolved,
    caps: BucketCaps,
    /// The open bucket of each kind.
    open: Vec<Open>,
}

/// A bucket that is being filled.
#[derive(Clone, Debug, Default)]
struct Open {
    params: Vec<u32>,
    bytes: u64,
    /// The index of the bucket's last parameter in the order.
    last: usize,
    /// Whether a bucket of this kind has been closed before.
    has_first: bool,
}

/// A full bucket, or the last bucket of its kind.
pub(super) struct Filled {
    pub(super) params: Vec<u32>,
    /// The bucket's kind, as an index into `Resolved::kinds`.
    pub(super) kind: u32,
    last: usize,
}

impl<'a> Filling<'a> {
    pub(super) fn new(resolved: &'a Resolved, caps: BucketCaps) -> Filling<'a> {
        Filling { resolved, caps, open: vec![Open::default(); resolved.kinds.len()] }
    }

    /// Returns the buckets of these parameters, in the order of the buckets' last parameters. No bucket stays open.
    pub(super) fn fill(&mut self, order: &[u32], parameters: &[Parameter]) -> Vec<Filled> {
        let mut filled = Vec::new();
        for (place, param) in order.iter().enumerate() {
            let kind = self.resolved.of[*param as usize];
            let (open, caps) = (&mut self.open[kind as usize], self.caps);
            let grad_bytes = self.resolved.kinds[kind as usize].storage.precision.grad.bytes();
            open.params.push(*param);
            open.last = place;
            // Saturating is enough, because the size is only compared with the cap.
            let bytes = parameters[*param as usize].len.saturating_mul(grad_bytes);
            open.bytes = open.bytes.saturating_add(bytes);
            if open.bytes >= if open.has_first { caps.rest_bytes } else { caps.first_bytes } {
                filled.push(open.close(kind));
            }
        }
        let rest = self.open.iter_mut().zip(0..).filter(|(open, _)| !open.params.is_empty());
        filled.extend(rest.map(|(open, kind)| open.close(kind)));
        filled.sort_by_key(|bucket| bucket.last);
        filled
    }
}

impl Open {
    fn close(&mut self, kind: u32) -> Filled {
        let closed = std::mem::take(self);
        self.has_first = true;
        Filled { params: closed.params, kind, last: closed.last }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/layout/cut.rs"]
mod tests;
