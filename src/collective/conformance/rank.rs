//! One rank of the suite: it makes calls, and checks all memory that a call could have touched.
//!
//! Most values are small integers, so that sums are exact even if a communicator sends only 16 bits of each f32.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use crate::collective::{Call, CallKey, Collective, CollectiveKind};
use crate::dtype::DType;
use crate::error::Result;

/// The placement of a call's buffers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub(super) in_place: bool,
    /// Number of elements between the start of a cache line and the source.
    pub(super) offset: usize,
}

/// All placements that a stepper uses. The source is aligned or misaligned, and the target is the source itself or a
/// separate buffer.
pub(super) const FORMS: [Form; 4] = [
    Form { in_place: true, offset: 0 },
    Form { in_place: true, offset: 1 },
    Form { in_place: false, offset: 0 },
    Form { in_place: false, offset: 3 },
];

pub(super) const IN_PLACE: Form = FORMS[0];

pub(super) struct Rank {
    pub(super) comm: Arc<dyn Collective>,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) patience: Duration,
    pass: Cell<u64>,
}

impl Rank {
    pub(super) fn new(comm: Arc<dyn Collective>, patience: Duration) -> Rank {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        Rank { comm, rank, ranks, patience, pass: Cell::new(0) }
    }

    /// Returns whether this is the last rank. In some checks, only the last rank behaves differently.
    pub(super) fn is_last(&self) -> bool {
        self.rank + 1 == self.ranks
    }

    pub(super) fn summed_types(&self) -> impl Iterator<Item = DType> + '_ {
        [DType::F32, DType::BF16, DType::F16].into_iter().filter(|dtype| self.comm.sums(*dtype))
    }

    /// Returns the key of the next call. Each key has a new pass number.
    pub(super) fn key(&self, kind: CollectiveKind, dtype: DType, bytes: usize) -> CallKey {
        self.pass.set(self.pass.get() + 1);
        CallKey { kind, pass: self.pass.get(), bucket: None, dtype, bytes: bytes as u64, agreement: 0x1257 }
    }

    /// Makes a call from `source` to `target`, or in place in `source` if there is no target. The longer buffer must
    /// have `key.bytes` bytes.
    pub(super) fn enqueue(
        &self,
        key: CallKey,
        source: &mut Buffer,
        target: Option<&mut Buffer>,
        deadline: Duration,
    ) -> Result<()> {
        let (source, target) = match target {
            Some(target) => (Some(source.contents_mut()), target.contents_mut()),
            None => (None, source.contents_mut()),
        };
        self.comm.enqueue(&mut Call::on_host(&*self.comm, key, source, target, deadline)?)
    }

    /// Makes a call, and returns the resulting bytes. Returns an error if the call fails, writes outside its buffers,
    /// or writes to a source that is not its target.
    pub(super) fn run(
        &self,
        kind: CollectiveKind,
        dtype: DType,
        contents: &[u8],
        form: Form,
    ) -> Result<Vec<u8>, String> {
        let (ranks, own) = (self.ranks as usize, self.rank as usize);
        let (bytes, result) = match kind {
            CollectiveKind::ReduceScatter => (contents.len(), contents.len() / ranks),
            CollectiveKind::AllGather => (contents.len() * ranks, contents.len() * ranks),
            _ => (contents.len(), contents.len()),
        };
        let key = self.key(kind, dtype, bytes);
        let element = dtype.bytes() as usize;
        // No correct result has this value.
        let unset = |len| vec![0x5a; len];
        let mut given = contents.to_vec();
        if form.in_place && bytes > contents.len() {
            given = unset(bytes);
            given[own * contents.len()..][..contents.len()].copy_from_slice(contents);
        }
        let mut source = Buffer::new(&given, form.offset * element);
        let mut target = Buffer::new(&unset(result), 0);
        let used = (!form.in_place).then_some(&mut target);
        self.enqueue(key, &mut source, used, self.patience)
            .map_err(|error| format!("[{key}] fails: {error}"))?;
        if !source.is_intact_around() || !target.is_intact_around() {
            return Err(format!("[{key}] writes outside its buffers, {form:?}"));
        }
        if form.in_place {
            let at = if result < bytes { own * result } else { 0 };
            return Ok(source.contents()[at..at + result].to_vec());
        }
        if source.contents() != contents {
            return Err(format!("[{key}] writes to its source, {form:?}"));
        }
        Ok(target.contents().to_vec())
    }

    /// Makes several in-place calls together, and returns the resulting bytes of each call. Returns an error if a call
    /// fails or writes outside its buffer.
    pub(super) fn run_together(
        &self,
        calls: &[(CollectiveKind, DType, Vec<u8>)],
    ) -> Result<Vec<Vec<u8>>, String> {
        let mut buffers: Vec<Buffer> =
            calls.iter().map(|(_, _, contents)| Buffer::new(contents, 0)).collect();
        let made = calls.iter().zip(&mut buffers).map(|((kind, dtype, contents), buffer)| {
            let key = self.key(*kind, *dtype, contents.len());
            Call::on_host(&*self.comm, key, None, buffer.contents_mut(), self.patience)
        });
        let all = format_args!("{} calls together", calls.len()).to_string();
        made.collect::<Result<Vec<Call<'_>>>>()
            .and_then(|made| self.comm.enqueue_all(&mut made.into_iter()))
            .map_err(|error| format!("{all} fail: {error}"))?;
        match buffers.iter().position(|buffer| !buffer.is_intact_around()) {
            Some(at) => Err(format!("{all}: call {at} writes outside its buffer")),
            None => Ok(buffers.iter().map(|buffer| buffer.contents().to_vec()).collect()),
        }
    }

    /// Sums `values` over ranks in the type `dtype`, and returns the sums as f32. The type must represent each value
    /// exactly.
    pub(super) fn sum(&self, dtype: DType, values: &[f32], form: Form) -> Result<Vec<f32>, String> {
        let summed = self.run(CollectiveKind::AllReduce, dtype, &encode(dtype, values), form)?;
        Ok(decode(dtype, &summed))
    }
}

