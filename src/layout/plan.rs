//! Buckets, segments and padding: a layout cut for one bucket cap and world size.
//!
//! Gradients, parameters and states share these offsets. Every segment starts on a multiple of 256 elements and
//! every bucket is padded to world_size x 256, so shard cuts, norm leaves and vectors agree for any cap. The
//! assignment is DDP's: reverse registration order, a bucket closes at the parameter that reaches the cap.

use std::ops::Range;

use crate::abi::INSTEP_QUANTUM;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::{Layout, SegmentAction, Storage};

pub(super) const QUANTUM: u64 = INSTEP_QUANTUM as u64;

/// How many bytes of gradients a bucket gathers before it closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketCaps {
    /// The first bucket's: small, so that communication starts early.
    pub first_bytes: u64,
    /// Every later bucket's.
    pub rest_bytes: u64,
}

impl Default for BucketCaps {
    /// 1 MiB, then 25 MiB, as PyTorch's DistributedDataParallel.
    fn default() -> Self {
        BucketCaps { first_bytes: 1 << 20, rest_bytes: 25 << 20 }
    }
}

/// Counts that each bucket's own sum carries, in a tail block after its gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tails {
    /// Per segment, how many ranks had a gradient for it.
    pub used: bool,
    /// How many ranks had data at all.
    pub contributors: bool,
}

/// The state of a parameter's gradient after its step. Gradients of other [actions](SegmentAction) always stay, and no
/// policy changes a bit of the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Gradients {
    /// It stays, as the sum over ranks: neither divided by their number, nor clipped.
    #[default]
    Keep,
    /// The step writes zeros, in the same launch, and in a pass that it skips too.
    Zero,
    /// Its memory goes back to the system, but for pages that it shares with what stays, and it cannot be read.
    Release,
}

/// One parameter's run inside a bucket. Offsets and lengths are elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the parameter, in registration order.
    pub param: u32,
    /// Index of its bucket.
    pub bucket: u32,
    /// Offset in the arenas of parameters and states, a multiple of 256.
    pub start: u64,
    /// Offset in the arena of gradients: the same, unless the bucket is foreign.
    pub grad_start: u64,
    /// Elements, without padding.
    pub len: u64,
    /// Number of its first element in the layout: the lengths of all parameters registered before.
    pub element: u64,
    /// The action of a step on it.
    pub action: SegmentAction,
    /// Its hyperparameters.
    pub group: u32,
    /// Offset of its element in the bucket's tail block, if the plan has tails: the SUM leaves there how many
    /// ranks had a gradient for it.
    pub tail: Option<u64>,
}

/// The unit of communication and of the step. Offsets and lengths are elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Offset in the arena of gradients.
    pub start: u64,
    /// Elements with tail and padding: a multiple of world_size x 256, unless the bucket is foreign.
    pub len: u64,
    /// Where its parameters and states lie in their arenas.
    pub params: Range<u64>,
    /// Its segments, as indices into [`Plan::segments`].
    pub segments: Range<u32>,
    /// Its tail block, empty without tails.
    pub tail: Range<u64>,
    /// Offset of the element that counts contributing ranks, the tail block's first.
    pub contributors: Option<u64>,
    /// It holds parameters that are each rank's own: no collective knows it.
    pub is_local: bool,
}

/// A layout cut into buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub(super) buckets: Vec<Bucket>,
    pub(super) segments: Vec<Segment>,
    pub(super) segment_of_param: Vec<u32>,
    pub(super) len: u64,
    pub(super) grads_len: u64,
    pub(super) is_foreign: bool,
    gradients: Gradients,
    /// The caps that cut it, unless the buckets are foreign.
    cut: Option<Cut>,
    storage: Storage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    world_size: u32,
    caps: BucketCaps,
    tails: Tails,
}

