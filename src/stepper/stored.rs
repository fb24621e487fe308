//! Tensors as f32, for every storage format: the one place where a stepper converts.
//!
//! It uses the kernels' own conversions, so a value that was read and is written again keeps its bits, and a checkpoint
//! of f32 resumes a run of any precision. Conversions round to nearest, since loading is no update.
#![allow(unsafe_code)]

use std::ptr;

use crate::abi::{INSTEP_DTYPE_F32, INSTEP_MASTER_NONE, INSTEP_MOMENTS_8BIT, InstepStored};
use crate::device::Device;
use crate::error::Result;
use crate::host::Isa;
use crate::host::kernels::Kernels;
use crate::launch::{dtype_code, master_code, moments_code};
use crate::layout::{Master, Moments, ParamId, Segment};
use crate::op::{Access, Memory, Span};
use crate::stepper::stepper::Stepper;

/// A tensor's bytes, aligned for any element.
struct Bytes {
    words: Vec<u32>,
    len: usize,
}

impl Bytes {
    fn zeroed(span: Span) -> Bytes {
        let len = span.bytes() as usize;
        Bytes { words: vec![0; len.div_ceil(size_of::<u32>())], len }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as many bytes as the words have at least, of any value.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.len) }
    }
}

impl<D: Device> Stepper<D> {
    /// Copies a tensor to the host, as the values that it stands for.
    pub(super) fn read_values(&self, id: ParamId, memory: Memory, into: &mut [f32]) -> Result<()> {
        let (values, second) = self.memories_of(memory);
        let segment = self.claim(id, values, false)?;
        if segment.len == 0 {
            return Ok(());
        }
        let of_master = if values == Memory::Master { Memory::Master } else { memory };
        let (format, is_signed) = self.format(of_master, &segment);
        if format == INSTEP_DTYPE_F32 {
            return self.read_bytes(values, &segment, bytes_of(into));
        }
        let (mut first, mut other) = (self.room(values, &segment), second.map(|m| self.room(m, &segment)));
        self.read_bytes(values, &segment, first.as_mut_slice())?;
        if let (Some(memory), Some(bytes)) = (second, &mut other) {
            self.note(memory, &segment, false);
            self.read_bytes(memory, &segment, bytes.as_mut_slice())?;
        }
        let stored = self.stored(&mut first, other.as_mut(), (format, is_signed), segment.len);
        // SAFETY: rooms of the tensor's size and slices of its length, which the caller has checked.
        unsafe { Kernels::load(Isa::Baseline)?.decode(&stored, into.as_mut_ptr()) };
        Ok(())
    }

    /// Copies a tensor from the host, rounded to the nearest where it has fewer bits.
    pub(super) fn write_values(&self, id: ParamId, memory: Memory, from: &[f32]) -> Result<()> {
        let (values, second) = self.memories_of(memory);
        let segment = self.claim(id, values, true)?;
        if segment.len == 0 {
            return Ok(());
        }
        if values == Memory::Master {
            self.write_bytes(Memory::Master, &segment, as_bytes(from))?;
        }
        let (format, is_signed) = self.format(memory, &segment);
        if format == INSTEP_DTYPE_F32 {
            return self.write_bytes(memory, &segment, as_bytes(from));
        }
        let (mut first, mut other) = (self.room(memory, &segment), second.map(|m| self.room(m, &segment)));
        let stored = self.stored(&mut first, other.as_mut(), (format, is_signed), segment.len);
        // SAFETY: as in `read_values`.
        unsafe { Kernels::load(Isa::Baseline)?.encode(from.as_ptr(), &stored) };
        if values != memory {
            self.note(memory, &segment, true);
        }
        self.write_bytes(memory, &segment, first.as_mut_slice())?;
        if let (Some(memory), Some(bytes)) = (second, &mut other) {
            self.note(memory, &segment, true);
            self.write_bytes(memory, &segment, bytes.as_mut_slice())?;
        }
        Ok(())
    }

