//! The addresses of every [`Memory`]. Only this file converts a [`Span`] to an address.
//!
//! Addresses are in the CPU's or a GPU's memory, and this file never reads or writes the memory there. A memory
//! consists of pieces. A span has an address only if it lies inside one piece. A launch of a `BucketStep` gets base
//! addresses, and each tile adds its offset to a base. A base is a number and not a pointer, because it may lie outside
//! its tensor. Only the sum of base and offset must lie inside the tensor.

use std::mem::{offset_of, size_of};
use std::ops::Range;
use std::ptr::{self, NonNull};

use crate::abi::{
    INSTEP_MAX_STATES, InstepBases, InstepControl, InstepHyper, InstepNorms, InstepRecord, InstepStepArgs,
};
use crate::error::Result;
use crate::handle::Address;
use crate::layout::{Bucket, Plan};
use crate::op::{FURTHER_CONTROLS_AT, Memory, Span};

/// The size in bytes of a cache line. The widest vector has the same size.
pub(crate) const ALIGNMENT: usize = 64;

/// Consecutive bytes of a [`Memory`] that lie at consecutive addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) base: Address,
}

/// The pieces of the caller's tensors. A stepper that borrows tensors uses these pieces instead of its own memory.
pub struct BorrowedPieces {
    pub(crate) params: Vec<Piece>,
    pub(crate) grads: Vec<Piece>,
}

impl BorrowedPieces {
    /// Returns all pieces, parameters first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Piece> {
        self.params.iter().chain(&self.grads)
    }
}

/// The pieces of one [`Memory`], in order and without overlap.
#[derive(Clone, Debug, Default)]
pub(crate) struct Region {
    pieces: Vec<Piece>,
}

impl Region {
    pub(crate) fn whole(base: NonNull<u8>, bytes: u64) -> Region {
        Region { pieces: vec![Piece { start: 0, bytes, base: Address::of(base) }] }
    }

    pub(crate) fn scattered(pieces: Vec<Piece>) -> Region {
        Region { pieces }
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.pieces.first().map_or(ptr::null_mut(), |piece| piece.base.as_ptr())
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }
}

/// Counts that determine the sizes of control memory, settings and states.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) hypers: usize,
    pub(crate) records: usize,
    /// The number of records with norms, for optimizers that scale the update by norms.
    pub(crate) norms: usize,
    /// The number of control blocks that belong to single buckets. This number is above 0 only if each bucket is
    /// clipped separately.
    pub(crate) bucket_controls: usize,
    /// Number of control blocks that belong to clip sets other than set 0. A stepper with these blocks has no blocks
    /// for single buckets.
    pub(crate) set_controls: usize,
    pub(crate) states: usize,
}

impl Counts {
    /// Returns the number of bytes of control memory: the pass's control block, the blocks of single buckets or of
    /// further clip sets, the records, and the norms of the records.
    pub(crate) fn control_bytes(&self) -> usize {
        self.norms_at() + self.norms * size_of::<InstepNorms>()
    }

    /// Returns the number of control blocks after the pass's control block.
    fn further_controls(&self) -> usize {
        self.bucket_controls + self.set_controls
    }

    fn records_at(&self) -> usize {
        let blocks = self.further_controls() * size_of::<InstepControl>();
        FURTHER_CONTROLS_AT as usize + blocks
    }

    fn norms_at(&self) -> usize {
        self.records_at() + self.records * size_of::<InstepRecord>()
    }

    /// Returns the span of some records' norms in control memory.
    pub(crate) fn norms_of(&self, records: &Range<usize>) -> Span {
        let byte = |record: usize| (self.norms_at() + record * size_of::<InstepNorms>()) as u64;
        Span { memory: Memory::Control, start: byte(records.start), end: byte(records.end) }
    }

    /// Returns the number of bytes of the settings: each optimizer's hyperparameters, then each record's learning-rate
    /// multiplier, then each record's action.
    pub(crate) fn settings_bytes(&self) -> usize {
        self.actions_at() + self.records * size_of::<u32>()
    }

    pub(crate) fn multipliers_at(&self) -> usize {
        self.hypers * size_of::<InstepHyper>()
    }

    pub(crate) fn actions_at(&self) -> usize {
        self.multipliers_at() + self.records * size_of::<f64>()
    }
}

/// All memories of one stepper.
#[derive(Clone, Debug)]
pub(crate) struct Regions {
    counts: Counts,
    control: Region,
    settings: Region,
    tensors: Vec<(Memory, Region)>,
}

