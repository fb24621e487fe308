//! Memory of the host device: one aligned, zeroed arena per [`Memory`], or the caller's own tensors in its place.
//!
//! Raw by design: who may touch which bytes when is decided by the schedule and by the borrow rules of the views, not
//! here. Must never hand out a reference; it hands out pointers into bounds that it has checked.
#![allow(unsafe_code)]

use std::alloc::{Layout as AllocLayout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::abi::{InstepControl, InstepHyper, InstepSegment};
use crate::error::{Error, Result};
use crate::layout::Plan;
use crate::op::{Memory, Span};

/// A cache line, and the widest vector.
const ALIGNMENT: usize = 64;

/// What allocators give without being asked.
const ALLOCATOR_ALIGNMENT: usize = 16;

/// A huge page of x86-64 and aarch64: a step walks every arena from end to end, and misses the TLB at each small page.
const HUGE_PAGE: usize = 2 << 20;

/// One allocation, and the aligned run of zeros inside it.
struct Arena {
    base: NonNull<u8>,
    bytes: u64,
    allocation: NonNull<u8>,
    layout: AllocLayout,
}

// SAFETY: an arena is an address and a size; all access goes through raw pointers whose users order themselves.
unsafe impl Send for Arena {}
// SAFETY: as above; no method of a shared arena touches its bytes.
unsafe impl Sync for Arena {}

impl Arena {
    fn zeroed(bytes: u64) -> Result<Arena> {
        let too_large = || Error::Layout(format!("{bytes} bytes do not fit this machine's address space"));
        let size = usize::try_from(bytes.max(1)).map_err(|_| too_large())?;
        let alignment = if size >= 2 * HUGE_PAGE { HUGE_PAGE } else { ALIGNMENT };
        // Aligned by hand: an allocator that is asked for more than its own alignment writes the zeros itself, and so
        // takes every page at once, before the advice.
        let whole = size.checked_add(alignment).ok_or_else(too_large)?;
        let layout = AllocLayout::from_size_align(whole, ALLOCATOR_ALIGNMENT).map_err(|_| too_large())?;
        // SAFETY: the size is not zero.
        let allocation = unsafe { alloc_zeroed(layout) };
        let allocation = NonNull::new(allocation)
            .ok_or_else(|| Error::Layout(format!("{bytes} bytes could not be allocated")))?;
        let skipped = allocation.addr().get().next_multiple_of(alignment) - allocation.addr().get();
        // SAFETY: less than `alignment` further, which the allocation is longer than the arena.
        let base = unsafe { allocation.add(skipped) };
        if alignment == HUGE_PAGE {
            advise_huge_pages(base, size);
        }
        Ok(Arena { base, bytes: size as u64, allocation, layout })
    }
}

/// Asks for huge pages. Advice: where the system has none, or refuses, small pages serve.
fn advise_huge_pages(base: NonNull<u8>, size: usize) {
    #[cfg(target_os = "linux")]
    {
        unsafe extern "C" {
            fn madvise(address: *mut std::ffi::c_void, length: usize, advice: i32) -> i32;
        }
        const MADV_HUGEPAGE: i32 = 14;
        // SAFETY: whole pages of an allocation of our own; the advice changes no byte.
        unsafe { madvise(base.as_ptr().cast(), size & !(HUGE_PAGE - 1), MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (base, size);
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout, and nothing holds the arena any more.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) }
    }
}

/// A run of bytes of a [`Memory`] that lies in one piece.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) base: NonNull<u8>,
}

/// Where the bytes of one [`Memory`] are.
struct Region {
    /// In order, without overlap.
    pieces: Vec<Piece>,
    /// What keeps them alive, unless the caller does.
    arena: Option<Arena>,
}

// SAFETY: addresses and sizes, as in `Arena`.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn owned(bytes: u64) -> Result<Region> {
        let arena = Arena::zeroed(bytes)?;
        let pieces = vec![Piece { start: 0, bytes: arena.bytes, base: arena.base }];
        Ok(Region { pieces, arena: Some(arena) })
    }

    fn borrowed(pieces: Vec<Piece>) -> Region {
        Region { pieces, arena: None }
    }

    fn base(&self) -> *mut u8 {
        self.pieces[0].base.as_ptr()
    }

    fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }
}

/// Tensors of the caller's that take the place of owned memory.
pub(crate) struct BorrowedPieces {
    pub(crate) params: Vec<Piece>,
    pub(crate) grads: Vec<Piece>,
}

/// All memories of one stepper.
pub(crate) struct Memories {
    params: Region,
    grads: Region,
    control: Region,
    settings: Region,
    states: Vec<Region>,
    segment_count: usize,
    group_count: usize,
}

/// Where the per-segment records start in control memory.
const SEGMENTS_AT: usize = std::mem::size_of::<InstepControl>().next_multiple_of(ALIGNMENT);

