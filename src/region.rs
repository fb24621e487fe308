//! Where the bytes of every [`Memory`] are: the one step from a span, which the checker judges, to an address.
//!
//! Addresses only, of the CPU's memory or a GPU's: nothing here reads or writes through one. Must refuse a span that
//! leaves its memory, or lies across two pieces of it, before anybody gets an address.
#![allow(unsafe_code)]

use std::mem::size_of;
use std::ptr::{self, NonNull};

use crate::abi::{InstepControl, InstepHyper, InstepSegment};
use crate::layout::Plan;
use crate::op::{Memory, Span};

/// A cache line, and the widest vector.
pub(crate) const ALIGNMENT: usize = 64;

/// A run of bytes of a [`Memory`] that lies in one piece.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) base: NonNull<u8>,
}

// SAFETY: an address and a size; whoever goes through it orders itself.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

/// Tensors of the caller's that take the place of owned memory.
pub(crate) struct BorrowedPieces {
    pub(crate) params: Vec<Piece>,
    pub(crate) grads: Vec<Piece>,
}

/// The pieces of one [`Memory`], in order and without overlap.
#[derive(Clone, Debug, Default)]
pub(crate) struct Region {
    pieces: Vec<Piece>,
}

impl Region {
    /// One that lies in one piece.
    pub(crate) fn whole(base: NonNull<u8>, bytes: u64) -> Region {
        Region { pieces: vec![Piece { start: 0, bytes, base }] }
    }

    /// One that lies in several, or in none.
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

/// Where the per-segment records start in control memory.
const SEGMENTS_AT: usize = size_of::<InstepControl>().next_multiple_of(ALIGNMENT);

/// Bytes of control memory: the pass's control block, the records, then the blocks of single buckets.
pub(crate) fn control_bytes(record_count: usize, bucket_controls: usize) -> u64 {
    (bucket_controls_at(record_count) + bucket_controls * size_of::<InstepControl>()) as u64
}

/// Where the control blocks of single buckets start in control memory.
const fn bucket_controls_at(record_count: usize) -> usize {
    SEGMENTS_AT + record_count * size_of::<InstepSegment>()
}

/// Bytes of the settings: hyperparameters per optimizer, then an action per record.
pub(crate) fn settings_bytes(group_count: usize, record_count: usize) -> u64 {
    (actions_at(group_count) + record_count * size_of::<u32>()) as u64
}

/// Where the actions start in the settings.
pub(crate) const fn actions_at(group_count: usize) -> usize {
    group_count * size_of::<InstepHyper>()
}

/// All memories of one stepper.
#[derive(Clone, Debug, Default)]
pub(crate) struct Regions {
    pub(crate) params: Region,
    pub(crate) grads: Region,
    pub(crate) control: Region,
    /// Of the records in control memory.
    pub(crate) record_count: usize,
    pub(crate) settings: Region,
    pub(crate) states: Vec<Region>,
}

impl Regions {
    fn region(&self, memory: Memory) -> &Region {
        match memory {
            Memory::Params => &self.params,
            Memory::Grads => &self.grads,
            Memory::Control => &self.control,
            Memory::Settings => &self.settings,
            Memory::State(k) => &self.states[usize::from(k)],
        }
    }

    /// How many bytes each memory takes.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = (Memory, u64)> + '_ {
        let states = (0..self.states.len()).map(|k| Memory::State(k as u8));
        let all =
            [Memory::Params, Memory::Grads, Memory::Control, Memory::Settings].into_iter().chain(states);
        all.map(|memory| (memory, self.region(memory).bytes()))
    }

    /// The first byte of a span that lies inside one piece of its memory.
    pub(crate) fn resolve(&self, span: Span) -> *mut u8 {
        if span.start == span.end {
            return ptr::without_provenance_mut(ALIGNMENT);
        }
        let pieces = &self.region(span.memory).pieces;
        let behind = pieces.partition_point(|piece| piece.start <= span.start);
        let piece = behind.checked_sub(1).map(|at| pieces[at]);
        let inside = |piece: &Piece| span.start < span.end && span.end - piece.start <= piece.bytes;
        let Some(piece) = piece.filter(inside) else {
            panic!("{span:?} is out of bounds");
        };
        piece.base.as_ptr().wrapping_add((span.start - piece.start) as usize)
    }

    /// One element of gradient memory.
    pub(crate) fn gradient(&self, plan: &Plan, at: u64) -> *mut f32 {
        self.resolve(Span::elements(Memory::Grads, plan, at, at + 1)).cast()
    }

    /// The pass's control block.
    pub(crate) fn control(&self) -> *mut InstepControl {
        self.control.base().cast()
    }

    /// The first control block of a single bucket, and how many there are: one for each bucket, or none.
    pub(crate) fn bucket_controls(&self) -> (*mut InstepControl, usize) {
        let at = bucket_controls_at(self.record_count);
        let count = (self.control.bytes() as usize - at) / size_of::<InstepControl>();
        (self.control.base().wrapping_add(at).cast(), count)
    }

    /// The control block that a bucket is stepped by: its own, or the pass's.
    pub(crate) fn control_of(&self, bucket: u32) -> *mut InstepControl {
        let (first, count) = self.bucket_controls();
        if count == 0 { self.control() } else { first.wrapping_add(bucket as usize) }
    }

    /// The first per-segment record.
    pub(crate) fn segments(&self) -> *mut InstepSegment {
        self.control.base().wrapping_add(SEGMENTS_AT).cast()
    }

    /// The first group's hyperparameters.
    pub(crate) fn groups(&self) -> *mut InstepHyper {
        self.settings.base().cast()
    }

    /// The first segment's action.
    pub(crate) fn actions(&self, group_count: usize) -> *mut u32 {
        self.settings.base().wrapping_add(actions_at(group_count)).cast()
    }
}
