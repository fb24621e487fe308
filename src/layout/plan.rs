//! A layout that is divided into buckets. A plan gives the offset of every segment to the schedule, the checker and the
//! devices.
//!
//! Unless the caller chose the buckets, gradients, parameters and states have the same offsets. In a sharded plan, the
//! states' memory has only this rank's shards, so positions in this memory differ from the offsets. `cut.rs` makes a
//! plan from caps and a world size, `foreign.rs` makes a plan from the caller's buckets, and `flat.rs` makes a plan of
//! one bucket. A plan always has fewer than 2^56 elements.

use std::ops::Range;

use crate::abi::INSTEP_QUANTUM;
use crate::dtype::DType;
use crate::layout::bucket::{Cut, FirstBytes};
use crate::layout::element_types::Resolved;
use crate::layout::{Bucket, Gradients, Parameter, Segment, SegmentAction, Storage, Storages};

pub(super) const QUANTUM: u64 = INSTEP_QUANTUM as u64;

/// The limit on a plan's elements. Below this limit, sizes in bytes and sums of such sizes fit in 64 bits.
pub(super) const TOO_MANY_ELEMENTS: u64 = 1 << 56;

/// A layout cut into buckets.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub(super) buckets: Vec<Bucket>,
    pub(super) segments: Vec<Segment>,
    pub(super) segment_of_param: Vec<u32>,
    pub(super) len: u64,
    pub(super) grads_len: u64,
    pub(super) is_foreign: bool,
    pub(super) gradients: Gradients,
    pub(super) shards_params: bool,
    /// Whether steps run on the host and use the host's memory.
    pub(super) is_offloaded: bool,
    /// Whether ranks reduce the gradients of each micro-batch and accumulate the sums.
    pub(super) sums_micro_batches: bool,
    /// The options with which the layout was cut into buckets, or `None` if the caller chose the buckets.
    pub(super) cut: Option<Cut>,
    /// The storages of all buckets, without duplicates.
    pub(super) storages: Vec<Storage>,
    /// The options from which `storages` and `max_norms` were derived.
    pub(super) asked: Storages,
    /// The `max_norm` of each clip set except set 0.
    pub(super) max_norms: Vec<Option<f64>>,
}

impl Plan {
    pub(super) fn empty(parameters: usize, asked: Storages, resolved: &Resolved) -> Plan {
        Plan {
            buckets: Vec::new(),
            segments: Vec::with_capacity(parameters),
            segment_of_param: vec![0; parameters],
            len: 0,
            grads_len: 0,
            is_foreign: false,
            gradients: Gradients::Keep,
            shards_params: false,
            is_offloaded: false,
            sums_micro_batches: false,
            cut: None,
            storages: Vec::new(),
            asked,
            max_norms: resolved.max_norms.clone(),
        }
    }

    /// Sets what happens to gradients after the step, and returns the plan.
    pub fn with_gradients(self, gradients: Gradients) -> Plan {
        Plan { gradients, ..self }
    }

    /// Returns this plan with the segment actions of another plan for the same layout.
    pub(crate) fn with_actions_of(mut self, other: &Plan) -> Plan {
        for segment in &mut self.segments {
            segment.action = other.segment_of(segment.param as usize).action;
        }
        self
    }

    /// Returns all buckets, in launch order.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Returns all segments, bucket by bucket.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns the segments of one bucket.
    pub fn segments_of(&self, bucket: &Bucket) -> &[Segment] {
        &self.segments[bucket.segments.start as usize..bucket.segments.end as usize]
    }

    /// Returns the segment of a parameter, by its index in registration order.
    pub fn segment_of(&self, param: usize) -> &Segment {
        &self.segments[self.segment_index(param)]
    }

    /// Returns the index of a parameter's segment in [`segments`](Self::segments).
    pub fn segment_index(&self, param: usize) -> usize {
        self.segment_of_param[param] as usize
    }

    /// Returns the first non-empty bucket that is reduced. With uneven inputs, the tail block of this bucket counts the
    /// ranks with data.
    pub fn carrier(&self) -> Option<&Bucket> {
        self.buckets.iter().find(|bucket| bucket.len > 0 && !bucket.is_local)
    }

