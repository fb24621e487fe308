//! Ranges of bytes in a stepper's memories (one [`Memory`] for parameters, one for each state, and so on), and the byte
//! offsets of a plan's elements.
//!
//! All memories of gradients use the same element offsets. The other memories of tensors use a second set of element
//! offsets, which may differ from the first. A byte offset is computed for each bucket separately, because buckets may
//! differ in element types. This file decides which memories exist and how large elements are.

use std::mem::offset_of;

use crate::abi::{INSTEP_NORM_LIMBS, InstepControl};
use crate::dtype::DType;
use crate::layout::{Bucket, Master, Moments, Plan, Segment, Storage};
use crate::op::CollectiveKind;

/// The memories of a stepper, one for each kind of data. Two memories never overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Memory {
    /// Parameters.
    Params,
    /// Gradients, with each bucket's tail block.
    Grads,
    /// The control blocks, and the scalars of each segment.
    Control,
    /// The hyperparameters of each optimizer, and a learning-rate multiplier and an action for each optimizer of each
    /// segment. The trainer sets these values between passes, and `Begin` reads them.
    Settings,
    /// Master weights or remainders of 16-bit parameters.
    Master,
    /// The optimizer state with this index.
    State(u8),
    /// The scales of the 8-bit state with this index: one f32 per block of 256 elements.
    Scales(u8),
    /// Copies of the parameters in another type.
    Copy,
    /// Moving averages of the parameters.
    Ema,
    /// With [offload](crate::StepperBuilder::offload), the parameters that this rank steps, in the host's memory.
    HostParams,
    /// With offload, the reduced gradients that this rank steps and each bucket's tail block, in the host's memory.
    HostGrads,
    /// With [`Accumulation::Summed`](crate::Accumulation), the gradients that this rank steps, summed over the
    /// micro-batches so far. The gradients of each micro-batch are first reduced within a group of ranks.
    Sums,
}

/// The offset in control memory at which the further control blocks start. The first control block belongs to the pass.
/// Each further block belongs to one bucket or to one further clip set.
pub(crate) const FURTHER_CONTROLS_AT: u64 = size_of::<InstepControl>().next_multiple_of(64) as u64;

const LIMBS: usize = INSTEP_NORM_LIMBS as usize;

const fn control_field(offset: usize, bytes: usize) -> Span {
    Span { memory: Memory::Control, start: offset as u64, end: (offset + bytes) as u64 }
}

/// The size in bytes of a moving average's element, and of a block's scale.
const F32_BYTES: u64 = DType::F32.bytes();

impl Memory {
    /// Returns whether this memory contains only the rank's shard if the plan is sharded.
    pub fn is_sharded_state(self) -> bool {
        use Memory::*;
        matches!(self, Master | State(_) | Scales(_) | Ema | HostParams)
    }

    /// Returns the memory in which a step finds this memory's tensors. With offload, a step uses the parameters and
    /// gradients in the host's memory.
    pub(crate) fn of_step(self, plan: &Plan) -> Memory {
        match self {
            Memory::Params if plan.is_offloaded() => Memory::HostParams,
            Memory::Grads if plan.is_offloaded() => Memory::HostGrads,
            memory => memory,
        }
    }

    /// Returns whether the memory is on the host because steps are [offloaded](crate::StepperBuilder::offload). With
    /// offload, only four memories stay on the device: parameters, copies and gradients for forward and backward, and
    /// the sums of micro-batches.
    pub fn is_offloaded(self, plan: &Plan) -> bool {
        let is_device = matches!(self, Memory::Params | Memory::Grads | Memory::Copy | Memory::Sums);
        plan.is_offloaded() && !is_device
    }

    /// Returns whether the memory's elements have the offsets of gradients instead of the offsets of parameters.
    pub(crate) fn has_gradient_offsets(self) -> bool {
        matches!(self, Memory::Grads | Memory::HostGrads | Memory::Sums)
    }

    /// Returns whether ranks all-gather the memory's shards, which is true only for parameters and copies.
    pub(crate) fn is_sent(self) -> bool {
        matches!(self, Memory::Params | Memory::Copy)
    }