impl Plan {
    /// Cuts `layout`. Each bucket ends in the counts that `tails` asks for.
    ///
    /// # Errors
    /// `Config` if a cap or the world size is zero, the [precision](crate::Precision) is one that no kernel has, or
    /// gradients are of a type that cannot count the ranks.
    pub fn new(
        layout: &Layout,
        world_size: u32,
        caps: BucketCaps,
        tails: Tails,
        storage: impl Into<Storage>,
    ) -> Result<Plan> {
        let storage = storage.into();
        storage.precision.validate()?;
        if world_size == 0 {
            return Err(Error::config("world_size", 0, "there is at least one rank"));
        }
        if caps.first_bytes == 0 || caps.rest_bytes == 0 {
            return Err(Error::config("bucket_cap_bytes", 0, "a bucket holds at least one byte"));
        }
        if (tails.used || tails.contributors) && world_size > largest_count(storage.precision.grad) {
            let why = "has too few bits to count so many ranks in: use Unused::StepZero and no uneven_inputs";
            return Err(Error::config("grad", storage.precision.grad, why));
        }
        let backward = (0..layout.parameters().len() as u32).rev();
        Ok(Plan::filled(layout, Cut { world_size, caps, tails }, storage, backward))
    }

    /// Cuts the same layout by the same caps, into buckets that are filled in this order of registration indices.
    ///
    /// # Errors
    /// `Layout` unless `order` names each parameter once; `Unsupported` if the buckets are the caller's.
    pub fn reordered(&self, layout: &Layout, order: &[u32]) -> Result<Plan> {
        let Some(cut) = self.cut else {
            let what = "another order of buckets that are the caller's".to_owned();
            return Err(Error::Unsupported { what, have: "the order in which they were added".into() });
        };
        let mut named = vec![false; layout.parameters().len()];
        let mut is_new =
            |param: &u32| named.get_mut(*param as usize).is_some_and(|named| !std::mem::replace(named, true));
        if order.len() != layout.parameters().len() || !order.iter().all(&mut is_new) {
            return Err(Error::Layout("an order of buckets must name each parameter once".into()));
        }
        let mut plan =
            Plan::filled(layout, cut, self.storage, order.iter().copied()).with_gradients(self.gradients);
        for segment in &mut plan.segments {
            segment.action = self.segment_of(segment.param as usize).action;
        }
        Ok(plan)
    }

    /// Returns the same plan with another end for gradients.
    pub fn with_gradients(self, gradients: Gradients) -> Plan {
        Plan { gradients, ..self }
    }

    fn filled(layout: &Layout, cut: Cut, storage: Storage, order: impl Iterator<Item = u32>) -> Plan {
        let Cut { world_size, caps, tails } = cut;
        let parameters = layout.parameters();
        let mut plan = Plan { cut: Some(cut), ..Plan::empty(parameters.len(), storage) };
        let elements = layout.first_elements();
        let mut gathered_bytes = 0u64;
        let mut opened = 0u32;
        // Local ones last, so that what is broadcast and reduced lies in one piece before them.
        let (mut order, local): (Vec<u32>, Vec<u32>) =
            order.partition(|param| !parameters[*param as usize].local);
        let summed = order.len();
        order.extend(local);
        for (place, param) in order.iter().copied().enumerate() {
            let (index, parameter) = (param as usize, &parameters[param as usize]);
            plan.segment_of_param[index] = plan.segments.len() as u32;
            plan.segments.push(Segment {
                param,
                bucket: plan.buckets.len() as u32,
                start: 0,
                grad_start: 0,
                len: parameter.len,
                element: elements[index],
                action: parameter.action,
                group: parameter.group,
                tail: None,
            });
            gathered_bytes += parameter.len * storage.precision.grad.bytes();
            let cap = if plan.buckets.is_empty() { caps.first_bytes } else { caps.rest_bytes };
            if gathered_bytes >= cap || place + 1 == summed || place + 1 == order.len() {
                let end = plan.segments.len() as u32;
                plan.close_bucket(opened..end, u64::from(world_size), tails, parameter.local);
                (opened, gathered_bytes) = (end, 0);
            }
        }
        plan
    }

    pub(super) fn empty(parameters: usize, storage: Storage) -> Plan {
        Plan {
            buckets: Vec::new(),
            segments: Vec::with_capacity(parameters),
            segment_of_param: vec![0; parameters],
            len: 0,
            grads_len: 0,
            is_foreign: false,
            gradients: Gradients::Keep,
            cut: None,
            storage,
        }
    }