    /// Returns how many elements of the parameters' arena belong to parameters that are not local. These elements come
    /// first in the arena.
    pub fn common_len(&self) -> u64 {
        self.buckets.iter().find(|bucket| bucket.is_local).map_or(self.len, |bucket| bucket.params.start)
    }

    /// Returns the elements of all parameters that are not local, in as few ranges as possible. All elements of a range
    /// have one type. There is at least one range.
    pub(crate) fn common_params(&self) -> Vec<Range<u64>> {
        let mut runs: Vec<(DType, Range<u64>)> = Vec::new();
        for bucket in self.buckets.iter().take_while(|bucket| !bucket.is_local) {
            let (dtype, params) = (bucket.storage.precision.param, &bucket.params);
            match runs.last_mut().filter(|(of_last, _)| *of_last == dtype) {
                Some((_, run)) => run.end = params.end,
                None => runs.push((dtype, params.clone())),
            }
        }
        let mut runs: Vec<Range<u64>> =
            runs.into_iter().map(|(_, run)| run).filter(|run| !run.is_empty()).collect();
        if runs.is_empty() {
            runs.push(0..0);
        }
        runs
    }

    /// For each segment with the action `from`, sets the action to `to` if `is_changed` returns true for the segment's
    /// parameter.
    pub(crate) fn change_actions(
        &mut self,
        [from, to]: [SegmentAction; 2],
        is_changed: impl Fn(usize) -> bool,
    ) {
        for segment in &mut self.segments {
            if segment.action == from && is_changed(segment.param as usize) {
                segment.action = to;
            }
        }
    }

    /// Returns the number of elements in the parameters' arena, including padding. Unless the plan is
    /// [sharded](Self::sharded), each state's arena has the same number of elements. The state arenas of a sharded plan
    /// contain only the elements of this rank's shards.
    pub fn arena_len(&self) -> u64 {
        self.len
    }

    /// Returns the number of elements in the gradients' arena, including tail blocks and padding.
    pub fn grads_len(&self) -> u64 {
        self.grads_len
    }

    /// Returns whether this rank steps only one [shard](Bucket::shard) of each reduced bucket.
    pub fn is_sharded(&self) -> bool {
        self.cut.is_some_and(|cut| cut.place.is_some())
    }

    /// Returns the number of shards of a reduced bucket, and the index of this rank's shard. Unless the plan is
    /// [sharded](Self::sharded), the number is 1 and the index is 0.
    pub fn shards(&self) -> (u32, u32) {
        let sharded = self.cut.and_then(|cut| Some((cut.shards, cut.place?)));
        sharded.unwrap_or((1, 0))
    }

    /// Returns the number of ranks that have the same shards as this rank, including this rank. The number is 1 unless
    /// the plan is sharded in [groups](Self::sharded_among).
    pub fn replicas(&self) -> u32 {
        self.cut.filter(|cut| cut.place.is_some()).map_or(1, |cut| cut.world_size / cut.shards)
    }

    /// Returns this sharded plan, changed so that parameters are sharded too. A bucket's parameters are then full only
    /// while the bucket is unsharded.
    pub fn with_sharded_params(self) -> Plan {
        Plan { shards_params: self.is_sharded(), ..self }
    }

    /// Returns whether parameters are sharded.
    pub fn shards_params(&self) -> bool {
        self.shards_params
    }

    /// Returns this plan, changed so that steps run on the host and use the host's memory. Reduced gradients are copied
    /// to the host, and stepped parameters are copied back.
    pub fn offloaded(self) -> Plan {
        Plan { is_offloaded: true, ..self }
    }

    /// Returns whether steps run on the host and use the host's memory.
    pub fn is_offloaded(&self) -> bool {
        self.is_offloaded
    }

    /// Returns this sharded plan, changed so that ranks reduce the gradients of each micro-batch and accumulate the
    /// sums of their shards.
    pub fn with_summed_micro_batches(self) -> Plan {
        Plan { sums_micro_batches: self.is_sharded(), ..self }
    }

    /// Returns whether ranks reduce gradients once per micro-batch instead of once per pass.
    pub fn sums_micro_batches(&self) -> bool {
        self.sums_micro_batches
    }

