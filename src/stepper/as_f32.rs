//! Converts tensors of every storage format to f32 and back, when users read or write them.
//!
//! This module uses the kernels' conversions, so a value that is read and written back keeps its bits. An f32
//! checkpoint can therefore resume a run of any precision. Even if steps round stochastically, a write rounds to
//! nearest, because a write is not an update.

use std::ops::Range;

use crate::abi::{INSTEP_DTYPE_F32, INSTEP_MASTER_NONE, INSTEP_MOMENTS_8BIT};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::host::Isa;
use crate::host::kernels::Kernels;
use crate::host::memories::StoredValues;
use crate::layout::{Master, Moments, ParamId, Precision, Segment};
use crate::op::{Access, Memory};
use crate::stepper::stepper::Stepper;
use crate::stepper::tensor::Elements;

/// A tensor's bytes, aligned for any element type.
struct Bytes {
    words: Vec<u32>,
    len: usize,
}

impl Bytes {
    fn zeroed(len: usize) -> Bytes {
        Bytes { words: vec![0; len.div_ceil(size_of::<u32>())], len }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

impl<D: Device> Stepper<D> {
    /// Copies a tensor's values to the host as f32.
    pub(super) fn read_values(&self, id: ParamId, memory: Memory, into: &mut [f32]) -> Result<()> {
        let (values, second) = self.memories_of(id, memory)?;
        for memory in [Some(values), second].into_iter().flatten() {
            self.refuse_shard(id, memory)?;
        }
        let whole = 0..self.layout.parameter(id)?.len;
        self.decode(id, memory, whole, into, |elements, bytes| self.read_elements(elements, bytes))
    }

    /// Decodes a range of a tensor's values to f32. For an 8-bit state, the range must begin at the start of a block of
    /// codes. `fetch` copies encoded bytes, and is called once for each `Memory` that stores a part of the encoded
    /// values.
    pub(super) fn decode(
        &self,
        id: ParamId,
        memory: Memory,
        range: Range<u64>,
        into: &mut [f32],
        mut fetch: impl FnMut(&Elements, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let (values, second) = self.memories_of(id, memory)?;
        let segment = self.claim(id, values, false)?;
        if range.is_empty() {
            return Ok(());
        }
        if let Some(memory) = second {
            self.note(memory, &segment, false);
        }
        let elements = |memory| Elements { memory, segment: &segment, range: range.clone() };
        let of_master = if values == Memory::Master { Memory::Master } else { memory };
        if self.format(of_master, &segment).0 == INSTEP_DTYPE_F32 {
            return fetch(&elements(values), bytemuck::cast_slice_mut(into));
        }
        let mut fetched = |memory| {
            let elements = elements(memory);
            let mut bytes = Bytes::zeroed(elements.bytes(&self.plan).len());
            fetch(&elements, bytes.as_mut_slice()).map(|()| bytes)
        };
        let (mut first, mut other) = (fetched(values)?, second.map(fetched).transpose()?);
        let mut stored = self.stored(&mut first, other.as_mut(), of_master, &segment);
        Kernels::load(Isa::Baseline)?.decode(&mut stored, into);
        Ok(())
    }

    /// Copies f32 values from the host to a tensor. If the tensor's elements have fewer than 32 bits, the values are
    /// rounded to nearest.
    pub(super) fn write_values(&self, id: ParamId, memory: Memory, from: &[f32]) -> Result<()> {
        let (values, second) = self.memories_of(id, memory)?;
        let segment = self.claim(id, values, true)?;
        if segment.len == 0 {
            return Ok(());
        }
        if values == Memory::Master {
            self.write_bytes(Memory::Master, &segment, bytemuck::cast_slice(from))?;
        }
        if self.format(memory, &segment).0 == INSTEP_DTYPE_F32 {
            return self.write_bytes(memory, &segment, bytemuck::cast_slice(from));
        }
        let (mut first, mut other) = (self.room(memory, &segment), second.map(|m| self.room(m, &segment)));
        let mut stored = self.stored(&mut first, other.as_mut(), memory, &segment);
        Kernels::load(Isa::Baseline)?.encode(from, &mut stored);
        self.write_bytes(memory, &segment, first.as_mut_slice())?;
        if let (Some(memory), Some(bytes)) = (second, &mut other) {
            self.write_bytes(memory, &segment, bytes.as_mut_slice())?;
        }
        Ok(())
    }

    /// Sets each master weight to the value of its parameter.
    pub(super) fn derive_masters(&mut self) -> Result<()> {
        for id in self.layout.clone().ids() {
            let precision = self.precision_of(id)?;
            if precision.master == Master::None {
                continue;
            }
            let mut values = vec![0.0; self.layout.parameter(id)?.len as usize];
            self.read_stored_param(id, &mut values)?;
            self.write_values(id, Memory::Params, &values)?;
        }
        Ok(())
    }

    /// Copies a parameter's own values, and not those of its master, to the host as f32. If the parameter is sharded,
    /// all ranks make this call together.
    pub(crate) fn gather_stored_param(&self, id: ParamId, into: &mut [f32]) -> Result<()> {
        self.decode_stored_param(id, into, |elements, bytes| self.gather_or_read(elements, bytes))
    }

    /// Copies a parameter's own values, and not those of its master, to the host as f32. Reads only this rank's memory,
    /// so this rank must have the full parameter.
    pub(super) fn read_stored_param(&self, id: ParamId, into: &mut [f32]) -> Result<()> {
        self.decode_stored_param(id, into, |elements, bytes| self.read_elements(elements, bytes))
    }

    fn decode_stored_param(
        &self,
        id: ParamId,
        into: &mut [f32],
        fetch: impl Fn(&Elements, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.check_len(id, into.len())?;
        self.settle_between_passes()?;
        let segment = self.claim(id, Memory::Params, false)?;
        if segment.len == 0 {
            return Ok(());
        }
        let elements = Elements { memory: Memory::Params, segment: &segment, range: 0..segment.len };
        if self.plan.storage_of(&segment).precision.param == DType::F32 {
            return fetch(&elements, bytemuck::cast_slice_mut(into));
        }
        let mut params = self.room(Memory::Params, &segment);
        fetch(&elements, params.as_mut_slice())?;
        let mut stored = self.stored(&mut params, None, Memory::Params, &segment);
        Kernels::load(Isa::Baseline)?.decode(&mut stored, into);
        Ok(())
    }

    /// Returns the `Memory` that holds a tensor's values. If a parameter has an f32 master, its values are in
    /// `Memory::Master`. The second `Memory`, if any, holds the remainders of a master or the scales of 8-bit codes.
    fn memories_of(&self, id: ParamId, memory: Memory) -> Result<(Memory, Option<Memory>)> {
        let precision = self.precision_of(id)?;
        Ok(match (memory, precision.master, precision.moments) {
            (Memory::Params, Master::F32, _) => (Memory::Master, None),
            (Memory::Params, Master::Remainder16 | Master::Remainder8, _) => {
                (Memory::Params, Some(Memory::Master))
            }
            (Memory::State(k), _, Moments::EightBit) => (memory, Some(Memory::Scales(k))),
            _ => (memory, None),
        })
    }

    /// Returns the element types of a parameter's tensors.
    ///
    /// # Errors
    /// `Layout` if `id` belongs to another layout.
    pub fn precision_of(&self, id: ParamId) -> Result<Precision> {
        let segment = self.plan.segment_of(self.layout.index(id)?);
        Ok(self.plan.storage_of(segment).precision)
    }

    /// Returns the number that identifies a tensor's storage format in kernels, and whether the tensor's values may be
    /// negative.
    fn format(&self, memory: Memory, segment: &Segment) -> (u32, bool) {
        let storage = self.plan.storage_of(segment);
        let code = match memory {
            Memory::Params => storage.precision.param as u32,
            Memory::Grads => storage.precision.grad as u32,
            Memory::Copy => storage.copy.unwrap_or(DType::F32) as u32,
            Memory::State(_) => storage.precision.moments as u32,
            _ => INSTEP_DTYPE_F32,
        };
        let Memory::State(state) = memory else { return (code, true) };
        let index = self.plan.segment_index(segment.param as usize);
        let (kernel, k) = self.assignment.kernel_of_state(state.into(), index);
        (code, Kernels::is_signed(kernel, k))
    }

    fn stored<'b>(
        &self,
        values: &'b mut Bytes,
        second: Option<&'b mut Bytes>,
        memory: Memory,
        segment: &Segment,
    ) -> StoredValues<'b> {
        let (format, is_signed) = self.format(memory, segment);
        let has_remainders = second.is_some() && format != INSTEP_MOMENTS_8BIT;
        let master = self.plan.storage_of(segment).precision.master as u32;
        StoredValues {
            values: &mut values.words,
            second: second.map(|bytes| &mut *bytes.words),
            format,
            master_kind: if has_remainders { master } else { INSTEP_MASTER_NONE },
            is_signed,
        }
    }

    fn room(&self, memory: Memory, segment: &Segment) -> Bytes {
        let elements = Elements { memory, segment, range: 0..segment.len };
        Bytes::zeroed(elements.bytes(&self.plan).len())
    }

    fn note(&self, memory: Memory, segment: &Segment, writes: bool) {
        let mut run = self.run.borrow_mut();
        let span =
            Elements::present(memory, segment, &self.plan, &run.schedule).span(&self.plan, &run.schedule);
        run.note(Access { span, writes });
    }

    /// Copies `elements` from this rank's memory to `into`. The caller has called `claim`.
    pub(super) fn read_elements(&self, elements: &Elements, into: &mut [u8]) -> Result<()> {
        let span = elements.span(&self.plan, &self.run.borrow().schedule);
        self.read_span(span, into)
    }

    /// Writes the part of a tensor that this rank stores. `from` has the bytes of the full tensor. The caller has
    /// called `claim`. No view of this memory is alive, because views borrow the stepper or the pass, and the caller
    /// holds a mutable borrow. With offload, a parameter is also written to the host's memory.
    fn write_bytes(&self, memory: Memory, segment: &Segment, from: &[u8]) -> Result<()> {
        let is_full = self.run.borrow().schedule.is_full(segment.bucket);
        let of_host = memory == Memory::Params && self.plan.is_offloaded() && is_full;
        for memory in [memory].into_iter().chain(of_host.then_some(Memory::HostParams)) {
            let (range, span) = {
                let schedule = &self.run.borrow().schedule;
                let elements = Elements::present(memory, segment, &self.plan, schedule);
                (elements.bytes(&self.plan), elements.span(&self.plan, schedule))
            };
            if !range.is_empty() {
                self.run.borrow_mut().note(Access { span, writes: true });
                self.write_span(span, &from[range])?;
            }
        }
        Ok(())
    }
}