    /// Returns the memories in which ranks all-gather the shards of a bucket.
    pub(crate) fn sent_of(bucket: &Bucket) -> impl Iterator<Item = Memory> + use<> {
        [Memory::Params].into_iter().chain(bucket.storage.copy.map(|_| Memory::Copy))
    }

    /// Returns every memory that contains a plan's tensors (parameters, gradients, each of `states` states, and so on).
    /// A bucket has no bytes in a memory that its precision does not need.
    pub fn of_tensors(plan: &Plan, states: usize) -> impl Iterator<Item = Memory> + Clone + use<> {
        let of_host = [Memory::HostParams, Memory::HostGrads].into_iter().filter({
            let is_offloaded = plan.is_offloaded();
            move |_| is_offloaded
        });
        let sums = plan.sums_micro_batches().then_some(Memory::Sums);
        Memory::of_storages(plan.storages(), states).chain(of_host).chain(sums)
    }

    /// Returns every memory of tensors in which one bucket has bytes.
    pub(crate) fn of_bucket(bucket: &Bucket, states: usize) -> impl Iterator<Item = Memory> + Clone + use<> {
        Memory::of_storages(std::slice::from_ref(&bucket.storage), states)
    }

    fn of_storages(storages: &[Storage], states: usize) -> impl Iterator<Item = Memory> + Clone + use<> {
        let has = |is_there: fn(&Storage) -> bool| storages.iter().any(is_there);
        let has_master = has(|storage| storage.precision.master != Master::None);
        let has_scales = has(|storage| storage.precision.moments == Moments::EightBit);
        let (has_copy, has_ema) = (has(|storage| storage.copy.is_some()), has(|storage| storage.ema));
        let states = (0..states).map(|k| k as u8);
        let scales = states.clone().filter(move |_| has_scales);
        let is_there = move |memory: &Memory| match memory {
            Memory::Master => has_master,
            Memory::Copy => has_copy,
            Memory::Ema => has_ema,
            _ => true,
        };
        let single = [Memory::Params, Memory::Grads, Memory::Master, Memory::Copy, Memory::Ema];
        let single = single.into_iter().filter(is_there);
        single.chain(states.map(Memory::State)).chain(scales.map(Memory::Scales))
    }
}

/// A range of bytes of one memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// The memory.
    pub memory: Memory,
    /// The offset of the span's first byte.
    pub start: u64,
    /// The offset of the byte after the span's last byte.
    pub end: u64,
}

impl Span {
    /// Returns the span of the elements `start..end` of the plan's arenas. The range may cover several buckets.
    ///
    /// # Panics
    /// Panics if the memory holds no tensors.
    pub fn elements(memory: Memory, plan: &Plan, start: u64, end: u64) -> Span {
        let byte = |at: u64| {
            let first = |bucket: &Bucket| {
                if memory.has_gradient_offsets() { bucket.start } else { bucket.params.start }
            };
            let next = plan.buckets().partition_point(|bucket| first(bucket) <= at);
            // Every plan has a bucket, and the first one starts at 0.
            byte_at(memory, &plan.buckets()[next - 1], at)
        };
        Span { memory, start: byte(start), end: byte(end) }
    }

    /// Returns the span of the elements `start..end` of the arenas. All these elements must be in this bucket.
    ///
    /// # Panics
    /// Panics as for [`elements`](Self::elements).
    pub fn within(memory: Memory, bucket: &Bucket, start: u64, end: u64) -> Span {
        Span { memory, start: byte_at(memory, bucket, start), end: byte_at(memory, bucket, end) }
    }

    /// Returns the span of all elements of a memory, in this plan.
    ///
    /// # Panics
    /// Panics as for [`elements`](Self::elements).
    pub fn whole(memory: Memory, plan: &Plan) -> Span {
        let len = if memory.has_gradient_offsets() { plan.grads_len() } else { plan.arena_len() };
        Span::elements(memory, plan, 0, len)
    }

    /// Returns the span of a bucket's gradients, including the tail block and padding.
    pub fn bucket(bucket: &Bucket) -> Span {
        Span::within(Memory::Grads, bucket, bucket.start, bucket.start + bucket.len)
    }

    /// Returns the span of the gradients that this rank steps, without the bucket's tail block.
    pub(crate) fn summed(bucket: &Bucket) -> Span {
        Span::summed_in(Memory::Grads, bucket)
    }