    /// Returns whether an op after the step overwrites whole buckets of parameters. This op is an all-gather, or a copy
    /// back from the host. Unlike the step, this op also writes frozen parameters, so it must wait for the trainer's
    /// reads of frozen parameters.
    pub(crate) fn rewrites_params(&self) -> bool {
        self.is_sharded() || self.is_offloaded
    }

    /// Returns the elements of a parameter that are in this rank's shard. This rank steps these elements. Unless the
    /// plan is [sharded](Self::sharded), these are all elements of the parameter. `param` is the parameter's index in
    /// registration order.
    pub fn shard_of(&self, param: usize) -> Range<u64> {
        let segment = self.segment_of(param);
        self.bucket_of(segment).shard_of_segment(segment)
    }

    /// Returns whether gradients and parameters are in the caller's memory, where each bucket and each parameter has
    /// its own address.
    pub fn is_foreign(&self) -> bool {
        self.is_foreign
    }

    /// Returns what happens to a stepped parameter's gradient after the step.
    pub fn gradients(&self) -> Gradients {
        self.gradients
    }

    /// Returns what a step's launch does with gradients. With offload, the result is `Keep`, because the launch reads
    /// only a copy of the gradients. Other ops zero or release the original gradients after the copy.
    pub(crate) fn gradients_of_step(&self) -> Gradients {
        if self.is_offloaded { Gradients::Keep } else { self.gradients }
    }

    /// Returns the gradients that are not needed after this bucket's step, in as few ranges as possible. The ranges
    /// exclude gradients with the action `Average` or `Leave`, and exclude the counts after the gradients.
    pub fn stepped_gradients<'a>(&'a self, bucket: &'a Bucket) -> impl Iterator<Item = Range<u64>> + 'a {
        let is_stepped = |segment: &Segment| segment.action == SegmentAction::Step;
        self.segments_of(bucket).chunk_by(move |a, b| is_stepped(a) == is_stepped(b)).filter_map(move |run| {
            let (first, last) = (run.first()?, run.last()?);
            let padded_end = last.grad_start + last.len.next_multiple_of(QUANTUM);
            let span = first.grad_start..padded_end;
            (is_stepped(first) && !span.is_empty()).then_some(span)
        })
    }

    /// Returns the [storages](Bucket::storage) of all buckets, without duplicates. There is at least one.
    pub fn storages(&self) -> &[Storage] {
        &self.storages
    }

    /// Returns the `max_norm` of each [clip set](Bucket::clip_set) except set 0, or `None` for a set that is not
    /// clipped.
    pub fn max_norms(&self) -> &[Option<f64>] {
        &self.max_norms
    }

    /// Returns the storage options with which the plan was made.
    pub(crate) fn asked(&self) -> &Storages {
        &self.asked
    }

    /// Returns the type of the parameters' copies, or `None` if the plan has no copies.
    pub fn copy(&self) -> Option<DType> {
        self.asked.copy()
    }

    /// Returns whether parameters have moving averages.
    pub fn keeps_ema(&self) -> bool {
        self.asked.ema()
    }

    /// Returns the storage of a segment's elements.
    pub fn storage_of(&self, segment: &Segment) -> &Storage {
        &self.bucket_of(segment).storage
    }

    pub(crate) fn bucket_of(&self, segment: &Segment) -> &Bucket {
        &self.buckets[segment.bucket as usize]
    }

    /// Appends a parameter's segment. The segment belongs to the bucket that is appended next.
    pub(super) fn push_segment(
        &mut self,
        parameter: &Parameter,
        param: u32,
        element: u64,
        [start, grad_start]: [u64; 2],
    ) {
        let Parameter { len, action, group, .. } = parameter;
        self.segment_of_param[param as usize] = self.segments.len() as u32;
        self.segments.push(Segment {
            param,
            bucket: self.buckets.len() as u32,
            start,
            grad_start,
            len: *len,
            element,
            row: 0,
            action: *action,
            group: *group,
            tail: None,
        });
    }

    /// Appends a bucket. The bucket's bytes follow the bytes of the previously appended bucket.
    pub(super) fn push(&mut self, bucket: Bucket) {
        let first_bytes = self.buckets.last().map_or_else(FirstBytes::default, Bucket::next_bytes);
        if !self.storages.contains(&bucket.storage) {
            self.storages.push(bucket.storage);
        }
        self.buckets.push(Bucket { first_bytes, ..bucket });
    }
}