    /// Master weights start as their parameters.
    pub(super) fn derive_masters(&mut self) -> Result<()> {
        let precision = self.plan.storage().precision;
        for id in self.layout.clone().ids() {
            let segment = self.claim(id, Memory::Params, false)?;
            let mut params = self.room(Memory::Params, &segment);
            self.read_bytes(Memory::Params, &segment, params.as_mut_slice())?;
            let mut values = vec![0.0; segment.len as usize];
            let stored = self.stored(&mut params, None, (dtype_code(precision.param), false), segment.len);
            // SAFETY: as in `read_values`.
            unsafe { Kernels::load(Isa::Baseline)?.decode(&stored, values.as_mut_ptr()) };
            self.write_values(id, Memory::Params, &values)?;
        }
        Ok(())
    }

    /// The memory that holds the values of a logical tensor: the master of a parameter that has one.
    fn memories_of(&self, memory: Memory) -> (Memory, Option<Memory>) {
        let precision = self.plan.storage().precision;
        match (memory, precision.master, precision.moments) {
            (Memory::Params, Master::F32, _) => (Memory::Master, None),
            (Memory::Params, Master::Remainder16 | Master::Remainder8, _) => {
                (Memory::Params, Some(Memory::Master))
            }
            (Memory::State(k), _, Moments::EightBit) => (memory, Some(Memory::Scales(k))),
            _ => (memory, None),
        }
    }

    /// The kernels' code for the format of one memory, and whether its values have signs.
    fn format(&self, memory: Memory, segment: &Segment) -> (u32, bool) {
        let storage = self.plan.storage();
        let code = match memory {
            Memory::Params => dtype_code(storage.precision.param),
            Memory::Grads => dtype_code(storage.precision.grad),
            Memory::Copy => storage.copy.map_or(INSTEP_DTYPE_F32, dtype_code),
            Memory::State(_) => moments_code(storage.precision.moments),
            _ => INSTEP_DTYPE_F32,
        };
        let Memory::State(state) = memory else { return (code, true) };
        let index = self.plan.segment_index(segment.param as usize);
        let (kernel, k) = self.assignment.kernel_of_state(state.into(), index);
        (code, Kernels::is_signed(kernel, k))
    }

    fn stored(
        &self,
        values: &mut Bytes,
        second: Option<&mut Bytes>,
        (format, is_signed): (u32, bool),
        count: u64,
    ) -> InstepStored {
        let has_remainders = second.is_some() && format != INSTEP_MOMENTS_8BIT;
        let master = master_code(self.plan.storage().precision.master);
        InstepStored {
            values: values.words.as_mut_ptr().cast(),
            second: second.map_or(ptr::null_mut(), |bytes| bytes.words.as_mut_ptr().cast()),
            count,
            format,
            master_kind: if has_remainders { master } else { INSTEP_MASTER_NONE },
            is_signed: is_signed.into(),
            reserved: 0,
        }
    }

    fn room(&self, memory: Memory, segment: &Segment) -> Bytes {
        Bytes::zeroed(Span::segment(memory, &self.plan, segment))
    }

    fn note(&self, memory: Memory, segment: &Segment, writes: bool) {
        let span = Span::segment(memory, &self.plan, segment);
        self.run.borrow_mut().note(Access { span, writes });
    }

    /// After `claim`.
    fn read_bytes(&self, memory: Memory, segment: &Segment, into: &mut [u8]) -> Result<()> {
        let span = Span::segment(memory, &self.plan, segment);
        // SAFETY: `claim` has told the schedule and has been waited for.
        unsafe { self.run.borrow_mut().device.read(span, into) }
    }

    /// After `claim`.
    fn write_bytes(&self, memory: Memory, segment: &Segment, from: &[u8]) -> Result<()> {
        let span = Span::segment(memory, &self.plan, segment);
        // SAFETY: as in `read_bytes`; no view of this memory is alive, since those borrow the stepper or the pass that
        // the caller holds mutably.
        unsafe { self.run.borrow_mut().device.write(span, from) }
    }
}

fn bytes_of(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: a slice of f32 is as many bytes, each of which may take any value.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

fn as_bytes(values: &[f32]) -> &[u8] {
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