    /// Returns the span of the gradients that this rank steps, in the device's or the host's memory.
    pub(crate) fn summed_in(memory: Memory, bucket: &Bucket) -> Span {
        let summed = bucket.summed();
        Span::within(memory, bucket, summed.start, summed.end)
    }

    /// Returns the span of a bucket's tail block, in the device's or the host's gradients.
    pub(crate) fn tail(memory: Memory, bucket: &Bucket) -> Span {
        Span::within(memory, bucket, bucket.tail.start, bucket.tail.end)
    }

    /// Returns the span of all shards of a bucket, in the memory of gradients, parameters or copies. The span excludes
    /// the tail block.
    pub(crate) fn shared(memory: Memory, bucket: &Bucket) -> Span {
        let start = if memory == Memory::Grads { bucket.start } else { bucket.params.start };
        Span::within(memory, bucket, start, start + bucket.shared_len())
    }

    /// Returns the two spans of the other ranks' shards of a bucket: one before and one after this rank's shard. Either
    /// span may be empty.
    pub(crate) fn others(memory: Memory, bucket: &Bucket) -> [Span; 2] {
        let (shared, summed) = (Span::shared(memory, bucket), bucket.summed());
        let own = if memory == Memory::Grads { summed } else { bucket.shard.clone() };
        let own = Span::within(memory, bucket, own.start, own.end);
        [Span { end: own.start, ..shared }, Span { start: own.end, ..shared }]
    }

    /// Returns the spans of the parts of a bucket that take no memory while the bucket is resharded. These parts are
    /// the other ranks' shards, or with offload the full bucket.
    pub(crate) fn resharded(memory: Memory, plan: &Plan, bucket: &Bucket) -> [Span; 2] {
        if !plan.is_offloaded() {
            return Span::others(memory, bucket);
        }
        let shared = Span::shared(memory, bucket);
        [shared, Span { start: shared.end, ..shared }]
    }

    /// Returns the span of this rank's shard of a bucket, in any memory that has the element offsets of parameters.
    pub(crate) fn shard(memory: Memory, bucket: &Bucket) -> Span {
        Span::within(memory, bucket, bucket.shard.start, bucket.shard.end)
    }

    /// Returns the span of one parameter's tensor in a memory. If the memory contains only this rank's shards, returns
    /// the span of this rank's part of the tensor.
    pub fn segment(memory: Memory, plan: &Plan, segment: &Segment) -> Span {
        let start = if memory.has_gradient_offsets() { segment.grad_start } else { segment.start };
        Span::within(memory, plan.bucket_of(segment), start, start + segment.len)
    }

    /// The next pass's loss scale and its growth tracker. Only `Decide` writes this part of control memory. Accesses to
    /// the memory of a caller's own scaler are also recorded under this span: `Begin` reads the caller's scale, and
    /// `Decide` writes the caller's flag.
    pub const LOSS_SCALE: Span = Span { memory: Memory::Control, start: 0, end: 8 };

    /// Only the loss scale. `Begin` reads it.
    pub(crate) const SCALE: Span = Span { memory: Memory::Control, start: 0, end: 4 };

    /// The second half of [`LOSS_SCALE`](Self::LOSS_SCALE): the growth tracker. Accesses to the flag of a caller's own
    /// scaler are also recorded under this span. `Begin` does not access it.
    pub(crate) const SCALER_FLAG: Span = Span { memory: Memory::Control, start: 4, end: 8 };

    /// All of control memory after the loss scale and its growth tracker.
    pub const CONTROL: Span = Span { memory: Memory::Control, start: 8, end: u64::MAX };

    /// The sum of squares, as 64-bit integers that ranks add up.
    pub const SQUARES: Span = control_field(offset_of!(InstepControl, limbs), size_of::<[u64; LIMBS]>());

    /// The bits of the largest gradient magnitude. Ranks take the maximum of these bits.
    pub const LARGEST: Span = control_field(offset_of!(InstepControl, max_abs_bits), size_of::<u32>());

    /// The index of the first bucket with a non-finite gradient. Ranks take the minimum of their indices.
    pub const NONFINITE: Span =
        control_field(offset_of!(InstepControl, first_nonfinite_bucket), size_of::<u32>());