    fn close_bucket(&mut self, segments: Range<u32>, world_size: u64, tails: Tails, is_local: bool) {
        let start = self.len;
        let mut next = start;
        for segment in &mut self.segments[segments.start as usize..segments.end as usize] {
            (segment.start, segment.grad_start) = (next, next);
            next += segment.len.next_multiple_of(QUANTUM);
        }
        let tail_start = next;
        // A bucket without elements needs no tail: nothing of it is stepped.
        let contributors = (tails.contributors && next > start && !is_local).then_some(next);
        next += u64::from(contributors.is_some());
        if tails.used && next > start {
            for segment in &mut self.segments[segments.start as usize..segments.end as usize] {
                segment.tail = Some(next);
                next += 1;
            }
        }
        let len = (next - start).next_multiple_of(QUANTUM * world_size);
        self.len += len;
        self.grads_len = self.len;
        let (params, tail) = (start..self.len, tail_start..next);
        self.buckets.push(Bucket { start, len, params, segments, tail, contributors, is_local });
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

    /// Its index in [`segments`](Self::segments).
    pub fn segment_index(&self, param: usize) -> usize {
        self.segment_of_param[param] as usize
    }

    /// Returns the first bucket that is reduced and has elements. If ranks are counted it is reduced in every pass, and
    /// its count is the pass's.
    pub fn carrier(&self) -> Option<&Bucket> {
        self.buckets.iter().find(|bucket| bucket.len > 0 && !bucket.is_local)
    }

    /// Returns the number of elements of the arena of parameters that all ranks have in common: the first so many.
    pub fn common_len(&self) -> u64 {
        self.buckets.iter().find(|bucket| bucket.is_local).map_or(self.len, |bucket| bucket.params.start)
    }

    /// Steps those parameters that were averaged of which `is_optimized` says so.
    pub(crate) fn optimize_also(&mut self, is_optimized: impl Fn(usize) -> bool) {
        for segment in &mut self.segments {
            if segment.action == SegmentAction::Average && is_optimized(segment.param as usize) {
                segment.action = SegmentAction::Step;
            }
        }
    }

    /// Leaves the optimizer to those parameters of which `is_optimized` says so; the others' gradients are averaged.
    pub(crate) fn optimize_only(&mut self, is_optimized: impl Fn(usize) -> bool) {
        for segment in &mut self.segments {
            if segment.action == SegmentAction::Step && !is_optimized(segment.param as usize) {
                segment.action = SegmentAction::Average;
            }
        }
    }

    /// Returns the number of elements of the arenas of parameters and of each state, padding included.
    pub fn arena_len(&self) -> u64 {
        self.len
    }

    /// Returns the number of elements of the arena of gradients, tails and padding included.
    pub fn grads_len(&self) -> u64 {
        self.grads_len
    }

    /// Returns whether gradients and parameters lie in the caller's memory: each bucket, and each parameter, apart.
    pub fn is_foreign(&self) -> bool {
        self.is_foreign
    }

    /// Returns the state of a stepped parameter's gradient after the step.
    pub fn gradients(&self) -> Gradients {
        self.gradients
    }

    /// Returns the gradients that nothing needs after this bucket's step, in as few runs as possible. Averaged and left
    /// gradients stay, and so do the counts after them.
    pub fn stepped_gradients<'a>(&'a self, bucket: &'a Bucket) -> impl Iterator<Item = Range<u64>> + 'a {
        let is_stepped = |segment: &Segment| segment.action == SegmentAction::Step;
        self.segments_of(bucket).chunk_by(move |a, b| is_stepped(a) == is_stepped(b)).filter_map(move |run| {
            let (first, last) = (run.first()?, run.last()?);
            let padded_end = last.grad_start + last.len.next_multiple_of(QUANTUM);
            let span = first.grad_start..padded_end;
            (is_stepped(first) && !span.is_empty()).then_some(span)
        })
    }

    /// Returns how elements are stored, and which streams there are.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }
}

/// The largest number up to which every whole one is an element of this type.
fn largest_count(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 1 << 24,
        DType::F16 => 1 << 11,
        DType::BF16 => 1 << 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_TAILS: Tails = Tails { used: false, contributors: false };
    const ALL_TAILS: Tails = Tails { used: true, contributors: true };

    fn plan(lens: &[usize], world_size: u32, cap: u64, tails: Tails) -> Plan {
        let mut builder = Layout::builder();
        for (k, len) in lens.iter().enumerate() {
            builder = builder.param(format!("p{k}"), *len);
        }
        let caps = BucketCaps { first_bytes: cap, rest_bytes: cap };
        Plan::new(&builder.build().unwrap(), world_size, caps, tails, Storage::default()).unwrap()
    }

    #[test]
    fn buckets_fill_from_the_last_parameter_and_close_at_the_cap() {
        let plan = plan(&[100, 300, 10, 20], 1, 1024, NO_TAILS);
        let params: Vec<Vec<u32>> =
            plan.buckets().iter().map(|b| plan.segments_of(b).iter().map(|s| s.param).collect()).collect();
        assert_eq!(params, [vec![3, 2, 1], vec![0]]);
    }

    #[test]
    fn segments_start_on_quanta_and_buckets_are_padded_to_the_world() {
        for world_size in 1..=8 {
            for tails in [NO_TAILS, Tails { used: true, ..NO_TAILS }, ALL_TAILS] {
                let plan = plan(&[1, 0, 255, 256, 257, 5000, 0], world_size, 2000, tails);
                let mut next = 0;
                for bucket in plan.buckets() {
                    assert_eq!(bucket.start, next);
                    assert_eq!(bucket.len % (u64::from(world_size) * QUANTUM), 0);
                    next += bucket.len;
                    let mut free = bucket.start;
                    for segment in plan.segments_of(bucket) {
                        assert!(segment.start % QUANTUM == 0 && segment.start >= free);
                        free = segment.start + segment.len;
                        assert_eq!(segment.tail.is_some(), tails.used && bucket.len > 0);
                        let tail = segment.tail.unwrap_or(bucket.tail.start);
                        assert!(bucket.tail.is_empty() || bucket.tail.contains(&tail));
                    }
                    let first = (!bucket.tail.is_empty()).then_some(bucket.tail.start);
                    assert_eq!(bucket.contributors, first.filter(|_| tails.contributors));
                    assert!(free <= bucket.tail.start && bucket.tail.end <= bucket.start + bucket.len);
                }
                assert_eq!(plan.arena_len(), next);
            }
        }
    }

    #[test]
    fn buckets_fill_in_the_order_that_is_given_and_in_no_other() {
        let cut = plan(&[100, 300, 10, 20], 1, 1024, NO_TAILS).with_gradients(Gradients::Zero);
        let lens = [100, 300, 10, 20].into_iter().enumerate();
        let layout = lens.fold(Layout::builder(), |layout, (k, len)| layout.param(format!("p{k}"), len));
        let layout = layout.build().unwrap();
        let same = cut.reordered(&layout, &[3, 2, 1, 0]).unwrap();
        assert_eq!(same, cut);
        let plan = cut.reordered(&layout, &[1, 0, 3, 2]).unwrap();
        let params: Vec<Vec<u32>> =
            plan.buckets().iter().map(|b| plan.segments_of(b).iter().map(|s| s.param).collect()).collect();
        assert_eq!(params, [vec![1], vec![0, 3, 2]]);
        assert!((0..4).all(|param| plan.segment_of(param).param == param as u32));
        for order in [&[0, 1, 2][..], &[0, 1, 2, 2], &[0, 1, 2, 4], &[0, 1, 2, 3, 3]] {
            assert!(matches!(cut.reordered(&layout, order), Err(Error::Layout(_))), "{order:?}");
        }
    }

    #[test]
    fn runs_of_stepped_gradients_leave_out_what_stays() {
        let layout = Layout::builder().param("a", 300).param("b", 5).action(SegmentAction::Average);
        let layout = layout.param("c", 0).param("d", 256).param("e", 1).build().unwrap();
        let plan = Plan::new(&layout, 1, BucketCaps::default(), ALL_TAILS, Storage::default()).unwrap();
        let runs: Vec<_> = plan.stepped_gradients(&plan.buckets()[0]).collect();
        assert_eq!(runs, [0..512, 768..1280]);
    }

    #[test]
    fn zero_length_parameters_alone_make_a_bucket_without_bytes() {
        let plan = plan(&[0, 0], 4, 1, ALL_TAILS);
        assert_eq!((plan.buckets().len(), plan.buckets()[0].len), (1, 0));
        assert!(plan.segments().iter().all(|s| s.tail.is_none()) && plan.carrier().is_none());
    }
}