/// Where the per-segment actions start in the settings, behind the groups.
const fn actions_at(group_count: usize) -> usize {
    group_count * std::mem::size_of::<InstepHyper>()
}

impl Memories {
    /// Zeroed arenas for a plan, but for what is borrowed.
    pub(crate) fn new(
        plan: &Plan,
        states: usize,
        group_count: usize,
        borrowed: Option<BorrowedPieces>,
    ) -> Result<Memories> {
        let bytes = plan.arena_len() * plan.dtype().bytes();
        let segment_count = plan.segments().len();
        let control = SEGMENTS_AT + segment_count * std::mem::size_of::<InstepSegment>();
        let (params, grads) = match borrowed {
            None => (Region::owned(bytes)?, Region::owned(plan.grads_len() * plan.dtype().bytes())?),
            Some(borrowed) => (Region::borrowed(borrowed.params), Region::borrowed(borrowed.grads)),
        };
        Ok(Memories {
            params,
            grads,
            control: Region::owned(control as u64)?,
            settings: Region::owned(
                (actions_at(group_count) + segment_count * std::mem::size_of::<u32>()) as u64,
            )?,
            states: (0..states).map(|_| Region::owned(bytes)).collect::<Result<_>>()?,
            segment_count,
            group_count,
        })
    }

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

    /// Whether some of it is the caller's.
    pub(crate) fn are_borrowed(&self) -> bool {
        self.params.arena.is_none()
    }

    /// The first byte of a span that lies inside one piece of its memory.
    pub(crate) fn resolve(&self, span: Span) -> *mut u8 {
        if span.start == span.end {
            return std::ptr::without_provenance_mut(ALIGNMENT);
        }
        let pieces = &self.region(span.memory).pieces;
        let behind = pieces.partition_point(|piece| piece.start <= span.start);
        let piece = behind.checked_sub(1).map(|at| pieces[at]);
        let inside = |piece: &Piece| span.start < span.end && span.end - piece.start <= piece.bytes;
        let Some(piece) = piece.filter(inside) else {
            panic!("{span:?} is out of bounds");
        };
        // SAFETY: the offset is within the piece, as has just been seen.
        unsafe { piece.base.as_ptr().add((span.start - piece.start) as usize) }
    }

    /// The control block.
    pub(crate) fn control(&self) -> *mut InstepControl {
        self.control.base().cast()
    }

    /// The first per-segment record.
    pub(crate) fn segments(&self) -> *mut InstepSegment {
        // SAFETY: `new` made room for the records behind this offset, which keeps their alignment.
        unsafe { self.control.base().add(SEGMENTS_AT).cast() }
    }

    /// The first group's hyperparameters.
    pub(crate) fn groups(&self) -> *mut InstepHyper {
        self.settings.base().cast()
    }

    /// The first segment's action.
    pub(crate) fn actions(&self) -> *mut u32 {
        // SAFETY: `new` made room for the actions behind this offset, which keeps their alignment.
        unsafe { self.settings.base().add(actions_at(self.group_count)).cast() }
    }

    /// Sets one group's hyperparameters.
    ///
    /// # Safety
    /// No Begin is running, and none that has been submitted is still to run.
    pub(crate) unsafe fn write_group(&self, group: usize, hyper: InstepHyper) {
        assert!(group < self.group_count);
        // SAFETY: within bounds by the assertion, aligned, and read by nobody now, by the contract.
        unsafe { self.groups().add(group).write(hyper) }
    }

    /// Sets what steps do with one segment.
    ///
    /// # Safety
    /// As for [`write_group`](Self::write_group).
    pub(crate) unsafe fn write_action(&self, segment: usize, action: u32) {
        assert!(segment < self.segment_count);
        // SAFETY: as in `write_group`.
        unsafe { self.actions().add(segment).write(action) }
    }

    /// A copy of the control block.
    ///
    /// # Safety
    /// No op that writes control memory is running.
    pub(crate) unsafe fn read_control(&self) -> InstepControl {
        // SAFETY: aligned and allocated for it; zero bytes are a valid value; not written now, by the contract.
        unsafe { self.control().read() }
    }

    /// A copy of one segment's record.
    ///
    /// # Safety
    /// No op that writes control memory is running.
    pub(crate) unsafe fn read_segment(&self, segment: usize) -> InstepSegment {
        assert!(segment < self.segment_count);
        // SAFETY: within bounds by the assertion, otherwise as in `read_control`.
        unsafe { self.segments().add(segment).read() }
    }
    /// Says how many updates a segment has had.
    ///
    /// # Safety
    /// No op that touches control memory is running, and none that has been submitted is still to run.
    pub(crate) unsafe fn write_step_count(&self, segment: usize, count: u64) {
        assert!(segment < self.segment_count);
        // SAFETY: within bounds by the assertion, aligned, and touched by nobody now, by the contract.
        unsafe {
            let record = self.segments().add(segment);
            (*record).steps = count;
            (*record).stepped = 0;
        }
    }
}