impl Regions {
    /// Makes the memories of a plan. For each memory that is not in `given`, `owned` returns memory that is filled with
    /// zeros.
    pub(crate) fn new(
        plan: &Plan,
        counts: Counts,
        given: impl IntoIterator<Item = (Memory, Region)>,
        mut owned: impl FnMut(Memory, u64) -> Result<Region>,
    ) -> Result<Regions> {
        let mut given: Vec<(Memory, Region)> = given.into_iter().collect();
        let tensors = Memory::of_tensors(plan, counts.states).map(|memory| {
            let at = given.iter().position(|(known, _)| *known == memory);
            let region = at.map(|at| given.swap_remove(at).1);
            Ok((memory, region.map_or_else(|| owned(memory, Span::whole(memory, plan).bytes()), Ok)?))
        });
        let tensors = tensors.collect::<Result<_>>()?;
        Ok(Regions { tensors, ..Regions::without_tensors(counts, owned)? })
    }

    /// Makes only control memory and settings.
    pub(crate) fn without_tensors(
        counts: Counts,
        mut owned: impl FnMut(Memory, u64) -> Result<Region>,
    ) -> Result<Regions> {
        let control = owned(Memory::Control, counts.control_bytes() as u64)?;
        let settings = owned(Memory::Settings, counts.settings_bytes() as u64)?;
        Ok(Regions { counts, control, settings, tensors: Vec::new() })
    }

    fn region(&self, memory: Memory) -> &Region {
        match memory {
            Memory::Control => &self.control,
            Memory::Settings => &self.settings,
            memory => match self.tensors.iter().find(|(known, _)| *known == memory) {
                Some((_, region)) => region,
                None => panic!("the plan has no {memory:?}"),
            },
        }
    }

    /// Replaces the addresses of the caller's tensors.
    pub(crate) fn rebind(&mut self, BorrowedPieces { params, grads }: BorrowedPieces) {
        for (memory, pieces) in [(Memory::Params, params), (Memory::Grads, grads)] {
            if let Some((_, region)) = self.tensors.iter_mut().find(|(known, _)| *known == memory) {
                *region = Region::scattered(pieces);
            }
        }
    }

    /// Compares the new `pieces` of `memory` with its current pieces, and returns the new pieces that differ. `memory`
    /// is the parameters or the gradients.
    pub(crate) fn moved<'a>(
        &'a self,
        memory: Memory,
        pieces: &'a [Piece],
    ) -> impl Iterator<Item = &'a Piece> {
        let now = &self.region(memory).pieces;
        pieces.iter().zip(now).filter(|(new, now)| new != now).map(|(new, _)| new)
    }

    pub(crate) fn sizes(&self) -> impl Iterator<Item = (Memory, u64)> + '_ {
        let tensors = self.tensors.iter().map(|(memory, region)| (*memory, region.bytes()));
        let others = [(Memory::Control, self.control.bytes()), (Memory::Settings, self.settings.bytes())];
        tensors.chain(others)
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the address of a span, which must lie inside one piece of its memory.
    pub(crate) fn resolve(&self, span: Span) -> *mut u8 {
        self.find(span).unwrap_or_else(|| panic!("{span:?} is out of bounds"))
    }

    /// Returns the address of a span, or `None` if no piece contains all of it.
    pub(crate) fn find(&self, span: Span) -> Option<*mut u8> {
        if span.start == span.end {
            return Some(ptr::without_provenance_mut(ALIGNMENT));
        }
        let pieces = &self.region(span.memory).pieces;
        let next = pieces.partition_point(|piece| piece.start <= span.start);
        let piece = next.checked_sub(1).map(|at| pieces[at]);
        let inside = |piece: &Piece| span.start < span.end && span.end - piece.start <= piece.bytes;
        let piece = piece.filter(inside)?;
        Some(piece.base.as_ptr().wrapping_add((span.start - piece.start) as usize))
    }

    /// Divides a span at the ends of pieces, and returns the address and the length of each part. Bytes of the span
    /// that are in no piece are omitted.
    pub(crate) fn runs(&self, span: Span) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.region(span.memory).pieces.iter().filter_map(move |piece| {
            let (start, end) = (span.start.max(piece.start), span.end.min(piece.start + piece.bytes));
            let at = piece.base.as_ptr().addr() + start.saturating_sub(piece.start) as usize;
            (start < end).then(|| (at, end - start))
        })
    }

    /// Returns the address of one element of a bucket's gradients, in the memory that a step reads.
    pub(crate) fn gradient(&self, plan: &Plan, bucket: &Bucket, at: u64) -> *mut u8 {
        self.resolve(Span::within(Memory::Grads.of_step(plan), bucket, at, at + 1))
    }

    /// Returns the address of the pass's control block.
    pub(crate) fn control(&self) -> *mut InstepControl {
        self.control.base().cast()
    }

    /// Returns the address of the first control block after the pass's control block, and the number of these further
    /// blocks. The further blocks belong to single buckets, or to further clip sets.
    pub(crate) fn further_controls(&self) -> (*mut InstepControl, usize) {
        let first = self.control.base().wrapping_add(FURTHER_CONTROLS_AT as usize).cast();
        (first, self.counts.further_controls())
    }

    /// Returns the address of the control block for a bucket's step: the block of the bucket, of its clip set, or of
    /// the pass.
    pub(crate) fn control_of(&self, plan: &Plan, bucket: u32) -> *mut InstepControl {
        let of_set = plan.buckets()[bucket as usize].clip_set.checked_sub(1);
        let own = if self.counts.bucket_controls > 0 { Some(bucket) } else { of_set };
        own.map_or(self.control(), |own| self.further_controls().0.wrapping_add(own as usize))
    }

    pub(crate) fn records(&self) -> *mut InstepRecord {
        self.control.base().wrapping_add(self.counts.records_at()).cast()
    }

    /// Returns the address of the first record's norms, or null if there are none.
    pub(crate) fn norms(&self) -> *mut InstepNorms {
        let first = self.control.base().wrapping_add(self.counts.norms_at()).cast();
        if self.counts.norms == 0 { ptr::null_mut() } else { first }
    }

    pub(crate) fn settings(&self) -> *mut u32 {
        self.settings.base().cast()
    }

    pub(crate) fn hypers(&self) -> *mut InstepHyper {
        self.settings.base().cast()
    }

    pub(crate) fn multipliers(&self) -> *mut f64 {
        self.settings.base().wrapping_add(self.counts.multipliers_at()).cast()
    }

    pub(crate) fn actions(&self) -> *mut u32 {
        self.settings.base().wrapping_add(self.counts.actions_at()).cast()
    }
}