/// Returns a pseudo-random number that depends on both arguments (the finalizer of SplitMix64).
pub(super) fn hash(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Returns an integer that is small enough for exact sums over at most 256 ranks in every type.
pub(super) fn whole_number(rank: u32, ranks: u32, element: usize) -> f32 {
    let largest = (256 / ranks.max(1)).clamp(1, 6);
    (hash(rank.into(), element as u64) % u64::from(2 * largest + 1)) as f32 - largest as f32
}

pub(super) fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    let values = values.iter();
    match dtype {
        DType::F32 => values.flat_map(|x| x.to_ne_bytes()).collect(),
        DType::BF16 => values.flat_map(|x| half::bf16::from_f32(*x).to_ne_bytes()).collect(),
        DType::F16 => values.flat_map(|x| half::f16::from_f32(*x).to_ne_bytes()).collect(),
    }
}

pub(super) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let narrow = || bytes.as_chunks().0.iter();
    match dtype {
        DType::F32 => bytes.as_chunks().0.iter().map(|x| f32::from_ne_bytes(*x)).collect(),
        DType::BF16 => narrow().map(|x| half::bf16::from_ne_bytes(*x).to_f32()).collect(),
        DType::F16 => narrow().map(|x| half::f16::from_ne_bytes(*x).to_f32()).collect(),
    }
}

/// The least number of guard bytes before and after the contents. This number is also the largest alignment that a
/// [`Call`](crate::collective::Call) promises.
const MARGIN: usize = 64;
const UNTOUCHED: u8 = 0xa5;

pub(super) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// Makes a buffer in which `contents` start `offset` bytes after a multiple of 64.
    pub(super) fn new(contents: &[u8], offset: usize) -> Buffer {
        let mut bytes = vec![UNTOUCHED; contents.len() + offset + 3 * MARGIN];
        let start = MARGIN + bytes[MARGIN..].as_ptr().align_offset(MARGIN) + offset;
        bytes[start..start + contents.len()].copy_from_slice(contents);
        Buffer { bytes, start, len: contents.len() }
    }

    pub(super) fn contents_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    pub(super) fn contents(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    /// Returns whether the guard bytes before and after the contents are unchanged.
    pub(super) fn is_intact_around(&self) -> bool {
        let (before, rest) = self.bytes.split_at(self.start);
        before.iter().chain(&rest[self.len..]).all(|byte| *byte == UNTOUCHED)
    }
}