    /// Returns the span of this field in the further control block with index `block`. This block belongs to one bucket
    /// or to one clip set.
    pub(crate) fn of_control_block(self, block: u32) -> Span {
        let offset = FURTHER_CONTROLS_AT + u64::from(block) * size_of::<InstepControl>() as u64;
        Span { start: self.start + offset, end: self.end + offset, ..self }
    }

    /// All hyperparameters, learning-rate multipliers and actions.
    pub const SETTINGS: Span = Span { memory: Memory::Settings, start: 0, end: u64::MAX };

    /// Returns the element type of a collective. For an all-gather, the result is the destination's type, because the
    /// sources of different ranks may be in buckets of different types.
    pub(crate) fn dtype_of_call(kind: CollectiveKind, [src, dst]: [Span; 2], plan: &Plan) -> DType {
        if kind == CollectiveKind::AllGather { dst.dtype(plan) } else { src.dtype(plan) }
    }

    /// Returns the element type that a collective uses for this span. For parameters, gradients and the sums of
    /// micro-batches, this is the type of the span's first element. For all other memories, the type is f32, because
    /// collectives only copy the tensors of these memories, as words of 4 bytes.
    pub(crate) fn dtype(&self, plan: &Plan) -> DType {
        let first = |first_byte: &dyn Fn(&Bucket) -> u64| {
            let next = plan.buckets().partition_point(|bucket| first_byte(bucket) <= self.start);
            plan.buckets()[next - 1].storage.precision
        };
        match self.memory {
            Memory::Params => first(&|bucket| bucket.first_bytes.params).param,
            Memory::Grads => first(&|bucket| bucket.first_bytes.grads).grad,
            Memory::HostGrads => first(&|bucket| bucket.first_bytes.host_grads).grad,
            Memory::Sums => first(&|bucket| bucket.first_bytes.sums).grad,
            _ => DType::F32,
        }
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> u64 {
        self.end - self.start
    }
}

/// Returns the size in bytes of `elements` elements. The first element must start a block of 256 elements, because the
/// 8-bit states of each block share one scale.
pub(crate) fn bytes_of(memory: Memory, storage: &Storage, elements: u64) -> u64 {
    let Storage { precision, copy, .. } = storage;
    match memory {
        Memory::Params | Memory::HostParams => elements * precision.param.bytes(),
        Memory::Grads | Memory::HostGrads | Memory::Sums => elements * precision.grad.bytes(),
        Memory::Master => elements * precision.master.bytes(),
        Memory::State(_) => elements * precision.moments.bytes(),
        // A scale belongs to the first element of its block.
        Memory::Scales(_) => precision.moments.scale_bytes(elements),
        Memory::Copy => elements * copy.map_or(0, |dtype| dtype.bytes()),
        Memory::Ema => elements * F32_BYTES,
        Memory::Control | Memory::Settings => panic!("{memory:?} holds no elements"),
    }
}

/// Returns the byte offset at which an element of a bucket starts. `element` may be the end of the bucket, which is the
/// start of the next bucket.
fn byte_at(memory: Memory, bucket: &Bucket, element: u64) -> u64 {
    let first = &bucket.first_bytes;
    match memory {
        Memory::HostGrads => {
            return first.host_grads + bytes_of(memory, &bucket.storage, bucket.host_grad(element));
        }
        Memory::Sums => return first.sums + bytes_of(memory, &bucket.storage, bucket.sum_at(element)),
        _ => {}
    }
    let (first, from) = match memory {
        Memory::Params => (first.params, bucket.params.start),
        Memory::Grads => (first.grads, bucket.start),
        Memory::Master => (first.master, bucket.shard.start),
        Memory::State(_) => (first.state, bucket.shard.start),
        Memory::Scales(_) => (first.scales, bucket.shard.start),
        Memory::Ema => (first.ema, bucket.shard.start),
        Memory::HostParams => (first.host_params, bucket.shard.start),
        // Elements of the other memories have the same size in all buckets.
        Memory::Copy | Memory::Control | Memory::Settings | Memory::HostGrads | Memory::Sums => (0, 0),
    };
    let element =
        if memory.is_sharded_state() { element.clamp(bucket.shard.start, bucket.shard.end) } else { element };
    first + bytes_of(memory, &bucket.storage, element - from)
}