/// The addresses of all tensors of one bucket, or of one segment. A tensor that the step does not use has address 0.
/// This struct has the layout of [`InstepBases`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Bases {
    params: usize,
    grads: usize,
    master: usize,
    copy: usize,
    ema: usize,
    states: [usize; INSTEP_MAX_STATES as usize],
    scales: [usize; INSTEP_MAX_STATES as usize],
}

const _: () = {
    assert!(size_of::<Bases>() == size_of::<InstepBases>());
    assert!(offset_of!(Bases, ema) == offset_of!(InstepBases, ema));
    assert!(offset_of!(Bases, scales) == offset_of!(InstepBases, scales));
};

impl Bases {
    /// Sets the address of one kind of tensor.
    ///
    /// # Panics
    /// If `memory` holds no tensors.
    pub(crate) fn set(&mut self, memory: Memory, address: usize) {
        let base = match memory {
            Memory::Params => &mut self.params,
            Memory::Grads => &mut self.grads,
            Memory::Master => &mut self.master,
            Memory::Copy => &mut self.copy,
            Memory::Ema => &mut self.ema,
            Memory::State(k) => &mut self.states[usize::from(k)],
            Memory::Scales(k) => &mut self.scales[usize::from(k)],
            Memory::HostParams | Memory::HostGrads | Memory::Sums | Memory::Control | Memory::Settings => {
                panic!("{memory:?} holds no tensor of a bucket alone")
            }
        };
        *base = address;
    }

    /// Returns the base address of the parameters. A tile adds its offset to this address.
    pub(crate) fn params(&self) -> usize {
        self.params
    }

    pub(crate) fn grads(&self) -> usize {
        self.grads
    }

    /// Completes the arguments of an [unbound](super::Launch::unbound) launch.
    pub(crate) fn put(&self, args: &mut InstepStepArgs) {
        args.param_base = pointer(self.params);
        args.grads = pointer(self.grads);
        args.master = pointer(self.master);
        args.copy = pointer(self.copy);
        args.ema = pointer(self.ema);
        args.states = self.states.map(pointer);
        args.scales = self.scales.map(pointer);
    }
}

/// Converts an address to a pointer. The caller has exposed the provenance of the memory at the address.
fn pointer<T>(address: usize) -> *mut T {
    std::ptr::with_exposed_provenance_mut(address)
}
